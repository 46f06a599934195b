"""Completions packed into micro-batches of one shape, under a budget of tokens.

1. The completions of each group go into bins of T places, longest first, each into the first bin
   with room (Johnson 1973): a bin holds completions of one group.
2. One shape [P, B, T] is chosen for all micro-batches: P prompts with B bins each, whichever costs
   least under the budget. A group with more than B bins stands in several rows, its prompt in each.
3. The rows fill micro-batches in order; what the last one lacks is padding.

Sizes are rounded up to few values, so that a run compiles few programs whatever its lengths are.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

LEAST_BIN = 64
"""Short completions share bins of about so many places: fewer would leave more of them empty."""

OVERHEAD = 1 / 16
"""What a micro-batch costs besides its tokens, as a share of the budget."""


class Shape(NamedTuple):
    """P prompts of S tokens, of which all prompts share the first, and B bins of T places each."""

    num_prompts: int
    num_bins: int
    bin_size: int
    prompt_size: int
    num_shared: int

    @property
    def num_tokens(self) -> int:
        """That go through the layers, padding counted."""
        own = self.prompt_size - self.num_shared + self.num_bins * self.bin_size
        return self.num_shared + self.num_prompts * own


class Part(NamedTuple):
    """What stands where in one micro-batch: `token_PBT` counts in its completion, and the rest is
    padding where not `is_real_PBT`."""

    prompt_P: np.ndarray
    member_PBT: np.ndarray
    token_PBT: np.ndarray
    is_real_PBT: np.ndarray


class Row(NamedTuple):
    """A prompt and some of its group's bins, each a list of members."""

    prompt: int
    bins: list[list[int]]


def divide(
    is_needed_PG: np.ndarray,
    completion_lengths_PG: np.ndarray,
    prompt_lengths_P: np.ndarray,
    budget: int,
    *,
    num_shared: int = 0,
    max_tokens: int | None = None,
    num_shards: int = 1,
) -> tuple[Shape, list[Part]]:
    """The shape of all micro-batches, and those that hold each needed completion once.

    budget: the most tokens of a micro-batch, padding counted; a completion that does not fit with
    its prompt runs alone all the same. num_shared: how many first tokens are the same in all
    prompts, fewer than any has. max_tokens: the longest that a completion can be, if known.
    num_shards: how many micro-batches run at once.
    """
    lengths_PG = np.where(is_needed_PG, completion_lengths_PG, 0)
    size = bin_size(lengths_PG, max_tokens)
    groups = [
        Row(prompt, first_fit(lengths_PG[prompt], size))
        for prompt in range(len(lengths_PG))
        if lengths_PG[prompt].any()
    ]
    own_prompt = bucket_length(max(int(prompt_lengths_P.max()) - 1 - num_shared, 1))
    least = Shape(1, 1, size, num_shared + own_prompt, num_shared)
    shape = _cheapest([len(row.bins) for row in groups], least, budget, num_shards)
    rows = list(_cut(groups, shape.num_bins))
    starts = range(0, len(rows), shape.num_prompts)
    return shape, [
        _part(rows[start : start + shape.num_prompts], shape, completion_lengths_PG)
        for start in starts
    ]


def bin_size(lengths_PG: np.ndarray, max_tokens: int | None = None) -> int:
    """Places of a bin: for the longest completion, or for several where a group has short ones;
    in multiples of `max_tokens` where they come near to it, so that the longest fill bins whole.
    Where no group can have more than LEAST_BIN tokens, for a whole group, whatever its lengths."""
    if max_tokens is not None and lengths_PG.shape[1] * max_tokens <= LEAST_BIN:
        return lengths_PG.shape[1] * max_tokens
    least = min(LEAST_BIN, int(lengths_PG.sum(axis=1).max(initial=1)))
    size = _rounded(max(least, int(lengths_PG.max(initial=1)), 8))
    if max_tokens is None or size <= max_tokens:
        return size
    return max_tokens * max(1, least // max_tokens)


def bucket_length(length: int) -> int:
    """The padded length: a multiple of 8, and of an eighth of the next power of two.

    Padding adds less than a quarter beyond 64, and an octave of lengths has only four shapes.
    """
    multiple = max(8, 2 ** max((length - 1).bit_length() - 3, 0))
    return -(-length // multiple) * multiple


def first_fit(lengths_G: Sequence[int], size: int) -> list[list[int]]:
    """Members in bins of at most `size` tokens, none of length 0: the longest first, each into the
    first bin with room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for member in np.argsort(-np.asarray(lengths_G), kind="stable").tolist():
        length = int(lengths_G[member])
        if length == 0:
            break
        place = next((b for b, free in enumerate(room) if free >= length), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(size)
        bins[place].append(member)
        room[place] -= length
    return bins


def _cheapest(num_bins: list[int], least: Shape, budget: int, num_shards: int) -> Shape:
    """The shape that computes the fewest tokens in all; the larger one where two are equal."""
    best, best_cost = least, None
    for B in _sizes(max(num_bins, default=1)):
        num_rows = sum(-(-n // B) for n in num_bins)
        for exponent in range(max(num_rows - 1, 0).bit_length() + 1):
            shape = least._replace(num_prompts=2**exponent, num_bins=B)
            if shape.num_tokens > budget and (exponent, B) != (0, 1):
                continue
            num_rounds = -(-num_rows // (shape.num_prompts * num_shards))
            cost = num_rounds * (shape.num_tokens + OVERHEAD * budget), -shape.num_tokens
            if best_cost is None or cost < best_cost:
                best, best_cost = shape, cost
    return best


def _sizes(limit: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12 and so on, up to the first that is no less than `limit`."""
    size = 0
    while size < limit:
        size = _rounded(size + 1)
        yield size


def _rounded(size: int) -> int:
    """The next power of two, or three quarters of it where that is enough."""
    power = 2 ** (size - 1).bit_length()
    return 3 * power // 4 if power >= 4 and size <= 3 * power // 4 else power


def _cut(groups: list[Row], num_bins: int) -> Iterator[Row]:
    for prompt, bins in groups:
        for start in range(0, len(bins), num_bins):
            yield Row(prompt, bins[start : start + num_bins])


def _part(rows: list[Row], shape: Shape, lengths_PG: np.ndarray) -> Part:
    places = (shape.num_prompts, shape.num_bins, shape.bin_size)
    missing = [rows[0].prompt] * (shape.num_prompts - len(rows))
    part = Part(
        np.array([row.prompt for row in rows] + missing),
        *(np.zeros(places, np.int32) for _ in range(2)),
        np.zeros(places, bool),
    )
    for p, (prompt, bins) in enumerate(rows):
        for b, members in enumerate(bins):
            lengths = lengths_PG[prompt, members]
            end = lengths.sum()
            part.member_PBT[p, b, :end] = np.repeat(members, lengths)
            part.token_PBT[p, b, :end] = np.concatenate([np.arange(n) for n in lengths])
            part.is_real_PBT[p, b, :end] = True
    return part
