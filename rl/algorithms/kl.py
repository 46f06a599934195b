"""Estimates of KL(policy || reference) from the log-probabilities of sampled tokens."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from rl.algorithms.policy_loss import LOG_RATIO_BOUND

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    policy_logprobs: jax.Array,
    reference_logprobs: jax.Array,
    estimator: Estimator,
    ratio: jax.Array | None = None,
) -> jax.Array:
    """One estimate for each token, any one shape; all three have the gradient of the KL itself.

    With d = policy_logprobs - reference_logprobs the values are Schulman's ("Approximating KL
    Divergence", 2020): k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, positive),
    k3 = exp(-d) - 1 + d (unbiased, positive).

    Differentiating those values is wrong for two of them: the expected gradient of k1 is 0 and that
    of k3 belongs to the forward KL. The gradient of E[log(policy / reference)] is
    E[d * grad log policy], which is that of k2 (Tang and Munos, arXiv:2506.09477; "Rethinking KL
    Regularization in RLHF", arXiv:2510.01555); so each value carries k2's gradient. It is that of
    the token's own distribution given its prefix: what a token does to the KL of later ones is
    left out, which only a KL inside the reward can count.

    `ratio` is current / proximal where the tokens were drawn from the proximal policy and the
    current one has moved: value and gradient are weighted by it, and it is a constant to the
    gradient. None means on-policy.
    """
    log_ratio = policy_logprobs - jax.lax.stop_gradient(reference_logprobs)
    value, surrogate = _value(log_ratio, estimator), 0.5 * log_ratio**2
    if ratio is not None:
        weight = jax.lax.stop_gradient(ratio)
        value, surrogate = weight * value, weight * surrogate
    return jax.lax.stop_gradient(value) + (surrogate - jax.lax.stop_gradient(surrogate))


def kl_values(
    policy_logprobs: np.ndarray, reference_logprobs: np.ndarray, estimator: Estimator
) -> np.ndarray:
    """The estimators' values alone, float64 on the host: for a penalty inside the reward."""
    policy, reference = (np.asarray(x, np.float64) for x in (policy_logprobs, reference_logprobs))
    return _value(policy - reference, estimator, np)


def _value(log_ratio, estimator, numpy=jnp):
    """With JAX's or plain NumPy's functions."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    if estimator == "k3":
        return numpy.expm1(numpy.minimum(-log_ratio, LOG_RATIO_BOUND)) + log_ratio
    raise ValueError(f"unknown KL estimator {estimator!r}: expected k1, k2 or k3")
