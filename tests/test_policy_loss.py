import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.algorithms.policy_loss import clipped_ratio_loss, off_policy_weight, probability_ratio

# ratio, advantage, loss and whether it is clipped, at bounds 0.2 below and 0.3 above.
CASES = [
    (1.0, 2.0, -2.0, False),
    (1.25, 2.0, -2.5, False),
    (1.5, 2.0, -2.6, True),  # held at 1.3
    (0.5, 2.0, -1.0, False),  # pushed back up: no bound
    (0.9, -1.0, 0.9, False),
    (0.5, -1.0, 0.8, True),  # held at 0.8
    (1.5, -1.0, 1.5, False),  # pushed back down: no bound
    (1.5, 0.0, 0.0, False),
]
RATIO, ADVANTAGE, LOSS, IS_CLIPPED = (np.array(column) for column in zip(*CASES, strict=True))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_values(transform):
    proximal = jnp.full(len(CASES), -1.5)
    policy = proximal + jnp.log(RATIO)
    loss, is_clipped = transform(clipped_ratio_loss)(policy, proximal, ADVANTAGE, 0.2, 0.3)
    np.testing.assert_allclose(loss, LOSS, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(is_clipped, IS_CLIPPED)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_gradient_is_minus_ratio_times_advantage_and_zero_where_clipped(transform):
    proximal = jnp.full(len(CASES), -1.5)

    def total(policy, proximal):
        return clipped_ratio_loss(policy, proximal, jnp.asarray(ADVANTAGE), 0.2, 0.3)[0].sum()

    policy = proximal + jnp.log(RATIO)
    of_policy, of_proximal = transform(jax.grad(total, argnums=(0, 1)))(policy, proximal)
    expected = np.where(IS_CLIPPED, 0.0, -RATIO * ADVANTAGE)
    np.testing.assert_allclose(of_policy, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(of_proximal, 0.0)


@settings(deadline=None)
@given(
    st.lists(st.floats(-60, 0, width=32), min_size=1, max_size=8),
    st.floats(-5, 5, width=32),
    st.sampled_from([0.0, 0.2]),
)
def test_on_policy_the_ratio_is_exactly_one(logprobs, advantage, clip):
    logprobs = jnp.array(logprobs, jnp.float32)
    advantages = jnp.full_like(logprobs, advantage)

    def total(policy):
        loss, is_clipped = clipped_ratio_loss(policy, logprobs, advantages, clip, clip)
        return loss.sum(), (loss, is_clipped)

    gradient, (loss, is_clipped) = jax.grad(total, has_aux=True)(logprobs)
    np.testing.assert_array_equal(probability_ratio(logprobs, logprobs), 1.0)
    np.testing.assert_array_equal(loss, -advantages)
    np.testing.assert_array_equal(gradient, -advantages)  # whole, even on a bound of width 0
    assert not is_clipped.any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-1000.0, 1000.0])
def test_an_absurd_ratio_has_a_finite_loss_and_gradient(advantage, log_ratio):
    def loss(policy):
        return clipped_ratio_loss(policy, jnp.float32(-1.0), jnp.float32(advantage), 0.2, 0.2)[0]

    value, gradient = jax.value_and_grad(loss)(jnp.float32(-1.0 + log_ratio))
    assert np.isfinite(value)
    assert np.isfinite(gradient)


def test_off_policy_weight_is_capped_and_a_constant():
    proximal, rollout = jnp.log(jnp.array([0.5, 0.2, 0.9])), jnp.log(jnp.array([0.25, 0.4, 0.1]))
    np.testing.assert_allclose(
        off_policy_weight(proximal, rollout, 3.0), [2.0, 0.5, 3.0], rtol=1e-6
    )
    gradient = jax.grad(lambda p: off_policy_weight(p, rollout, 3.0).sum())(proximal)
    np.testing.assert_array_equal(gradient, 0.0)
