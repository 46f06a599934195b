"""Weights for rollouts of an older policy than the one that the update starts from."""

from typing import Literal, NamedTuple

import numpy as np

from rl.algorithms.policy_loss import LOG_RATIO_BOUND

Level = Literal["token", "sequence"]


class OffPolicy(NamedTuple):
    """Truncated weights of each token, float32 and 0 outside the mask, and what they say.

    `effective_share` is the effective sample size (sum w)^2 / sum w^2 (Kish 1965) over the number
    of weights, 1 where all are equal; `truncated_share` of the weights were above the cap, and
    `ratio_mean` is their mean before truncation, near 1 as long as there are enough samples.
    """

    weights: np.ndarray
    effective_share: float
    truncated_share: float
    ratio_mean: float


def off_policy_weights(
    proximal_logprobs: np.ndarray,
    rollout_logprobs: np.ndarray,
    completion_mask: np.ndarray,
    level: Level,
    cap: float,
) -> OffPolicy:
    """min(proximal / behaviour, cap) for each token, or for each sequence as a whole.

    Truncated importance sampling (Ionides, "Truncated Importance Sampling", 2008): the cap bounds
    the variance that stale rollouts bring, at the price of a bias. A token's own ratio is what
    V-trace truncates (IMPALA, arXiv:1802.01561, section 4.1), and leaves out that the prefix came
    from the older policy too; a sequence's ratio, the product over its tokens, leaves out nothing
    and varies more. All arrays are [..., T]; a sequence's weight stands at each of its tokens.

    What lies outside the mask counts nowhere, NaN included.
    """
    mask = np.asarray(completion_mask, bool)
    proximal, rollout = (
        np.where(mask, values, 0.0).astype(np.float64)
        for values in (proximal_logprobs, rollout_logprobs)
    )
    log_ratio, is_weight = proximal - rollout, mask
    if level == "sequence":
        log_ratio = log_ratio.sum(axis=-1, keepdims=True)
        is_weight = mask.any(axis=-1, keepdims=True)
    elif level != "token":
        raise ValueError(f"unknown level {level!r} of off-policy weights: expected token, sequence")
    ratio = np.exp(np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    weight = np.minimum(ratio, cap)
    counted, num_weights = weight[is_weight], max(int(is_weight.sum()), 1)
    squares = np.sum(counted**2)
    return OffPolicy(
        weights=np.where(mask, weight, 0.0).astype(np.float32),
        effective_share=float(counted.sum() ** 2 / squares / num_weights) if squares else 1.0,
        truncated_share=float(np.sum(ratio[is_weight] > cap) / num_weights),
        ratio_mean=float(ratio[is_weight].sum() / num_weights) if is_weight.any() else 1.0,
    )
