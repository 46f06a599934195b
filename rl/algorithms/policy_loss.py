"""The policy-gradient loss of a token: a ratio of probabilities, and what keeps it near 1.

Three policies meet here: *behaviour* sampled the tokens, *proximal* is where the update starts,
*current* is being differentiated. The ratio is current / proximal; the off-policy weight is
proximal / behaviour.
"""

from typing import Literal

import jax
import jax.numpy as jnp

RatioLevel = Literal["token", "sequence"]
ClipKind = Literal["ppo", "dual", "cispo", "none"]

# exp(20) = 5e8: far beyond any ratio that training survives, and far below float32's overflow,
# whose infinity would turn the gradient of an unused branch into NaN.
LOG_RATIO_BOUND = 20.0


def probability_ratio(logprobs: jax.Array, base_logprobs: jax.Array) -> jax.Array:
    """exp(logprobs - base_logprobs), any shape; exactly 1 where they are equal."""
    return _bounded_exp(logprobs - base_logprobs)


def importance_ratio(
    policy_logprobs: jax.Array,
    proximal_logprobs: jax.Array,
    level: RatioLevel,
    is_trained: jax.Array,
    segments: jax.Array,
) -> jax.Array:
    """current / proximal of each token, or of the sequence that it belongs to; exactly 1 where
    they agree, and on tokens that are not trained on.

    Arrays are [..., T], and sequences lie whole in one row of T places: `segments` holds the number
    of each place's sequence within its row. A sequence's ratio is the geometric mean of those of
    its trained tokens (GSPO, arXiv:2507.18071, equation 7), and its gradient is that of the whole
    sequence's.
    """
    proximal = jax.lax.stop_gradient(proximal_logprobs)
    log_ratio = jnp.where(is_trained, policy_logprobs - proximal, 0.0)
    if level == "token":
        return _bounded_exp(log_ratio)
    if level != "sequence":
        raise ValueError(f"unknown level {level!r} of a ratio: expected token or sequence")
    is_mate = (segments[..., :, None] == segments[..., None, :]) & is_trained[..., None, :]
    weights = is_mate / jnp.maximum(is_mate.sum(axis=-1, keepdims=True), 1)
    # By default an accelerator rounds to fewer bits than bounds of 3e-4 leave room for.
    mean = jnp.einsum(
        "...ts,...s->...t",
        *(weights.astype(log_ratio.dtype), log_ratio),
        precision=jax.lax.Precision.HIGHEST,
    )
    return _bounded_exp(jnp.where(is_trained, mean, 0.0))


def clipped_loss(
    kind: ClipKind,
    ratio: jax.Array,
    policy_logprobs: jax.Array,
    advantages: jax.Array,
    low: float | None,
    high: float,
    dual: float,
) -> tuple[jax.Array, jax.Array]:
    """(loss, is_clipped) of each token; all arrays have one shape.

    ppo: -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), PPO (arXiv:1707.06347), equation 7,
        with the two bounds of DAPO (arXiv:2503.14476).
    dual: that, and where A < 0 at most -dual * A (arXiv:1912.09729, equation 5).
    cispo: -clip(ratio) * A * log(current), where the clipped ratio is a constant to the gradient,
        so that every token keeps one (MiniMax-M1, arXiv:2506.13585, equation 4).
    none: -ratio * A.

    `low` None is no bound below. `is_clipped` marks tokens whose ratio has left a bound: of ppo and
    dual on the side that the advantage pushes towards, where the gradient is 0. A ratio exactly on
    a bound is not clipped.
    """
    is_over = ratio > 1.0 + high
    is_under = jnp.zeros_like(is_over) if low is None else ratio < 1.0 - low
    lowest = 0.0 if low is None else 1.0 - low
    if kind == "none":
        return -ratio * advantages, jnp.zeros_like(is_over)
    if kind == "cispo":
        bounded = jnp.where(is_over, 1.0 + high, jnp.where(is_under, lowest, ratio))
        loss = -jax.lax.stop_gradient(bounded) * advantages * policy_logprobs
        return loss, is_over | is_under
    if kind not in ("ppo", "dual"):
        raise ValueError(f"unknown kind of clipping {kind!r}")
    is_above, is_below = is_over & (advantages > 0), is_under & (advantages < 0)
    # Selected rather than taken as a minimum, whose gradient is halved where both sides are equal.
    bounded = jnp.where(is_above, 1.0 + high, jnp.where(is_below, lowest, ratio))
    if kind == "ppo":
        return -bounded * advantages, is_above | is_below
    is_beyond = (ratio > dual) & (advantages < 0)
    return -jnp.where(is_beyond, dual, bounded) * advantages, is_above | is_below | is_beyond


def _bounded_exp(log_ratio: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
