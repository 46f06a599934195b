"""Completions of some prompts by one policy version, as a table."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from rl.artifacts import group_id, make_table, sample_id
from rl.context import Context
from rl.models.tokenizer import Tokenizer
from rl.rollout.completion import Completion
from rl.rollout.sampler import EngineConfig, generate
from rl.rollout.sampling import SamplingConfig
from rl.stages.request import Request
from rl.stages.tokens import encode_prompts
from rl.sync import RolloutPolicy


def sample_completions(
    job: Request,
    context: Context,
    policy: RolloutPolicy,
    tokenizer: Tokenizer,
    prompts: pa.Table,
    sample_keys: tuple[int, int, list[int]],
    group_size: int,
    sampling: SamplingConfig,
) -> pa.Table:
    """A group of completions of each prompt, a row each; what it cost goes to the timings.

    `sample_keys` are those of `generate`: seed, iteration, and a number for each prompt.
    """
    texts, tokens = encode_prompts(prompts, tokenizer)
    figures: dict = {}
    with job.computing():
        groups = generate(
            policy.spec,
            policy.trainable,
            policy.frozen,
            tokenizer,
            tokens,
            sample_keys,
            group_size,
            sampling,
            _engine(job.cost),
            progress=context.occasionally(job.stage),
            announce=lambda line: context.progress(f"{job.stage}: {line}"),
            check_alive=context.check_alive,
            figures=figures,
        )
    job.costs_found |= {"rollout": figures, "sync": policy.sync}
    seed, iteration, _ = sample_keys
    ids = [group_id(seed, iteration, name) for name in prompts["prompt_id"].to_pylist()]
    return completion_table(prompts, texts, tokens, groups, ids, policy.version)


def ending(config: Mapping, tokenizer: Tokenizer) -> dict[str, Any]:
    """The part of a SamplingConfig that says where completions end, and what is never drawn."""
    return {
        "max_tokens": config["rollout.max_tokens"],
        "min_tokens": config["rollout.min_tokens"],
        "stop": tuple(config["rollout.stop"]),
        "eos_ids": tuple(sorted({*tokenizer.eos_ids, *config["rollout.stop_token_ids"]})),
        "forbidden_ids": tuple(config["rollout.forbidden_tokens"]),
    }


def _engine(cost: Mapping) -> EngineConfig:
    limit = cost["kv_cache_mb"]
    return EngineConfig(
        max_rows=cost["max_rows"],
        page_size=cost["page_size"],
        kv_cache_bytes=None if limit is None else limit * 2**20,
    )


def completion_table(
    prompts: pa.Table,
    texts: list[str],
    tokens: list[list[int]],
    groups: list[list[Completion]],
    group_ids: list[str],
    version: int,
) -> pa.Table:
    """The rollout table: a row for each completion, groups in prompt order."""
    rows = [
        {
            "sample_id": sample_id(group_ids[p], g),
            "group_id": group_ids[p],
            "prompt_id": prompt["prompt_id"],
            "prompt": texts[p],
            "prompt_tokens": tokens[p],
            "completion": completion.text,
            "completion_tokens": completion.tokens,
            "completion_mask": [True] * len(completion.tokens),
            "rollout_logprobs": completion.logprobs,
            "sampling_logprobs": completion.sampling_logprobs,
            "policy_version": version,
            "finish_reason": completion.finish_reason,
            "ground_truth": prompt["ground_truth"],
            "info": prompt["info"],
        }
        for p, prompt in enumerate(prompts.to_pylist())
        for g, completion in enumerate(groups[p])
    ]
    return make_table("rollouts", {name: [row[name] for row in rows] for name in rows[0]})
