import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms.value_loss import clipped_value_loss

# value, old value, return, loss at clip 0.5, its gradient, whether it is clipped
CASES = [
    (1.0, 1.0, 3.0, 2.0, -2.0, False),
    (2.0, 1.0, 3.0, 1.125, 0.0, True),  # held at 1.5, from where the return is 1.5 away
    (0.0, 1.0, 3.0, 4.5, -3.0, False),  # moved away: the larger loss is its own
    (4.0, 1.0, 3.0, 1.125, 0.0, True),  # past the return, and still held
    (1.4, 1.0, 1.4, 0.0, 0.0, False),
]


@pytest.mark.parametrize(("value", "old", "target", "loss", "slope", "clipped"), CASES)
def test_values_and_gradients(value, old, target, loss, slope, clipped):
    def loss_of(value):
        return clipped_value_loss(value, jnp.float32(old), jnp.float32(target), 0.5)

    (found, is_clipped), gradient = jax.value_and_grad(loss_of, has_aux=True)(jnp.float32(value))
    np.testing.assert_allclose(found, loss, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-6)
    assert bool(is_clipped) is clipped


def test_without_a_bound_it_is_half_the_square():
    loss, is_clipped = clipped_value_loss(jnp.float32(9), jnp.float32(0), jnp.float32(1), None)
    assert loss == 32.0
    assert not is_clipped
