"""From the lists of the schedulers to the arrays that the programs take, in few shapes.

There is a list for each replica; where there are several, the arrays lead with their axis.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from rl.rollout.attention.backends import Places
from rl.rollout.attention.xla import SharedPrompts
from rl.rollout.decode import MAX_STEPS, Chunks, Rows
from rl.rollout.pages import TRASH, num_pages_for
from rl.rollout.sampling import draw_uniforms
from rl.rollout.scheduler import Chunk, Sample
from rl.rollout.shapes import (
    chunk_length,
    max_chunks,
    num_first_rows_for,
    power_of_two,
)

MAX_MEMBERS = 8
"""Most rows of a prompt that attend to its pages in one product."""


class Assembler:
    """Knows the sizes that stay the same through a run."""

    def __init__(self, page_size: int, max_pages: int, pad_id: int, group_size: int):
        self.page_size = page_size
        self.max_pages = max_pages  # of a sample, with room for the steps that overrun its end
        self.pad_id = pad_id
        # Samples that have no group share what their prompts begin with.
        self.num_members = (
            min(power_of_two(group_size), MAX_MEMBERS) if group_size > 1 else MAX_MEMBERS
        )

    # Prefill

    def chunks(self, runs: list[list[Chunk]]) -> Iterator[tuple[list[list[Chunk]], Chunks]]:
        """The runs of tokens, in order, cut into chunks; of each dispatch the lists and arrays."""
        length = chunk_length([len(run.tokens) for replica in runs for run in replica])
        pieces = [[piece for run in replica for piece in _cut(run, length)] for replica in runs]
        num_pages = max((len(piece.pages) for replica in pieces for piece in replica), default=1)
        num_pages = power_of_two(num_pages, 8)
        size = max_chunks(length, num_pages * self.page_size)
        for start in range(0, max(map(len, pieces)), size):
            parts = [replica[start : start + size] for replica in pieces]
            num_chunks = power_of_two(max(map(len, parts)), 4)
            arrays = [self._chunks(part, num_chunks, length, num_pages) for part in parts]
            yield parts, _stacked(arrays)

    def _chunks(self, pieces: list[Chunk], num_chunks: int, length: int, num_pages: int) -> Chunks:
        tokens_RT = np.full((num_chunks, length), self.pad_id, np.int32)
        lengths_R, position_R = np.zeros((2, num_chunks), np.int32)
        table_RN = np.full((num_chunks, num_pages), TRASH, np.int32)
        for row, piece in enumerate(pieces):
            tokens_RT[row, : len(piece.tokens)] = piece.tokens
            lengths_R[row], position_R[row] = len(piece.tokens), piece.position
            table_RN[row, : len(piece.pages)] = piece.pages
        return Chunks(tokens_RT, lengths_R, position_R, table_RN)

    def keep_hidden(self, pieces: list[list[Chunk]], hidden_RD: jax.Array) -> None:
        """Give prompts that end in a dispatch the hidden state of their last token."""
        places = [
            (shard, row, piece.prompt)
            for shard, replica in enumerate(pieces)
            for row, piece in enumerate(replica)
            if piece.prompt is not None
        ]
        if places:
            hidden = np.asarray(hidden_RD).reshape(len(pieces), -1, hidden_RD.shape[-1])
            for shard, row, prompt in places:
                prompt.hidden_D = hidden[shard, row]

    def first_tokens(
        self, names: tuple[int, int], samples: list[Sample]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(hidden_BD, uniforms_B) of samples that have no token yet."""
        num_rows = num_first_rows_for(len(samples))
        hidden = np.stack([sample.prompt.hidden_D for sample in samples])
        numbers = [[sample.prompt.number, sample.index, 0] for sample in samples]
        uniforms = draw_uniforms(*names, *np.array(numbers, np.uint32).T)
        unused = num_rows - len(samples)
        return np.pad(hidden, ((0, unused), (0, 0))), np.pad(uniforms, (0, unused))

    def copies(
        self, copies: list[list[tuple[int, int]]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(sources_M, targets_M), where there are any; what is filled up copies TRASH to itself."""
        most = max(map(len, copies))
        if not most:
            return
        pairs = np.full((len(copies), power_of_two(most, 8), 2), TRASH, np.int32)
        for row, replica in zip(pairs, copies, strict=True):
            row[: len(replica)] = np.reshape(replica, (-1, 2))
        pairs = pairs if len(copies) > 1 else pairs[0]
        yield pairs[..., 0], pairs[..., 1]

    # Decoding

    def rows(self, running: list[list[Sample]], num_rows: int, gathers: bool) -> Rows:
        """The samples of each replica as its first rows."""
        prompts = [None] * len(running)
        if gathers:
            prompts = self._shared_prompts(running, num_rows)
        return _stacked(
            [
                self._rows(samples, num_rows, shared)
                for samples, shared in zip(running, prompts, strict=True)
            ]
        )

    def _rows(self, samples: list[Sample], num_rows: int, prompts: SharedPrompts | None) -> Rows:
        numbers = np.zeros((4, num_rows), np.int32)
        table_BN = np.full((num_rows, self.max_pages), TRASH, np.int32)
        for row, sample in enumerate(samples):
            numbers[:, row] = (
                sample.row.tokens[-1],
                len(sample.row.tokens),
                sample.num_left,
                sample.position,
            )
            table_BN[row, : len(sample.pages)] = sample.pages
        return Rows(*numbers[:3], Places(table_BN, numbers[3], prompts))

    def uniforms(
        self, names: tuple[int, int], running: list[list[Sample]], num_rows: int
    ) -> np.ndarray:
        """The numbers that decide the next MAX_STEPS tokens of every row, [MAX_STEPS, rows]."""
        numbers = np.zeros((3, MAX_STEPS, len(running), num_rows), np.uint32)
        for shard, samples in enumerate(running):
            for row, sample in enumerate(samples):
                numbers[:2, :, shard, row] = [[sample.prompt.number], [sample.index]]
                numbers[2, :, shard, row] = len(sample.row.tokens) + np.arange(MAX_STEPS)
        uniforms = draw_uniforms(*names, *numbers.reshape(3, -1)).reshape(numbers.shape[1:])
        return uniforms if len(running) > 1 else uniforms[:, 0]

    def _shared_prompts(self, running: list[list[Sample]], num_rows: int) -> list[SharedPrompts]:
        runs = [_shared_runs(samples) for samples in running]
        units = [_units(runs_of, self.num_members) for runs_of in runs]
        num_units, num_members = 2 * num_rows // self.num_members, self.num_members
        if max(map(len, units)) > num_units:
            units = [_units(runs_of, 1) for runs_of in runs]
            num_units, num_members = num_rows, 1
        num_shared = max((len(run) for replica in runs for run in replica), default=0)
        num_own = max(
            num_pages_for(sample.position, self.page_size) - len(run)
            for samples, replica in zip(running, runs, strict=True)
            for sample, run in zip(samples, replica, strict=True)
        )
        # Each width is a program of its own, and what is gathered in vain costs time.
        widths = (num_shared and power_of_two(num_shared, 8), power_of_two(num_own, 4))
        shape = (num_units, num_members, *widths)
        return [
            self._prompts_of(*replica, num_rows, shape)
            for replica in zip(running, runs, units, strict=True)
        ]

    def _prompts_of(self, samples, runs, units: list[list[int]], num_rows: int, shape):
        num_units, num_members, num_shared, num_own = shape
        pages_UN = np.full((num_units, num_shared), TRASH, np.int32)
        lengths_U = np.zeros(num_units, np.int32)
        rows_UM = np.zeros((num_units, num_members), np.int32)
        place_B, own_start_B = np.zeros((2, num_rows), np.int32)
        own_pages_BN = np.full((num_rows, num_own), TRASH, np.int32)
        for unit, rows in enumerate(units):
            run = runs[rows[0]]
            pages_UN[unit, : len(run)] = run
            lengths_U[unit] = len(run) * self.page_size
            rows_UM[unit, : len(rows)] = rows
            place_B[rows] = unit * num_members + np.arange(len(rows))
        for row, (sample, run) in enumerate(zip(samples, runs, strict=True)):
            own = sample.pages[len(run) :][:num_own]
            own_pages_BN[row, : len(own)] = own
            own_start_B[row] = len(run) * self.page_size
        return SharedPrompts(pages_UN, lengths_U, rows_UM, place_B, own_pages_BN, own_start_B)

    def eos_ids(self, eos_ids: Sequence[int]) -> np.ndarray:
        """Padded by -1, which no token is."""
        padding = [-1] * (power_of_two(len(eos_ids), 8) - len(eos_ids))
        return np.array([*eos_ids, *padding], np.int32)


def _cut(run: Chunk, length: int) -> Iterator[Chunk]:
    for start in range(0, len(run.tokens), length):
        tokens = run.tokens[start : start + length]
        prompt = run.prompt if start + length >= len(run.tokens) else None
        yield Chunk(tokens, run.position + start, run.pages, prompt)


def _shared_runs(samples: list[Sample]) -> list[tuple[int, ...]]:
    """The first pages of each sample that others have too: its group's prompt, or what prompts
    begin with."""
    holders = Counter(page for sample in samples for page in sample.pages[: sample.num_shared])
    return [
        tuple(
            itertools.takewhile(lambda page: holders[page] > 1, sample.pages[: sample.num_shared])
        )
        for sample in samples
    ]


def _units(runs: list[tuple[int, ...]], num_members: int) -> list[list[int]]:
    """Rows by what they share, at most `num_members` together."""
    rows_of: dict[tuple, list[int]] = {}
    for row, run in enumerate(runs):
        rows_of.setdefault(run, []).append(row)
    return [
        rows[start : start + num_members]
        for rows in rows_of.values()
        for start in range(0, len(rows), num_members)
    ]


def _stacked(replicas: list):
    """One replica's arrays as they are, those of several stacked."""
    if len(replicas) == 1:
        return replicas[0]
    return jax.tree.map(lambda *arrays: np.stack(arrays), *replicas)
