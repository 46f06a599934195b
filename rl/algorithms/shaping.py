"""What the length of a completion adds to its reward or takes from it."""

from typing import Literal

import numpy as np

LengthPenalty = Literal["none", "tokens", "group"]


def overlong_penalty(lengths_N, max_tokens: int, buffer_tokens: int, penalty: float) -> np.ndarray:
    """0 up to max_tokens - buffer_tokens, from there falling linearly to -penalty at max_tokens.

    Soft overlong punishment, DAPO (arXiv:2503.14476), equation 13, whose penalty is 1. Lengths are
    in tokens, the one that ends a completion counted. `buffer_tokens` 0 is no penalty.
    """
    lengths = np.asarray(lengths_N, np.float64)
    if buffer_tokens == 0:
        return np.zeros(len(lengths))
    excess = np.clip(lengths - (max_tokens - buffer_tokens), 0.0, buffer_tokens)
    return -penalty * excess / buffer_tokens


def length_penalty(
    kind: LengthPenalty,
    coefficient: float,
    lengths_N,
    max_tokens: int,
    group_ids_N,
    is_passing_N,
    is_counted_N,
) -> np.ndarray:
    """What to add to the reward of each sample.

    tokens: -coefficient * length / max_tokens.
    group: coefficient * x with x = 1/2 - (length - shortest) / (longest - shortest) of the group's
        counted samples, and of a sample that does not pass min(0, x); 0 where all are of one
        length. Kimi k1.5 (arXiv:2501.12599), section 2.3.3.
    """
    lengths = np.asarray(lengths_N, np.float64)
    if kind == "none":
        return np.zeros(len(lengths))
    if kind == "tokens":
        return -coefficient * lengths / max_tokens
    if kind != "group":
        raise ValueError(f"unknown length penalty {kind!r}")
    ids, is_counted = np.asarray(group_ids_N), np.asarray(is_counted_N, bool)
    result = np.zeros(len(lengths))
    for group in np.unique(ids[is_counted]):
        members = (ids == group) & is_counted
        shortest, longest = lengths[members].min(), lengths[members].max()
        if longest > shortest:
            result[members] = 0.5 - (lengths[members] - shortest) / (longest - shortest)
    is_passing = np.asarray(is_passing_N, bool)
    return coefficient * np.where(is_passing, result, np.minimum(result, 0.0))
