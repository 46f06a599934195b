"""The loss of a micro-batch: its differentiable value, and the sums that the figures need."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl.algorithms.aggregation import Aggregation
from rl.algorithms.kl import Estimator, kl_estimate
from rl.algorithms.policy_loss import (
    ClipKind,
    RatioLevel,
    clipped_loss,
    importance_ratio,
    probability_ratio,
)
from rl.algorithms.value_loss import clipped_value_loss
from rl.models.packed import Packed

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """policy loss + kl_coefficient * KL - entropy_coefficient * entropy, token by token.

    The numbers are traced, so that another value runs the same compiled program; None switches a
    term off and is another program.

    ratio: whose ratio a token has, its own or its sequence's.
    clip: what bounds the ratio; clip_low, clip_high: how far below and above 1 it may push, None
        for no bound below; clip_dual: its bound where the advantage is negative.
    kl_coefficient: weight of the KL to the reference; 0 still reports the KL of a batch that has
        reference log-probabilities.
    entropy_coefficient: weight of the entropy bonus; None or 0 for none.
    aggregation, max_tokens: see `token_weights`.
    """

    ratio: RatioLevel = field(metadata=_STATIC)
    clip: ClipKind = field(metadata=_STATIC)
    clip_low: float | None
    clip_high: float
    clip_dual: float
    kl_coefficient: float
    kl_estimator: Estimator = field(metadata=_STATIC)
    entropy_coefficient: float | None
    aggregation: Aggregation = field(metadata=_STATIC)
    max_tokens: int | None = field(metadata=_STATIC)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ValueLossConfig:
    """clip: how far a value may move from what it was before the update; None for no bound."""

    clip: float | None


class MicroBatch(NamedTuple):
    """Packed completions of a batch, [P, B, T]: arrays for one run of the gradient program.

    A token of weight 0 is not trained on; its log-probabilities here are 0, whatever the batch
    held. No proximal log-probabilities means that the current policy is the proximal one; no
    reference ones, that there is no KL; no off-policy weights, that the proximal policy sampled;
    no values and returns, that a policy is trained and no critic.
    """

    packed: Packed
    temperature: jax.Array
    weights_PBT: jax.Array
    advantages_PBT: jax.Array
    rollout_logprobs_PBT: jax.Array
    proximal_logprobs_PBT: jax.Array | None
    reference_logprobs_PBT: jax.Array | None
    off_policy_weights_PBT: jax.Array | None
    values_PBT: jax.Array | None
    returns_PBT: jax.Array | None


Sums = dict[str, jax.Array]
"""Scalars over a micro-batch's trained tokens. `loss` and `policy_loss` are parts of the batch's,
the rest are weighted sums beside the sum of `weight`; `drift` and `anchor_drift` are summed over
`num_tokens`, and `drift_max` is a maximum."""


def reinforcement_loss(
    config: LossConfig, rows: MicroBatch, logprobs_PBT: jax.Array, entropy_PBT: jax.Array
) -> tuple[jax.Array, Sums]:
    """This micro-batch's part of the loss, and its sums."""
    weights, is_trained = rows.weights_PBT, rows.weights_PBT > 0
    policy = jnp.where(is_trained, logprobs_PBT, 0.0)
    entropy = jnp.where(is_trained, entropy_PBT, 0.0)
    is_on_policy = rows.proximal_logprobs_PBT is None
    proximal = jax.lax.stop_gradient(policy) if is_on_policy else rows.proximal_logprobs_PBT
    segments = rows.packed.segments_PBT
    ratio = importance_ratio(policy, proximal, config.ratio, is_trained, segments)

    policy_loss, is_clipped = clipped_loss(
        *(config.clip, ratio, policy, rows.advantages_PBT),
        *(config.clip_low, config.clip_high, config.clip_dual),
    )
    if rows.off_policy_weights_PBT is not None:
        weights = weights * rows.off_policy_weights_PBT
    token_loss = policy_loss
    values = {"ratio": ratio, "clipped": is_clipped, "entropy": entropy}
    if rows.reference_logprobs_PBT is not None:
        kl = kl_estimate(
            policy,
            rows.reference_logprobs_PBT,
            config.kl_estimator,
            None if is_on_policy else probability_ratio(policy, proximal),
        )
        token_loss = token_loss + config.kl_coefficient * kl
        values["kl"] = kl
    if config.entropy_coefficient is not None:
        token_loss = token_loss - config.entropy_coefficient * entropy

    loss = jnp.sum(weights * token_loss)
    sums = {"loss": loss, "policy_loss": jnp.sum(weights * policy_loss)}
    sums |= {name: jnp.sum(rows.weights_PBT * value) for name, value in values.items()}
    sums |= _drift(policy, rows) | {"weight": jnp.sum(rows.weights_PBT)}
    return loss, jax.lax.stop_gradient(sums)


def value_loss(
    config: ValueLossConfig, rows: MicroBatch, values_PBT: jax.Array
) -> tuple[jax.Array, Sums]:
    """This micro-batch's part of the critic's loss, and its sums."""
    values = jnp.where(rows.weights_PBT > 0, values_PBT, 0.0)
    losses, is_clipped = clipped_value_loss(values, rows.values_PBT, rows.returns_PBT, config.clip)
    loss = jnp.sum(rows.weights_PBT * losses)
    sums = {"loss": loss, "weight": jnp.sum(rows.weights_PBT)}
    sums |= {"clipped": jnp.sum(rows.weights_PBT * is_clipped)}
    return loss, jax.lax.stop_gradient(sums)


def supervised_loss(
    config: None, rows: MicroBatch, logprobs_PBT: jax.Array, entropy_PBT: jax.Array
) -> tuple[jax.Array, Sums]:
    """This micro-batch's part of the negative log-likelihood, and its sums."""
    is_trained = rows.weights_PBT > 0
    loss = -jnp.sum(rows.weights_PBT * jnp.where(is_trained, logprobs_PBT, 0.0))
    entropy = jnp.sum(rows.weights_PBT * jnp.where(is_trained, entropy_PBT, 0.0))
    sums = {"loss": loss, "entropy": entropy, "weight": jnp.sum(rows.weights_PBT)}
    return loss, jax.lax.stop_gradient(sums)


def _drift(policy: jax.Array, rows: MicroBatch) -> Sums:
    """How far the sampler's log-probabilities are from the trainer's, and the proximal policy's
    from those of the policy that the update starts from, which it should be."""
    is_trained = rows.weights_PBT > 0
    drift = jnp.where(is_trained, jnp.abs(policy - rows.rollout_logprobs_PBT), 0.0)
    sums = {"drift": drift.sum(), "drift_max": drift.max(), "num_tokens": is_trained.sum()}
    if rows.proximal_logprobs_PBT is not None:
        anchor = jnp.where(is_trained, jnp.abs(policy - rows.proximal_logprobs_PBT), 0.0)
        sums["anchor_drift"] = anchor.sum()
    return sums
