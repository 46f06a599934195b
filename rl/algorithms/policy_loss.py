"""The clipped policy-gradient loss and the ratios of probabilities that it needs.

Three policies meet here: *behaviour* sampled the tokens, *proximal* is where the update starts,
*current* is being differentiated. The ratio is current / proximal; the off-policy weight is
proximal / behaviour.
"""

import jax
import jax.numpy as jnp

# exp(20) = 5e8: far beyond any ratio that training survives, and far below float32's overflow,
# whose infinity would turn the gradient of an unused branch into NaN.
LOG_RATIO_BOUND = 20.0


def probability_ratio(logprobs: jax.Array, base_logprobs: jax.Array) -> jax.Array:
    """exp(logprobs - base_logprobs), any shape; exactly 1 where they are equal."""
    return jnp.exp(jnp.clip(logprobs - base_logprobs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def clipped_ratio_loss(
    policy_logprobs: jax.Array,
    proximal_logprobs: jax.Array,
    advantages: jax.Array,
    clip_low: float,
    clip_high: float,
) -> tuple[jax.Array, jax.Array]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) for each token.

    PPO (arXiv:1707.06347), equation 7, with the two bounds of DAPO (arXiv:2503.14476). All arrays
    have one shape, and the loss and the boolean `is_clipped` that are returned have it too.
    `is_clipped` marks tokens whose ratio has left its bound on the side that the advantage pushes
    towards: their gradient is 0. A ratio exactly on a bound is not clipped.
    """
    ratio = probability_ratio(policy_logprobs, jax.lax.stop_gradient(proximal_logprobs))
    is_above = (advantages > 0) & (ratio > 1.0 + clip_high)
    is_below = (advantages < 0) & (ratio < 1.0 - clip_low)
    # Selected rather than taken as a minimum, whose gradient is halved where both sides are equal.
    ratio = jnp.where(is_above, 1.0 + clip_high, jnp.where(is_below, 1.0 - clip_low, ratio))
    return -ratio * advantages, is_above | is_below
