"""From the rewards of a batch to the advantage of every token, in float64 on the host."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl.algorithms.advantages import Deviation, GroupEstimator, group_advantages

Estimator = GroupEstimator | Literal["global_zscore", "gae"]
_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Which estimator, and its numbers; each estimator reads those that its description names."""

    estimator: Estimator
    deviation: Deviation = "population"
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """N completions: an entry each, and lists with an entry for each token.

    A reward that does not count (`is_counted_N`) takes no part in anything. `masks` keep the tokens
    that are the policy's own; what the other lists hold elsewhere, NaN included, does not matter.
    `kl_penalties` are subtracted from the rewards of their tokens; None for no penalty. `values`
    are a critic's, of the state before each token.
    """

    rewards_N: np.ndarray
    group_ids_N: np.ndarray
    is_counted_N: np.ndarray
    masks: list[np.ndarray]
    kl_penalties: list[np.ndarray] | None = None
    values: list[np.ndarray] | None = None


@dataclass(frozen=True)
class Estimates:
    """float32 arrays, an entry for each token, 0 outside the mask; `returns` for a critic alone,
    None for a sample that does not count."""

    advantages: list[np.ndarray]
    returns: list[np.ndarray | None] | None
    is_degenerate_N: np.ndarray


def estimate(config: AdvantageConfig, sequences: Sequences) -> Estimates:
    """The advantages of a batch.

    group_zscore, group_mean, leave_one_out: see `group_advantages`, of the reward minus the
        sequence's penalties; every token has its sequence's advantage. Reads deviation.
    global_zscore: the reward to come, which is the terminal reward minus the penalties from the
        token on, each discounted, whitened over the batch; REINFORCE++ (arXiv:2501.03262), section
        3. Reads gamma.
    gae: generalised advantage estimation (arXiv:1506.02438, equation 16) over the policy's own
        tokens. The reward of a token is minus its penalty, and the last one has the terminal reward
        too; after it the value is 0. Returns are advantage + value, before whitening. Reads gamma,
        lam and whiten.
    """
    if config.estimator == "gae":
        return _gae(config, sequences)
    if config.estimator == "global_zscore":
        to_go = [_reward_to_go(r, config.gamma) for r in _token_rewards(sequences)]
        return _spread_out(sequences, _whitened(to_go, sequences.is_counted_N), None)
    return _by_group(config, sequences)


def _by_group(config: AdvantageConfig, sequences: Sequences) -> Estimates:
    penalties = np.array([p.sum() for p in _penalties(sequences)])
    rewards_N = np.asarray(sequences.rewards_N, np.float64) - penalties
    advantages_N, is_degenerate_N = group_advantages(
        *(rewards_N, sequences.group_ids_N, sequences.is_counted_N),
        *(config.estimator, config.deviation),
    )
    per_token = [
        np.full(int(mask.sum()), advantage)
        for mask, advantage in zip(sequences.masks, advantages_N, strict=True)
    ]
    return _spread_out(sequences, per_token, None, is_degenerate_N)


def _gae(config: AdvantageConfig, sequences: Sequences) -> Estimates:
    if sequences.values is None:
        raise ValueError("the estimator gae needs a critic's values")
    values = _own(sequences, sequences.values)
    advantages = [
        generalised_advantages(rewards, value, config.gamma, config.lam)
        for rewards, value in zip(_token_rewards(sequences), values, strict=True)
    ]
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    if config.whiten:
        advantages = _whitened(advantages, sequences.is_counted_N)
    return _spread_out(sequences, advantages, returns)


def generalised_advantages(
    rewards_T: np.ndarray, values_T: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """sum_k (gamma * lam)^k * delta_{t+k}, delta_t = r_t + gamma * V_{t+1} - V_t, and V is 0 at the
    end (arXiv:1506.02438)."""
    following = np.append(values_T[1:], 0.0)[: len(values_T)]
    deltas = rewards_T + gamma * following - values_T
    return _reward_to_go(deltas, gamma * lam)


def _reward_to_go(rewards_T: np.ndarray, gamma: float) -> np.ndarray:
    result, ahead = np.zeros(len(rewards_T)), 0.0
    for t in reversed(range(len(rewards_T))):
        ahead = rewards_T[t] + gamma * ahead
        result[t] = ahead
    return result


def _token_rewards(sequences: Sequences) -> list[np.ndarray]:
    """The reward of each of the policy's own tokens; the terminal one at the last of them."""
    found = []
    samples = zip(_penalties(sequences), sequences.rewards_N, sequences.is_counted_N, strict=True)
    for penalties, reward, is_counted in samples:
        rewards = -penalties
        if is_counted and len(rewards):
            rewards[-1] += float(reward)
        found.append(rewards)
    return found


def _penalties(sequences: Sequences) -> list[np.ndarray]:
    if sequences.kl_penalties is None:
        return [np.zeros(int(mask.sum())) for mask in sequences.masks]
    return _own(sequences, sequences.kl_penalties)


def _own(sequences: Sequences, lists: list[np.ndarray]) -> list[np.ndarray]:
    """The entries at the policy's own tokens."""
    return [
        np.asarray(values, np.float64)[np.asarray(mask, bool)]
        for values, mask in zip(lists, sequences.masks, strict=True)
    ]


def _whitened(lists: list[np.ndarray], is_counted_N: np.ndarray) -> list[np.ndarray]:
    """(x - mean) / (population deviation + 1e-8) over all tokens of the samples that count; all 0
    where they do not differ."""
    counted = [x for x, counts in zip(lists, is_counted_N, strict=True) if counts]
    together = np.concatenate(counted) if counted else np.zeros(0)
    if not together.size or np.ptp(together) <= 1e-9 * max(1.0, np.abs(together).max()):
        return [np.zeros_like(x) for x in lists]
    mean, deviation = together.mean(), together.std()
    return [(x - mean) / (deviation + _EPSILON) for x in lists]


def _spread_out(
    sequences: Sequences,
    advantages: list[np.ndarray],
    returns: list[np.ndarray] | None,
    is_degenerate_N: np.ndarray | None = None,
) -> Estimates:
    """Entries of the policy's own tokens at their places; nothing for samples that do not count."""
    masks, is_counted_N = sequences.masks, sequences.is_counted_N
    if is_degenerate_N is None:
        is_degenerate_N = np.zeros(len(masks), bool)
    return Estimates(
        [
            _placed(x if counts else 0.0, mask)
            for x, mask, counts in zip(advantages, masks, is_counted_N, strict=True)
        ],
        returns
        and [
            _placed(x, mask) if counts else None
            for x, mask, counts in zip(returns, masks, is_counted_N, strict=True)
        ],
        is_degenerate_N,
    )


def _placed(values, mask: np.ndarray) -> np.ndarray:
    placed = np.zeros(len(mask), np.float32)
    placed[np.asarray(mask, bool)] = values
    return placed
