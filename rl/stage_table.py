"""Every stage: its version, and the keys of the config that it reads.

The version is raised by hand whenever a stage's results change for the same inputs; together with
the slice of the config it decides what has to run again. A key that no slice names is a matter of
cost alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StageSpec:
    """A stage's version and the dotted config keys that its results depend on."""

    version: int
    keys: tuple[str, ...]


ENDING = tuple(
    f"rollout.{key}"
    for key in ("max_tokens", "stop", "stop_token_ids", "forbidden_tokens", "min_tokens")
)
SAMPLING = (
    *ENDING,
    *(f"rollout.{key}" for key in ("temperature", "top_k", "top_p", "min_p", "time_limit_s")),
)

STAGES = {
    "init_policy": StageSpec(2, ("model",)),
    "prepare_prompts": StageSpec(1, ("task",)),
    "warm_start": StageSpec(3, ("warm_start", "rollout.max_tokens")),
    "start_policy": StageSpec(1, ("seed", "lora", "optimizer.name")),
    "sync_weights": StageSpec(2, ("lora", "rollout.dtype")),
    "generate_rollouts": StageSpec(
        2, ("seed", "lora", "rollout.prompts_per_iteration", "rollout.group_size", *SAMPLING)
    ),
    "score_rewards": StageSpec(
        1, ("seed", "reward.functions", "reward.time_limit_s", "reward.memory_limit_mb")
    ),
    "reference_logprobs": StageSpec(2, ("rollout.temperature", "rollout.max_tokens")),
    "policy_logprobs": StageSpec(2, ("lora", "rollout.temperature", "rollout.max_tokens")),
    "estimate_advantages": StageSpec(1, ("algorithm.deviation",)),
    "update_actor": StageSpec(
        3,
        (
            *("lora", "rollout.temperature", "rollout.max_tokens", "learner.updates_per_batch"),
            *("algorithm.clip_low", "algorithm.clip_high", "algorithm.aggregation", "algorithm.kl"),
            *("optimizer", "lag", "algorithm.off_policy"),
        ),
    ),
    "check_iteration": StageSpec(2, ("lag",)),
    "evaluate_policy": StageSpec(
        2,
        (
            *("lora", "evaluation.temperature", "evaluation.max_prompts", "evaluation.functions"),
            *("reward.time_limit_s", "reward.memory_limit_mb"),
            *ENDING,
        ),
    ),
    # For a sink that shows the settings of a run beside its figures.
    "report_run": StageSpec(
        2,
        (
            *("iterations", "evaluation.every", "metrics", "seed", "model", "lora", "task"),
            "lag",
            *("rollout.prompts_per_iteration", "rollout.group_size", *SAMPLING),
            *("reward.functions", "algorithm", "optimizer", "learner.updates_per_batch"),
        ),
    ),
    "compare_runs": StageSpec(1, ()),
}


def stage_config(config: Mapping, stage: str) -> dict[str, Any]:
    """The slice of `config` that `stage` reads, as a flat mapping from dotted key to value."""
    spec = STAGES[stage]
    return {"stage_version": spec.version} | {key: _lookup(config, key) for key in spec.keys}


def _lookup(config: Mapping, dotted: str) -> Any:
    value = config
    for key in dotted.split("."):
        value = value[key]
    return value
