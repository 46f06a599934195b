"""Expectations are exact: sums over a small vocabulary, each word weighted by its probability."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.algorithms.kl import kl_estimate, kl_values
from rl.algorithms.policy_loss import probability_ratio

ESTIMATORS = ["k1", "k2", "k3"]
logits = st.lists(st.floats(-3, 3, width=32), min_size=5, max_size=5).map(
    lambda values: jnp.array(values, jnp.float32)
)


def reverse_kl(policy_logits, reference_logits):
    policy, reference = jax.nn.log_softmax(policy_logits), jax.nn.log_softmax(reference_logits)
    return jnp.sum(jnp.exp(policy) * (policy - reference))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # policy 1/2, reference 1/4: d = log 2; policy 1/4, reference 1/2: d = -log 2.
        ("k1", [np.log(2), -np.log(2), 0.0]),
        ("k2", [np.log(2) ** 2 / 2, np.log(2) ** 2 / 2, 0.0]),
        ("k3", [np.log(2) - 0.5, 1 - np.log(2), 0.0]),
    ],
)
def test_values(estimator, expected, transform):
    policy, reference = jnp.log(jnp.array([0.5, 0.25, 0.3])), jnp.log(jnp.array([0.25, 0.5, 0.3]))
    estimate = transform(lambda p, r: kl_estimate(p, r, estimator))(policy, reference)
    np.testing.assert_allclose(estimate, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [np.log(2), -np.log(2), np.nan]),
        ("k2", [np.log(2) ** 2 / 2, np.log(2) ** 2 / 2, np.nan]),
        ("k3", [np.log(2) - 0.5, 1 - np.log(2), np.nan]),
    ],
)
def test_values_for_a_penalty_in_the_reward(estimator, expected):
    policy, reference = np.log([0.5, 0.25, 1.0]), np.log([0.25, 0.5, 1.0])
    policy[2] = np.nan  # outside a mask
    found = kl_values(policy.astype(np.float32), reference, estimator)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.dtype == np.float64


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_ratio_weights_the_value(estimator):
    policy, reference = jnp.array([-1.0, -2.0]), jnp.array([-2.0, -1.0])
    plain = kl_estimate(policy, reference, estimator)
    weighted = kl_estimate(policy, reference, estimator, jnp.array([2.0, 0.5]))
    np.testing.assert_allclose(weighted, plain * np.array([2.0, 0.5]), rtol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(policy_logits=logits, reference_logits=logits)
def test_on_policy_gradient_is_that_of_the_reverse_kl(estimator, policy_logits, reference_logits):
    probabilities = jax.nn.softmax(policy_logits)  # where the words were drawn from: constant

    def expectation(policy_logits):
        policy, reference = jax.nn.log_softmax(policy_logits), jax.nn.log_softmax(reference_logits)
        return jnp.sum(probabilities * kl_estimate(policy, reference, estimator))

    value, gradient = jax.value_and_grad(expectation)(policy_logits)
    exact_value, exact = jax.value_and_grad(reverse_kl)(policy_logits, reference_logits)
    np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=1e-5)
    if estimator != "k2":  # k2's value is biased
        np.testing.assert_allclose(value, exact_value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(policy_logits=logits, proximal_logits=logits, reference_logits=logits)
def test_off_policy_gradient_with_the_ratio_is_that_of_the_reverse_kl(
    estimator, policy_logits, proximal_logits, reference_logits
):
    proximal = jax.nn.log_softmax(proximal_logits)

    def expectation(policy_logits):
        policy, reference = jax.nn.log_softmax(policy_logits), jax.nn.log_softmax(reference_logits)
        ratio = probability_ratio(policy, proximal)
        return jnp.sum(jnp.exp(proximal) * kl_estimate(policy, reference, estimator, ratio))

    value, gradient = jax.value_and_grad(expectation)(policy_logits)
    exact_value, exact = jax.value_and_grad(reverse_kl)(policy_logits, reference_logits)
    np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=1e-5)
    if estimator != "k2":
        np.testing.assert_allclose(value, exact_value, rtol=1e-4, atol=1e-5)


def test_the_reference_gets_no_gradient():
    gradient = jax.grad(lambda r: kl_estimate(jnp.array([-1.0]), r, "k3").sum())(jnp.array([-2.0]))
    np.testing.assert_array_equal(gradient, 0.0)


def test_an_absurd_difference_stays_finite():
    value, gradient = jax.value_and_grad(lambda p: kl_estimate(p, jnp.float32(0), "k3"))(
        jnp.float32(-500)
    )
    assert np.isfinite(value)
    assert np.isfinite(gradient)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(jnp.zeros(1), jnp.zeros(1), "k4")
    with pytest.raises(ValueError, match="k4"):
        kl_values(np.zeros(1), np.zeros(1), "k4")
