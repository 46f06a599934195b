"""Which groups of an iteration the update takes: dynamic sampling without a loop."""

from dataclasses import dataclass

import numpy as np

from rl.algorithms.advantages import group_advantages
from rl.errors import MeshdialError


@dataclass(frozen=True)
class Selection:
    """`is_used_N`: the sample's group is taken. `is_silenced_N`: it is taken to fill the batch up,
    and its advantages are to be 0. Groups are counted: those that qualify (`num_eligible`), those
    that fill up, and those that are left out. `is_degenerate_N`: the raw rewards of the sample's
    group do not differ."""

    is_used_N: np.ndarray
    is_silenced_N: np.ndarray
    num_eligible: int
    num_filled: int
    num_left_out: int
    is_degenerate_N: np.ndarray


def select_groups(
    raw_rewards_N,
    group_ids_N,
    is_counted_N,
    num_wanted: int,
    pass_rate: tuple[float, float] = (0.0, 1.0),
    passing_reward: float = 1.0,
    *,
    needs_spread: bool,
) -> Selection:
    """The first `num_wanted` groups that qualify, in the order of their first samples.

    A group qualifies if the share of its counted samples with a reward of at least
    `passing_reward` lies within `pass_rate`, ends included, and, where `needs_spread`, if its raw
    rewards differ (DAPO, arXiv:2503.14476, section 3.2, which samples until there are enough). A
    group of which no sample counts does not qualify where anything is asked of it. Where too few
    qualify, the first of the others fill up, so that every batch has as many groups.
    Raises MeshdialError if there are fewer groups than wanted.
    """
    rewards, is_counted = np.asarray(raw_rewards_N, np.float64), np.asarray(is_counted_N, bool)
    ids = np.asarray(group_ids_N)
    order = list(dict.fromkeys(ids.tolist()))
    if len(order) < num_wanted:
        raise MeshdialError(
            f"the batch has {len(order)} groups, expected at least {num_wanted} to train on"
        )
    _, is_degenerate_N = group_advantages(rewards, ids, is_counted)
    is_selective = needs_spread or tuple(pass_rate) != (0.0, 1.0)

    def qualifies(group) -> bool:
        members = ids == group
        counted = rewards[members & is_counted]
        if not counted.size:
            return not is_selective
        has_spread = not is_degenerate_N[members][0]
        share = float(np.mean(counted >= passing_reward))
        return (has_spread or not needs_spread) and pass_rate[0] <= share <= pass_rate[1]

    eligible = [group for group in order if qualifies(group)]
    taken = eligible[:num_wanted]
    filling = [group for group in order if group not in set(eligible)][: num_wanted - len(taken)]
    return Selection(
        is_used_N=np.isin(ids, taken + filling),
        is_silenced_N=np.isin(ids, filling) if filling else np.zeros(len(ids), bool),
        num_eligible=len(eligible),
        num_filled=len(filling),
        num_left_out=len(order) - num_wanted,
        is_degenerate_N=is_degenerate_N,
    )
