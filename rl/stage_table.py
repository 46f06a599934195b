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
    # Of one model: the workflow adds its source and dtype.
    "init_value_model": StageSpec(1, ()),
    "start_critic": StageSpec(1, ("seed", "critic.lora", "critic.optimizer.name")),
    "sync_weights": StageSpec(2, ("lora", "rollout.dtype")),
    "generate_rollouts": StageSpec(
        3,
        (
            *("seed", "lora", "rollout.prompts_per_iteration", "rollout.oversampling"),
            *("rollout.group_size", *SAMPLING),
        ),
    ),
    # The workflow adds the models' names: their weights do not matter here.
    "score_with_models": StageSpec(1, ()),
    "score_rewards": StageSpec(
        2,
        (
            *("seed", "reward.functions", "reward.models", "reward.time_limit_s"),
            "reward.memory_limit_mb",
        ),
    ),
    "reference_logprobs": StageSpec(
        3, ("rollout.temperature", "rollout.max_tokens", "lora", "reference.refresh_every")
    ),
    "policy_logprobs": StageSpec(2, ("lora", "rollout.temperature", "rollout.max_tokens")),
    "critic_values": StageSpec(1, ("critic.lora", "rollout.max_tokens")),
    "estimate_advantages": StageSpec(
        2,
        (
            *("algorithm.advantage", "reward_kl", "algorithm.pass_rate"),
            *("algorithm.passing_reward", "algorithm.overlong", "algorithm.length_penalty"),
            *("rollout.prompts_per_iteration", "rollout.oversampling", "rollout.max_tokens"),
            "reward.failure_value",
        ),
    ),
    "update_actor": StageSpec(
        4,
        (
            *("lora", "rollout.temperature", "rollout.max_tokens", "optimizer", "lag"),
            *("learner.epochs", "learner.updates_per_batch", "warmup_iterations"),
            *("algorithm.ratio", "algorithm.clip"),
            *("algorithm.aggregation", "algorithm.kl", "algorithm.entropy_coefficient"),
            "algorithm.off_policy",
        ),
    ),
    "update_critic": StageSpec(
        1,
        (
            *("critic.lora", "critic.optimizer", "critic.clip", "critic.epochs"),
            *("critic.updates_per_batch", "rollout.max_tokens"),
        ),
    ),
    "check_iteration": StageSpec(3, ("lag",)),
    "evaluate_policy": StageSpec(
        3,
        (
            *("lora", "evaluation.temperature", "evaluation.max_prompts", "evaluation.functions"),
            *("evaluation.num_samples", "evaluation.sample_temperature"),
            *("reward.time_limit_s", "reward.memory_limit_mb"),
            *ENDING,
        ),
    ),
    # For a sink that shows the settings of a run beside its figures.
    "report_run": StageSpec(
        3,
        (
            *("iterations", "evaluation.every", "evaluation.pass_at", "metrics", "seed", "model"),
            *("lora", "task", "lag", "rollout.prompts_per_iteration", "rollout.oversampling"),
            *("rollout.group_size", *SAMPLING, "reward", "algorithm", "reference", "critic"),
            *("optimizer", "learner.epochs", "learner.updates_per_batch"),
        ),
    ),
    "compare_runs": StageSpec(1, ()),
}


def _reward_kl(config: Mapping) -> Any:
    """The KL penalty, where it is part of the reward."""
    kl = config["algorithm"]["kl"]
    return kl if kl["place"] == "reward" and kl["coefficient"] else None


def _warmup_iterations(config: Mapping) -> int:
    """How long the policy waits for its critic, if it has one."""
    has_critic = config["algorithm"]["advantage"]["estimator"] == "gae"
    return config["critic"]["warmup_iterations"] if has_critic else 0


DERIVED = {"reward_kl": _reward_kl, "warmup_iterations": _warmup_iterations}
"""Keys of a slice that are not a key of the config: what a stage reads of several."""


def stage_config(config: Mapping, stage: str) -> dict[str, Any]:
    """The slice of `config` that `stage` reads, as a flat mapping from dotted key to value."""
    spec = STAGES[stage]
    return {"stage_version": spec.version} | {
        key: DERIVED[key](config) if key in DERIVED else _lookup(config, key) for key in spec.keys
    }


def _lookup(config: Mapping, dotted: str) -> Any:
    value = config
    for key in dotted.split("."):
        value = value[key]
    return value
