"""Runs the samples of some prompts to their ends: schedule, run, postprocess.

1. `Scheduler` says which samples decode next and on which pages (one for each replica).
2. The programs of `decode` prefill what is missing, then draw a few tokens for every row.
3. Rows take their tokens, and those that have ended leave their slots and pages to others.

A sample's tokens depend on its prompt and its keys alone: not on slots, pages, or its neighbours.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import numpy as np

from rl import group
from rl.compiling import compiled
from rl.models.spec import ModelSpec, Parameters
from rl.models.transformer import parameter_shapes
from rl.rollout.arrays import Assembler
from rl.rollout.attention.backends import Backend
from rl.rollout.decode import (
    MAX_STEPS,
    Draws,
    copy_pages,
    decode,
    draw_first,
    empty_pools,
    prefill,
)
from rl.rollout.sampling import Bans, SamplingConfig
from rl.rollout.scheduler import Sample, Scheduler
from rl.rollout.shapes import MOST_FIRST_ROWS, num_rows_for
from rl.sharding import current

FLOPS_A_DISPATCH = {"cpu": 4e9}
ACCELERATORS_FLOPS_A_DISPATCH = 1e13
"""Small models take several steps a dispatch, until it does this much: that hides what it costs.
Large ones take one, as no row then runs on after its end, which the host finds.
"""

GATHERING_STEPS = 4
"""Fewest steps of a dispatch that has to gather its pages first."""

COMPACT_STEPS = 16
"""Fewest tokens that some sample may still draw for the rows to be compacted: fewer rows are
another program to compile."""


@functools.cache
def suited_steps(spec: ModelSpec, num_rows: int, platform: str, gathers: bool) -> int:
    """How many decode steps a dispatch of so many rows should take."""
    num_parameters = sum(int(np.prod(shape)) for shape in parameter_shapes(spec).values())
    flops = FLOPS_A_DISPATCH.get(platform, ACCELERATORS_FLOPS_A_DISPATCH)
    fewest = GATHERING_STEPS if gathers else 1
    return int(np.clip(flops / (2 * num_parameters * num_rows), fewest, MAX_STEPS))


@dataclass
class Counts:
    """What a run has done so far."""

    decode_steps: int = 0
    row_steps: int = 0
    prefill_tokens: int = 0
    num_done: int = 0
    num_tokens: int = 0


@dataclass
class Engine:
    """The samples of `schedulers`, on pools of the current mesh."""

    spec: ModelSpec
    trainable: Parameters
    frozen: Parameters
    names: tuple[int, int]  # seed and iteration
    sampling: SamplingConfig
    eos_ids: tuple[int, ...]
    bans: Bans | None
    schedulers: list[Scheduler]
    backend: Backend
    assembler: Assembler
    steps_per_dispatch: int | None
    progress: Callable[[str], None]
    check_alive: Callable[[], None]
    counts: Counts = field(default_factory=Counts)
    num_samples: int = field(default=0, init=False)
    num_rows: int = field(default=0, init=False)
    num_steps: int = field(default=1, init=False)
    pools: list | None = field(default=None, init=False)

    def run(self) -> None:
        """Decode until no sample waits or runs. Whatever happens, every page is free after."""
        pages = self.schedulers[0].pages
        self.num_samples = sum(len(scheduler.waiting) for scheduler in self.schedulers)
        self.pools = empty_pools(self.spec, self.backend, pages.num_pages, pages.page_size)
        try:
            while any(scheduler.has_work for scheduler in self.schedulers):
                self.check_alive()
                self._schedule()
                if self._running:
                    self._decode()
                    self._retire()
        finally:
            self.pools = None
            for scheduler in self.schedulers:
                scheduler.close()

    def _schedule(self) -> None:
        """Pages for those that run, then slots for those that wait, and what these lack."""
        steps = self._suited_steps()
        for scheduler in self.schedulers:
            scheduler.reserve(steps)
        admitted = [scheduler.admit(steps) for scheduler in self.schedulers]
        for pieces, chunks in self.assembler.chunks([one.chunks for one in admitted]):
            self.counts.prefill_tokens += int(chunks.lengths_R.sum())
            self.pools, hidden_RD = prefill(*self._model, self.pools, chunks)
            self.assembler.keep_hidden(pieces, hidden_RD)
        for sources, targets in self.assembler.copies([one.copies for one in admitted]):
            self.pools = copy_pages(self.backend, self.pools, sources, targets)
        self._begin([sample for one in admitted for sample in one.samples])
        self.num_steps = steps

    def _begin(self, samples: list[Sample]) -> None:
        """Draw the first token of newly admitted samples."""
        now = self._clock()
        for start in range(0, len(samples), MOST_FIRST_ROWS):
            part = samples[start : start + MOST_FIRST_ROWS]
            hidden_BD, uniforms_B = self.assembler.first_tokens(self.names, part)
            model = (self.spec, self.trainable, self.frozen)
            drawing = (self.sampling.numbers, self.bans)
            draws = jax.device_get(draw_first(*model, hidden_BD, uniforms_B, *drawing))
            for row, sample in enumerate(part):
                sample.since = now
                sample.row.extend(*([values[row].item()] for values in draws))
        if samples:
            self._retire()

    def _suited_steps(self) -> int:
        if self.steps_per_dispatch:
            return min(self.steps_per_dispatch, MAX_STEPS)
        counts = [len(scheduler.waiting) + len(scheduler.running) for scheduler in self.schedulers]
        num_rows = num_rows_for(min(max(counts), self.schedulers[0].max_rows))
        platform = current().devices.flat[0].platform
        return suited_steps(self.spec, num_rows, platform, self.backend.gathers)

    def _choose_num_rows(self) -> None:
        """Fewer rows than before only where that may still pay for compiling them."""
        wanted = num_rows_for(max(len(scheduler.running) for scheduler in self.schedulers))
        most_left = max(sample.num_left for sample in self._running)
        if wanted > self.num_rows or most_left >= COMPACT_STEPS:
            self.num_rows = wanted

    def _decode(self) -> None:
        self._choose_num_rows()
        running = [scheduler.running for scheduler in self.schedulers]
        steps = min(self.num_steps, max(sample.num_left for sample in self._running))
        self.pools, draws, taken = decode(
            *self._model,
            self.pools,
            self.assembler.rows(running, self.num_rows, self.backend.gathers),
            self.assembler.uniforms(self.names, running, self.num_rows),
            self.sampling.numbers,
            self.bans,
            self.assembler.eos_ids(self.eos_ids),
            np.int32(steps),
        )
        draws, taken = jax.device_get((draws, taken))
        self.counts.decode_steps += int(taken)
        self.counts.row_steps += int(taken) * self.num_rows * len(running)
        for number, samples in enumerate(running):
            self._extend(samples, draws, number, int(taken))

    def _extend(self, samples: list[Sample], draws: Draws, shard: int, taken: int) -> None:
        columns = [values[:taken] for values in draws]
        if len(self.schedulers) > 1:
            columns = [values[:, shard] for values in columns]
        lists = [values.T.tolist() for values in columns]
        for row, sample in enumerate(samples):
            sample.row.extend(*(values[row] for values in lists))

    def _retire(self) -> None:
        self._expire()
        ended = [sample for scheduler in self.schedulers for sample in scheduler.retire()]
        self.counts.num_done += len(ended)
        self.counts.num_tokens += sum(len(sample.row.tokens) for sample in ended)
        if ended:
            self._report()

    def _expire(self) -> None:
        """End what has had its time, also where it waits for pages to go on."""
        limit = self.sampling.time_limit_s
        if limit is None:
            return
        now = self._clock()
        for scheduler in self.schedulers:
            for sample in (*scheduler.running, *scheduler.waiting):
                if sample.since is not None and now - sample.since > limit:
                    sample.row.expire()

    def _clock(self) -> float:
        """Seconds but for those of compiling, the same in all processes of a mesh."""
        if self.sampling.time_limit_s is None:
            return 0.0
        return float(group.agree(repr(time.monotonic() - compiled().seconds)))

    @property
    def _running(self) -> list[Sample]:
        return [sample for scheduler in self.schedulers for sample in scheduler.running]

    @property
    def _model(self) -> tuple:
        return (self.spec, self.backend, self.trainable, self.frozen)

    def _report(self) -> None:
        done = f"{self.counts.num_done} of {self.num_samples} completions"
        self.progress(f"{done}, {self.counts.num_tokens} tokens")
