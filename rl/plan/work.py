"""What one iteration of a run does, whatever it runs on."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rl.learner.batch import divide
from rl.mesh import roles_on_meshes
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec
from rl.rollout.batching import Plan, plan_batches
from rl.schedule import is_anchored
from rl.tasks import make_prompts

UNKNOWN_PROMPT_TOKENS = 256
NUM_MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 0}
"""Float32 values that the optimizer keeps for each trained parameter (`rl.learner.optimizer`)."""


@dataclass(frozen=True)
class Work:
    """Lengths in tokens are those of every prompt and completion; `max_tokens` is the longest
    completion that memory must allow for."""

    spec: ModelSpec
    rollout_dtype: str
    num_moments: int
    has_reference: bool
    num_prompts: int
    group_size: int
    num_updates: int
    is_anchored: bool  # several updates a batch, or another rollout dtype
    prompt_tokens: int
    completion_tokens: int
    max_tokens: int
    max_rows: int
    micro_batch_size: int

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def num_completion_tokens(self) -> int:
        return self.num_rows * self.completion_tokens

    def needs_policy_logprobs(self, lag: int) -> bool:
        """Whether the actor scores the rollouts before the update."""
        return self.is_anchored or lag > 0

    def micro_batches(self, num_prompts: int) -> tuple[int, int, int]:
        """(how many, prompts of each, members of each group in it) of so many groups."""
        parts = divide(np.ones((num_prompts, self.group_size), bool), self.micro_batch_size)
        return len(parts), *parts[0].member_PG.shape

    def decode_plan(self, num_shards: int) -> Plan:
        """The batches that the rollout engine decodes, over so many row shards."""
        lengths = [self.prompt_tokens] * self.num_prompts
        return plan_batches(lengths, self.group_size, self.max_rows, num_shards)


def work_of(run: Mapping, model: ModelConfig, prompt_tokens: int, completion_tokens: int) -> Work:
    """From a run's complete config; lengths as given."""
    dtype, rollout, learner = run["model"]["dtype"], run["rollout"], run["learner"]
    rollout_dtype = dtype if rollout["dtype"] == "same" else rollout["dtype"]
    return Work(
        spec=ModelSpec(model, lora_of(run["lora"]), dtype),
        rollout_dtype=rollout_dtype,
        num_moments=NUM_MOMENTS[run["optimizer"]["name"]],
        has_reference="reference" in roles_on_meshes(run),
        num_prompts=rollout["prompts_per_iteration"],
        group_size=rollout["group_size"],
        num_updates=learner["updates_per_batch"],
        is_anchored=is_anchored(run),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        max_tokens=max(rollout["max_tokens"], completion_tokens),
        max_rows=rollout["max_rows"],
        micro_batch_size=learner["micro_batch_size"],
    )


def lora_of(block: Mapping, least_rank: int = 0) -> LoraConfig | None:
    """The adapter of a config's block; with `least_rank`, one even where the run has none."""
    rank = block["rank"] or least_rank
    return LoraConfig(rank, float(block["alpha"]), tuple(block["targets"])) if rank else None


def guessed_prompt_tokens(task: Mapping) -> int:
    """At most what a built-in task's longest prompt has, a character being a token at least; for a
    user's table, a guess."""
    if task["name"] == "table":
        return UNKNOWN_PROMPT_TOKENS
    train, _ = make_prompts(task)
    return max(len(text) for text in train["prompt"].to_pylist())
