"""Runs one batch of samples after the other: start, decode until every row has ended, hand back."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from rl.models.spec import ModelSpec, Parameters
from rl.models.transformer import Cache, parameter_shapes
from rl.rollout.batching import Batch, Plan, bucket, compacted_rows
from rl.rollout.completion import Row, Tokenizer
from rl.rollout.decode import (
    MAX_STEPS,
    Draws,
    Prefilled,
    compact,
    decode,
    empty,
    grow,
    start,
)
from rl.rollout.sampling import SamplingConfig, sample_uniforms
from rl.sharding import num_row_shards

FLOPS_A_DISPATCH = 4e9
"""Small models take several steps a dispatch, until it does this much: that hides what it costs.
Large ones take one, so that no step runs after stop texts, which the host finds, ended every row.
"""

FIRST_SLOTS = 64
"""Room for new tokens that a batch begins with. It doubles when used up: few shapes are compiled,
and a step never reads more than twice the tokens that there are."""

COMPACT_STEPS = 16
"""Fewest steps that may still follow for finished rows to be taken out of a batch: a smaller batch
is another program to compile."""

PROGRESS_TOKENS = 32
"""Positions of a batch between two lines of progress."""


@functools.cache
def suited_steps(spec: ModelSpec, num_rows: int) -> int:
    """How many decode steps a dispatch of so many rows should take."""
    num_parameters = sum(int(np.prod(shape)) for shape in parameter_shapes(spec).values())
    return int(np.clip(FLOPS_A_DISPATCH / (2 * num_parameters * num_rows), 1, MAX_STEPS))


@dataclass
class Running:
    """A batch on the device, and on the host the rows [P][G] that it decodes."""

    rows: list[list[Row]]
    prefilled: Prefilled
    own_cache: Cache
    uniforms_TPG: np.ndarray  # for every token that a row may draw
    last_tokens_PG: np.ndarray
    is_finished_PG: np.ndarray
    index: int = 0  # of the last token, among each row's new tokens

    @property
    def is_open(self) -> bool:
        return not self.is_finished_PG.all()

    @property
    def num_slots(self) -> int:
        return self.own_cache[0][0].shape[-1]

    def num_cached(self, num_prompts: int, num_rows: int) -> int:
        """Cache slots that so many prompts and rows would hold."""
        return num_prompts * self.prefilled.cache[0][0].shape[-1] + num_rows * self.num_slots

    def take(self, draws: Draws) -> None:
        """Give every row its new tokens, from draws_NPG."""
        columns = [np.moveaxis(values_NPG, 0, 2).tolist() for values_NPG in draws]
        for p, group in enumerate(self.rows):
            for g, row in enumerate(group):
                row.extend(*(column[p][g] for column in columns))
                self.is_finished_PG[p, g] = row.finish_reason is not None
        self.last_tokens_PG = draws.tokens[-1]


@dataclass
class Engine:
    """Samples batches of one plan. `sample_keys` and `prompts` are those of `generate`."""

    spec: ModelSpec
    trainable: Parameters
    frozen: Parameters
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    sample_keys: tuple[int, int, Sequence[int]]
    sampling: SamplingConfig
    plan: Plan
    num_shared: int  # first tokens that all prompts share and that are computed once a batch
    steps_per_dispatch: int | None
    progress: Callable[[str], None]
    check_alive: Callable[[], None]
    decode_steps: int = field(default=0, init=False)
    row_steps: int = field(default=0, init=False)
    num_done: int = field(default=0, init=False)

    def run(self, batch: Batch) -> list[list[Row]]:
        """The finished rows of the batch's samples, by prompt."""
        self.check_alive()
        running = self._start(batch)
        rows, reported = running.rows, 0
        while running.is_open:
            self.check_alive()
            self._compact(running)
            self._decode(running)
            if running.is_open and running.index - reported >= PROGRESS_TOKENS:
                reported = running.index
                self._report(reported + 1)
        self.num_done += len(batch.prompts) * batch.num_samples
        self._report()
        return rows

    def _start(self, batch: Batch) -> Running:
        uniforms_TPG = self._uniforms_of(batch)
        prefilled, draws = start(
            self.spec,
            self.trainable,
            self.frozen,
            *self._prompts_of(batch),
            uniforms_TPG[0],
            self.sampling.numbers,
            num_shared=self.num_shared,
        )
        num_slots = min(FIRST_SLOTS, bucket(self.sampling.max_tokens - 1))
        own_cache = empty(self.spec, self.plan.num_prompts, self.plan.group_size, num_slots)
        numbers = [self.sample_keys[2][i] for i in batch.prompts]
        group = range(batch.num_samples)
        rows = [[Row(self.tokenizer, self.sampling, number) for _ in group] for number in numbers]
        nothing_PG = np.zeros((self.plan.num_prompts, self.plan.group_size), np.int32)
        running = Running(
            rows, prefilled, own_cache, uniforms_TPG, nothing_PG, np.ones_like(nothing_PG, bool)
        )
        running.take(Draws(*(values_PG[None] for values_PG in jax.device_get(draws))))
        return running

    def _decode(self, running: Running) -> None:
        # The last token that a row may have is drawn but never fed.
        room = self.sampling.max_tokens - 1
        steps = self.steps_per_dispatch or suited_steps(self.spec, running.is_finished_PG.size)
        num_steps = min(steps, MAX_STEPS, room - running.index)
        if running.index + num_steps > running.num_slots:
            num_slots = min(2 * running.num_slots, bucket(room))
            running.own_cache = grow(self.spec, running.own_cache, num_slots)
        running.own_cache, draws, num_taken = decode(
            self.spec,
            self.trainable,
            self.frozen,
            running.prefilled,
            running.own_cache,
            running.uniforms_TPG[running.index + 1 :][:MAX_STEPS],
            self.sampling.numbers,
            self._eos_ids(),
            running.last_tokens_PG,
            running.is_finished_PG,
            np.int32(running.index),
            np.int32(num_steps),
        )
        draws, num_taken = jax.device_get((draws, num_taken))
        running.take(Draws(*(values_NPG[:num_taken] for values_NPG in draws)))
        running.index += int(num_taken)
        self.decode_steps += int(num_taken)
        self.row_steps += int(num_taken) * running.is_finished_PG.size

    def _compact(self, running: Running) -> None:
        """Take finished rows out, where that halves the batch and its caches do not grow."""
        prompts_N, members_N = np.nonzero(~running.is_finished_PG)
        num_open, shape = len(prompts_N), running.is_finished_PG.shape
        num_rows = compacted_rows(num_open, running.is_finished_PG.size)
        num_left = self.sampling.max_tokens - 1 - running.index
        held = running.num_cached(shape[0], running.is_finished_PG.size)
        if (
            num_rows == running.is_finished_PG.size
            or num_rows % num_row_shards()
            or num_left < COMPACT_STEPS
            or running.num_cached(num_rows, num_rows) > held
        ):
            return
        rows = [[running.rows[p][g]] for p, g in zip(prompts_N, members_N, strict=True)]
        unused = np.zeros(num_rows - num_open, int)  # any row will do
        prompts_B = np.append(prompts_N, prompts_N[unused])
        members_B = np.append(members_N, members_N[unused])
        running.prefilled, running.own_cache = compact(
            running.prefilled, running.own_cache, prompts_B, members_B
        )
        running.rows = rows
        running.uniforms_TPG = running.uniforms_TPG[:, prompts_B, members_B][:, :, None]
        running.last_tokens_PG = running.last_tokens_PG[prompts_B, members_B][:, None]
        running.is_finished_PG = (np.arange(num_rows) >= num_open)[:, None]

    def _eos_ids(self) -> np.ndarray:
        """Padded by -1, which no token is."""
        eos_ids = self.tokenizer.eos_ids
        return np.append(eos_ids, np.full(bucket(len(eos_ids)) - len(eos_ids), -1)).astype(np.int32)

    def _prompts_of(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(tokens_PT, lengths_P), right-padded; for a prompt that is not there, the first again."""
        prompts = [self.prompts[i] for i in batch.prompts]
        prompts += prompts[:1] * (self.plan.num_prompts - len(prompts))
        lengths_P = np.array([len(prompt) for prompt in prompts], np.int32)
        longest = self.num_shared + bucket(int(lengths_P.max()) - self.num_shared)
        tokens_PT = np.full((len(prompts), longest), self.tokenizer.pad_id, np.int32)
        for tokens_T, prompt in zip(tokens_PT, prompts, strict=True):
            tokens_T[: len(prompt)] = prompt
        return tokens_PT, lengths_P

    def _uniforms_of(self, batch: Batch) -> np.ndarray:
        """The random numbers of every token that the batch may draw, and of MAX_STEPS more."""
        seed, iteration, numbers = self.sample_keys
        numbers_P = np.zeros(self.plan.num_prompts, np.uint32)
        numbers_P[: len(batch.prompts)] = [numbers[i] for i in batch.prompts]
        samples_G = batch.first_sample + np.arange(self.plan.group_size, dtype=np.uint32)
        samples_PG = np.tile(samples_G[None, :], (self.plan.num_prompts, 1))
        num_positions = bucket(self.sampling.max_tokens + MAX_STEPS)
        names = (np.uint32(seed), np.uint32(iteration), numbers_P, samples_PG)
        return np.asarray(sample_uniforms(*names, num_positions=num_positions))

    def _report(self, num_tokens: int | None = None) -> None:
        num_samples = sum(len(b.prompts) * b.num_samples for b in self.plan.batches)
        line = f"{self.num_done} of {num_samples} completions"
        self.progress(f"{line}, {num_tokens} tokens into the next" if num_tokens else line)
