"""Group-relative advantages: a completion is judged against the others of its own prompt."""

from typing import Literal

import numpy as np

from rl.errors import MeshdialError

Deviation = Literal["population", "sample", "none"]

# A weighted sum of reward components rounds differently from sample to sample. A spread below this
# (relative to the rewards, absolute below one) is such rounding, and dividing by it would turn
# noise into advantages of full size.
_ROUNDING = 1e-9


def group_advantages(
    rewards, group_ids, scored_ok, deviation: Deviation = "population", epsilon: float = 1e-6
) -> tuple[np.ndarray, np.ndarray]:
    """(reward - group mean) / (group deviation + epsilon), in float64 on the host.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2. `deviation` is of the population, of the sample
    (n - 1, as PyTorch's `std`), or none: the mean is subtracted and nothing divided, which is
    Dr. GRPO (arXiv:2503.20783).

    Arguments are of length N, one entry a sample, in any order: float `rewards`, `group_ids`
    (strings or integers), boolean `scored_ok`. A sample that was not scored counts in neither mean
    nor deviation, whatever its reward says, and its advantage is 0.

    Returns (float32 advantages, is_degenerate): a group is degenerate when fewer than two of its
    rewards differ by more than rounding; all its advantages are then exactly 0.
    Raises MeshdialError where a scored reward is not finite.
    """
    rewards = np.asarray(rewards, np.float64)
    is_scored = np.asarray(scored_ok, bool)
    _refuse_non_finite(rewards, is_scored)
    groups, group_of = np.unique(np.asarray(group_ids), return_inverse=True)
    rewards = np.where(is_scored, rewards, 0.0)

    def group_sum(values):
        return np.bincount(group_of, np.where(is_scored, values, 0.0), minlength=len(groups))

    num_scored = group_sum(np.ones_like(rewards))
    centred = rewards - (group_sum(rewards) / np.maximum(num_scored, 1))[group_of]
    scale = 1.0
    if deviation != "none":
        freedom = num_scored - (1 if deviation == "sample" else 0)
        scale = np.sqrt(group_sum(centred**2) / np.maximum(freedom, 1))[group_of] + epsilon

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
