"""Runs one batch of samples after the other: start, decode until every row has ended, hand back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from rl.errors import MeshdialError
from rl.models.spec import ModelSpec, Parameters
from rl.models.transformer import Cache, parameter_shapes
from rl.rollout.batching import Batch, Plan, bucket
from rl.rollout.completion import Row, Tokenizer
from rl.rollout.decode import MAX_STEPS, Draws, Prefilled, SampleKeys, decode, grow, start
from rl.rollout.sampling import SamplingConfig

FLOPS_A_DISPATCH = 4e9
"""Small models take several steps a dispatch, until it does this much: that hides what it costs.
Large ones take one, so that no step runs after stop texts, which the host finds, ended every row.
"""

FIRST_SLOTS = 32
"""Room for new tokens that a batch begins with. It doubles when used up: few shapes are compiled,
and a step never reads more than twice the tokens that there are."""

PROGRESS_TOKENS = 32
"""Positions of a batch between two lines of progress."""


def steps_per_dispatch(spec: ModelSpec, num_rows: int) -> int:
    num_parameters = sum(int(np.prod(shape)) for shape in parameter_shapes(spec).values())
    return int(np.clip(FLOPS_A_DISPATCH / (2 * num_parameters * num_rows), 1, MAX_STEPS))


@dataclass
class Running:
    """A batch on the device, and its rows on the host."""

    rows: list[list[Row]]
    prefilled: Prefilled
    own_cache: Cache
    num_slots: int
    last_tokens_PG: np.ndarray
    is_finished_PG: np.ndarray
    index: int = 0  # of the last token, among each row's new tokens

    @property
    def is_open(self) -> bool:
        return not self.is_finished_PG.all()


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
    steps_per_dispatch: int
    progress: Callable[[str], None]
    check_alive: Callable[[], None]
    decode_steps: int = field(default=0, init=False)
    num_done: int = field(default=0, init=False)

    def run(self, batch: Batch) -> list[list[Row]]:
        """The finished rows of the batch's samples, by prompt."""
        self.check_alive()
        running = self._start(batch)
        while running.is_open:
            self.check_alive()
            self._decode(batch, running)
        self.num_done += len(batch.prompts) * batch.num_samples
        self._report(running)
        return running.rows

    def _start(self, batch: Batch) -> Running:
        num_slots = min(FIRST_SLOTS, bucket(self.sampling.max_tokens - 1))
        prefilled, own_cache, draws = start(
            self.spec,
            self.trainable,
            self.frozen,
            *self._prompts_of(batch),
            self._keys_of(batch),
            self.sampling.numbers,
            num_slots,
        )
        group = range(batch.num_samples)
        rows = [[Row(self.tokenizer, self.sampling) for _ in group] for _ in batch.prompts]
        nobody_PG = np.ones((self.plan.num_prompts, self.plan.group_size), bool)
        running = Running(rows, prefilled, own_cache, num_slots, None, nobody_PG)
        self._take(batch, running, Draws(*(values_PG[None] for values_PG in jax.device_get(draws))))
        return running

    def _decode(self, batch: Batch, running: Running) -> None:
        # The last token that a row may have is drawn but never fed.
        room = self.sampling.max_tokens - 1
        num_steps = min(self.steps_per_dispatch, room - running.index)
        if running.index + num_steps > running.num_slots:
            running.num_slots = min(2 * running.num_slots, bucket(room))
            running.own_cache = grow(self.spec, running.own_cache, running.num_slots)
        running.own_cache, draws, num_taken = decode(
            self.spec,
            self.trainable,
            self.frozen,
            running.prefilled,
            running.own_cache,
            self.sampling.numbers,
            np.asarray(self.tokenizer.eos_ids or [-1], np.int32),
            running.last_tokens_PG,
            running.is_finished_PG,
            np.int32(running.index),
            np.int32(num_steps),
        )
        draws, num_taken = jax.device_get((draws, num_taken))
        self._take(batch, running, Draws(*(values_NPG[:num_taken] for values_NPG in draws)))
        running.index += int(num_taken)
        self.decode_steps += int(num_taken)
        if running.index % PROGRESS_TOKENS < num_taken:
            self._report(running)

    def _take(self, batch: Batch, running: Running, draws: Draws) -> None:
        """Give every row its new tokens, from draws_NPG."""
        tokens, logprobs, truncated = (
            np.moveaxis(values_NPG, 0, 2).tolist() for values_NPG in draws
        )
        for p, group in enumerate(running.rows):
            if not np.isfinite(draws.logprobs[:, p, : len(group)]).all():
                number = self.sample_keys[2][batch.prompts[p]]
                raise MeshdialError(
                    f"the model's logits after prompt {number} are not finite numbers"
                )
            for g, row in enumerate(group):
                row.extend(tokens[p][g], logprobs[p][g], truncated[p][g])
                running.is_finished_PG[p, g] = row.finish_reason is not None
        running.last_tokens_PG = draws.tokens[-1]

    def _prompts_of(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(prefix_T, own_tokens_PT, own_lengths_P): a prompt that is not there is one padding."""
        prompts = [self.prompts[i] for i in batch.prompts]
        longest = bucket(max(len(prompt) for prompt in prompts) - self.num_shared)
        own_PT = np.full((self.plan.num_prompts, longest), self.tokenizer.pad_id, np.int32)
        lengths_P = np.ones(self.plan.num_prompts, np.int32)
        for p, prompt in enumerate(prompts):
            lengths_P[p] = len(prompt) - self.num_shared
            own_PT[p, : lengths_P[p]] = prompt[self.num_shared :]
        prefix_T = np.asarray(prompts[0][: self.num_shared], np.int32)
        return prefix_T, own_PT, lengths_P

    def _keys_of(self, batch: Batch) -> SampleKeys:
        seed, iteration, numbers = self.sample_keys
        numbers_P = np.zeros(self.plan.num_prompts, np.uint32)
        numbers_P[: len(batch.prompts)] = [numbers[i] for i in batch.prompts]
        samples_G = batch.first_sample + np.arange(self.plan.group_size, dtype=np.uint32)
        samples_PG = np.tile(samples_G[None, :], (self.plan.num_prompts, 1))
        return SampleKeys(np.uint32(seed), np.uint32(iteration), numbers_P, samples_PG)

    def _report(self, running: Running) -> None:
        rows = [row for group in running.rows for row in group]
        num_open = sum(row.finish_reason is None for row in rows)
        num_done = self.num_done + (len(rows) - num_open if num_open else 0)
        num_samples = sum(len(b.prompts) * b.num_samples for b in self.plan.batches)
        line = f"{num_done} of {num_samples} completions"
        self.progress(
            f"{line}, {running.index + 1} tokens into {num_open} more" if num_open else line
        )
