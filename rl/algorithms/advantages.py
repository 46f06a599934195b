"""Group-relative advantages: a completion is judged against the others of its own prompt."""

from typing import Literal

import numpy as np

from rl.errors import MeshdialError

GroupEstimator = Literal["group_zscore", "group_mean", "leave_one_out"]
Deviation = Literal["population", "sample"]

# A weighted sum of reward components rounds differently from sample to sample. A spread below this
# (relative to the rewards, absolute below one) is such rounding, and dividing by it would turn
# noise into advantages of full size.
_ROUNDING = 1e-9


def group_advantages(
    rewards,
    group_ids,
    is_counted,
    estimator: GroupEstimator = "group_zscore",
    deviation: Deviation = "population",
    epsilon: float = 1e-6,
) -> tuple[np.ndarray, np.ndarray]:
    """The reward of each sample against those of its group, in float64 on the host.

    group_zscore: (reward - mean) / (deviation + epsilon); DeepSeekMath (arXiv:2402.03300), section
        4.1.2. `deviation` is of the population or of the sample (n - 1, as PyTorch's `std`).
    group_mean: reward - mean; Dr. GRPO (arXiv:2503.20783).
    leave_one_out: reward - the mean of the others; RLOO (arXiv:2402.14740).

    Arguments are of length N, one entry a sample, in any order: `rewards`, `group_ids` (strings or
    integers), boolean `is_counted`. A sample that does not count (it was not scored) is in no mean
    and no deviation, whatever its reward says, and its advantage is 0.

    Returns (float32 advantages, is_degenerate): a group is degenerate when fewer than two of its
    rewards differ by more than rounding; all its advantages are then exactly 0.
    Raises MeshdialError where a reward that counts is not finite.
    """
    rewards = np.asarray(rewards, np.float64)
    is_scored = np.asarray(is_counted, bool)
    _refuse_non_finite(rewards, is_scored)
    groups, group_of = np.unique(np.asarray(group_ids), return_inverse=True)
    rewards = np.where(is_scored, rewards, 0.0)

    def group_sum(values):
        return np.bincount(group_of, np.where(is_scored, values, 0.0), minlength=len(groups))

    num_scored = group_sum(np.ones_like(rewards))
    centred = rewards - (group_sum(rewards) / np.maximum(num_scored, 1))[group_of]
    if estimator == "group_zscore":
        freedom = num_scored - (1 if deviation == "sample" else 0)
        variance = group_sum(centred**2) / np.maximum(freedom, 1)
        scale = np.sqrt(variance)[group_of] + epsilon
    elif estimator == "leave_one_out":
        # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
        scale = (np.maximum(num_scored - 1, 1) / np.maximum(num_scored, 1))[group_of]
    elif estimator == "group_mean":
        scale = 1.0
    else:
        raise ValueError(f"unknown group estimator {estimator!r}")

    is_degenerate = _has_no_spread(rewards, is_scored, group_of, len(groups))[group_of]
    has_signal = is_scored & ~is_degenerate
    advantages = np.divide(centred, scale, out=np.zeros_like(centred), where=has_signal)
    return advantages.astype(np.float32), is_degenerate


def _refuse_non_finite(rewards, is_scored):
    bad = np.flatnonzero(is_scored & ~np.isfinite(rewards))
    if bad.size:
        raise MeshdialError(
            f"the reward of sample {bad[0]} is {rewards[bad[0]]}: a scored reward must be finite"
        )


def _has_no_spread(rewards, is_scored, group_of, num_groups):
    highest, lowest = np.full(num_groups, -np.inf), np.full(num_groups, np.inf)
    np.maximum.at(highest, group_of[is_scored], rewards[is_scored])
    np.minimum.at(lowest, group_of[is_scored], rewards[is_scored])
    is_empty = highest < lowest
    highest, lowest = np.where(is_empty, 0.0, highest), np.where(is_empty, 0.0, lowest)
    magnitude = np.maximum(np.maximum(np.abs(highest), np.abs(lowest)), 1.0)
    return highest - lowest <= _ROUNDING * magnitude
