"""Which samples run together, and in which shapes."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """Samples first_sample to first_sample + num_samples - 1 of the groups of some prompts."""

    prompts: tuple[int, ...]
    first_sample: int
    num_samples: int


@dataclass(frozen=True)
class Plan:
    """Every batch runs as [num_prompts, group_size] rows, some of them unused."""

    batches: tuple[Batch, ...]
    num_prompts: int
    group_size: int

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.group_size


def plan_batches(
    prompt_lengths: Sequence[int], group_size: int, max_rows: int, num_shards: int = 1
) -> Plan:
    """Batches of at most `max_rows` rows in each of `num_shards` row shards, of prompts of like
    length, as even as they come.

    A group stays whole, so that its prompt is computed once, unless it alone exceeds `max_rows`.
    The prompts of a batch are a multiple of the shards, some of them unused.
    """
    order = sorted(range(len(prompt_lengths)), key=lambda i: prompt_lengths[i])
    part = _even(group_size, max_rows)
    size = _even(len(order), max(max_rows // group_size, 1) * num_shards)
    size = -(-size // num_shards) * num_shards
    batches = [
        Batch(tuple(order[i : i + size]), first, min(part, group_size - first))
        for i in range(0, len(order), size or 1)
        for first in range(0, group_size, part)
    ]
    return Plan(tuple(batches), size, part)


def _even(num_items: int, most: int) -> int:
    """The size of the parts, where `num_items` are split into as few as `most` a part allows."""
    num_parts = -(-num_items // most)
    return -(-num_items // max(num_parts, 1))


def bucket(length: int) -> int:
    """The padded length: a multiple of 8 to 32, then two sizes an octave, so few are compiled."""
    length = max(length, 1)
    size = max(8, 2 ** ((length - 1).bit_length() - 2))
    return -(-length // size) * size


def prompt_slots(length: int) -> int:
    """Room for prompts in a cache: fewer sizes still, as each is one more way to decode."""
    return max(64, 2 ** (length - 1).bit_length())


def compacted_rows(num_open: int, num_rows: int, fewest: int = 8) -> int:
    """To how many rows a batch shrinks of which `num_open` still decode: a half, a quarter, ..."""
    while num_rows // 2 >= max(num_open, fewest):
        num_rows //= 2
    return num_rows
