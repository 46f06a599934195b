import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.algorithms.off_policy import off_policy_weights
from rl.algorithms.policy_loss import clipped_ratio_loss, probability_ratio

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


# Two sequences of three tokens; the last of the second is masked, and holds nothing to read.
PROXIMAL = np.log([[0.5, 0.2, 0.9], [0.3, 0.3, 1.0]]).astype(np.float32)
BEHAVIOUR = np.log([[0.25, 0.4, 0.1], [0.3, 0.6, 1.0]]).astype(np.float32)
MASK = np.array([[True, True, True], [True, True, False]])
PROXIMAL[1, 2], BEHAVIOUR[1, 2] = np.nan, -np.inf


def test_off_policy_weights_of_tokens():
    found = off_policy_weights(PROXIMAL, BEHAVIOUR, MASK, "token", 3.0)
    np.testing.assert_allclose(found.weights, [[2.0, 0.5, 3.0], [1.0, 0.5, 0.0]], rtol=1e-6)
    assert found.weights.dtype == np.float32
    assert found.effective_share == pytest.approx(7.0**2 / (4 + 0.25 + 9 + 1 + 0.25) / 5)
    assert found.truncated_share == pytest.approx(1 / 5)
    assert found.ratio_mean == pytest.approx((2 + 0.5 + 9 + 1 + 0.5) / 5)


def test_off_policy_weights_of_sequences_are_the_products_over_their_tokens():
    found = off_policy_weights(PROXIMAL, BEHAVIOUR, MASK, "sequence", 4.0)
    np.testing.assert_allclose(found.weights, [[4.0] * 3, [0.5, 0.5, 0.0]], rtol=1e-6)
    assert found.effective_share == pytest.approx(4.5**2 / (16 + 0.25) / 2)
    assert found.truncated_share == pytest.approx(1 / 2)
    assert found.ratio_mean == pytest.approx((9 + 0.5) / 2)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollouts_of_the_proximal_policy_weigh_exactly_one(level):
    found = off_policy_weights(PROXIMAL, PROXIMAL, MASK, level, 1.0)
    np.testing.assert_array_equal(found.weights, MASK)
    assert found[1:] == (1.0, 0.0, 1.0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_absurd_off_policy_ratios_stay_finite(level):
    far = np.where(MASK, -1000.0, 0.0)
    small = off_policy_weights(far, np.zeros((2, 3)), MASK, level, 2.0)
    large = off_policy_weights(np.zeros((2, 3)), far, MASK, level, 2.0)
    np.testing.assert_array_equal(large.weights, 2.0 * MASK)
    assert (small.weights[MASK] < 1e-8).all()
    assert np.isfinite([*small[1:], *large[1:]]).all()
    assert large.truncated_share == 1.0


def test_no_token_at_all_has_no_weight():
    found = off_policy_weights(PROXIMAL, BEHAVIOUR, np.zeros((2, 3), bool), "token", 2.0)
    np.testing.assert_array_equal(found.weights, 0.0)
    assert found[1:] == (1.0, 0.0, 1.0)
