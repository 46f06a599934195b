"""Sample groups of completions.

1. Groups are dealt out to the replicas of the model, each with decode slots and pages of its own.
2. A sample that finds a slot and pages begins; its group's prompt is computed once.
3. All rows draw a few tokens a dispatch; those that have ended leave, and others take their places.

A sample's tokens depend on its prompt and its keys alone: not on its slot, pages or neighbours.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax

from rl import group
from rl.errors import MeshdialError
from rl.models.spec import ModelSpec, Parameters
from rl.rollout.arrays import Assembler
from rl.rollout.attention.choice import choose_backend
from rl.rollout.attention.pool import page_bytes
from rl.rollout.completion import Completion, Row, Tokenizer
from rl.rollout.decode import MAX_STEPS
from rl.rollout.engine import Engine
from rl.rollout.pages import Demand, Pages, num_pages_for, pages_within
from rl.rollout.sampling import SamplingConfig, check_ids
from rl.rollout.scheduler import Prompt, Sample, Scheduler
from rl.rollout.shapes import padded_length
from rl.sharding import current, num_row_shards


@dataclass(frozen=True)
class EngineConfig:
    """What a rollout may use: it decides what sampling costs, never what is sampled.

    max_rows: decode slots, the most samples at once on each replica of the model.
    page_size: tokens of a page of the KV cache, a multiple of 8.
    kv_cache_bytes: most bytes of each replica's cache; None for what the samples can use at most,
        and no more than a quarter of the memory.
    backend: xla, cpu (a C++ kernel), pallas, or auto: the best of them here.
    steps_per_dispatch: 1 to 8; None for what suits the model's size.
    """

    max_rows: int = 64
    page_size: int = 16
    kv_cache_bytes: int | None = None
    backend: Literal["auto", "xla", "cpu", "pallas"] = "auto"
    steps_per_dispatch: int | None = None

    def __post_init__(self):
        bounds = {
            "max_rows": (self.max_rows >= 1, "at least 1"),
            "page_size": (self.page_size >= 8 and self.page_size % 8 == 0, "a multiple of 8"),
            "steps_per_dispatch": (self.steps_per_dispatch in (None, *range(1, 9)), "1 to 8"),
        }
        for name, (is_legal, expected) in bounds.items():
            if not is_legal:
                found = getattr(self, name)
                raise MeshdialError(f"rollout engine: {name} is {found!r}, expected {expected}")


def generate(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    sample_keys: tuple[int, int, Sequence[int]],
    group_size: int,
    sampling: SamplingConfig,
    engine: EngineConfig | None = None,
    progress: Callable[[str], None] = lambda line: None,
    announce: Callable[[str], None] = lambda line: None,
    check_alive: Callable[[], None] = lambda: None,
    figures: dict | None = None,
    limits_PG: Sequence[Sequence[int]] | None = None,
) -> list[list[Completion]]:
    """`group_size` completions of each prompt (its token ids), in the prompts' order.

    sample_keys: (seed, iteration, a number for each prompt), which with a sample's index in its
    group and a token's position decide every random draw; each is from 0 to 2**32 - 1.
    progress: told often how far it is; announce: told once of a kernel that is compiled, or why it
    is not. check_alive: called between dispatches; what it raises ends the call. figures: a dict
    that receives num_tokens (sampled), seconds, decode_steps, row_steps (decode steps times rows,
    unused ones too), prefill_tokens, preemptions, num_pages, peak_pages and kv_cache_bytes (of each
    replica). limits_PG: most tokens of each sample; sampling.max_tokens where it is not given.

    Raises MeshdialError for a prompt that is empty or too long, for logits that are not finite, and
    for a cache that cannot hold the longest sample.
    """
    began = time.perf_counter()
    engine = engine or EngineConfig()
    if not prompts or not group_size:
        return [[] for _ in prompts]
    _check_prompts(spec, prompts, sample_keys[2], sampling)
    check_ids(sampling, sampling.ends(tokenizer.eos_ids), spec.config.vocab_size)
    rows = [
        [
            Row(tokenizer, sampling, number, limits_PG[p][g] if limits_PG else sampling.max_tokens)
            for g in range(group_size)
        ]
        for p, number in enumerate(sample_keys[2])
    ]
    demand = Demand(
        padded_length(max(map(len, prompts))),
        sampling.max_tokens,
        -(-len(prompts) // num_row_shards()),
        group_size,
        engine.max_rows,
    )
    longest = max(map(len, prompts)) + sampling.max_tokens
    num_pages = _num_pages(spec, engine, demand, longest)
    schedulers = _deal(prompts, sample_keys[2], rows, engine, num_pages)
    running = Engine(
        spec,
        trainable,
        frozen,
        sample_keys[:2],
        sampling,
        sampling.ends(tokenizer.eos_ids),
        sampling.bans(tokenizer.eos_ids),
        schedulers,
        choose_backend(engine.backend, spec, engine.page_size, announce),
        Assembler(
            engine.page_size,
            num_pages_for(padded_length(longest + MAX_STEPS), engine.page_size),
            tokenizer.pad_id,
            group_size,
        ),
        engine.steps_per_dispatch,
        progress,
        check_alive,
    )
    running.run()
    if figures is not None:
        figures.update(_figures(running, time.perf_counter() - began, spec))
    return [[row.completion() for row in group] for group in rows]


def _deal(prompts, numbers, rows, engine: EngineConfig, num_pages: int) -> list[Scheduler]:
    """Whole groups to the replicas in turn, prompts of like length after each other."""
    schedulers = [
        Scheduler(Pages(num_pages, engine.page_size), engine.max_rows)
        for _ in range(num_row_shards())
    ]
    order = sorted(range(len(prompts)), key=lambda p: len(prompts[p]))
    for turn, p in enumerate(order):
        prompt = Prompt(list(prompts[p]), numbers[p], len(rows[p]))
        samples = (Sample(prompt, g, row) for g, row in enumerate(rows[p]))
        schedulers[turn % len(schedulers)].waiting.extend(samples)
    return schedulers


def _num_pages(spec: ModelSpec, engine: EngineConfig, demand: Demand, longest: int) -> int:
    """Pages of each replica: what its samples can use, as far as the budget reaches; at least what
    the longest sample, in tokens, needs."""
    budget = engine.kv_cache_bytes or _default_budget()
    return pages_within(
        budget,
        "rollout.kv_cache_mb" if engine.kv_cache_bytes else "a quarter of the memory",
        page_bytes(spec, engine.page_size),
        demand.num_pages(engine.page_size),
        longest,
        engine.page_size,
    )


def _default_budget() -> int:
    """A quarter of the memory of a replica's devices; of the host's, where they are processors.
    The least of what the processes of a mesh have."""
    facts = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in facts:
        memory = facts["bytes_limit"] * current().shape["tensor"]
    else:
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = host // num_row_shards()
    return min(group.gather(memory // 4))


def _figures(engine: Engine, seconds: float, spec: ModelSpec) -> dict:
    counts, pages = engine.counts, engine.schedulers[0].pages
    return {
        "num_tokens": counts.num_tokens,
        "seconds": seconds,
        "decode_steps": counts.decode_steps,
        "row_steps": counts.row_steps,
        "prefill_tokens": counts.prefill_tokens,
        "preemptions": sum(scheduler.num_preempted for scheduler in engine.schedulers),
        "num_pages": pages.num_pages,
        "peak_pages": max(scheduler.pages.peak for scheduler in engine.schedulers),
        "kv_cache_bytes": pages.num_pages * page_bytes(spec, pages.page_size),
        "backend": engine.backend.name,
    }


def _check_prompts(spec, prompts, prompt_numbers, sampling: SamplingConfig) -> None:
    context = spec.config.max_position_embeddings
    longest = context - sampling.max_tokens
    if longest < 1:
        raise MeshdialError(
            f"rollout.max_tokens is {sampling.max_tokens}, expected less than the model's "
            f"max_position_embeddings, {context}"
        )
    for number, prompt in zip(prompt_numbers, prompts, strict=True):
        if not len(prompt):
            raise MeshdialError(f"prompt {number} has no tokens, expected at least one")
        if len(prompt) > longest:
            raise MeshdialError(
                f"prompt {number} has {len(prompt)} tokens, expected at most {longest}: the model's"
                f" max_position_embeddings less rollout.max_tokens, {sampling.max_tokens}"
            )
