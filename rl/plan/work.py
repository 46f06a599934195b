"""What one iteration of a run does, whatever it runs on."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rl.learner.packing import Shape, divide
from rl.mesh import roles_on_meshes
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec
from rl.rollout.pages import Demand
from rl.rollout.shapes import padded_length
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
    page_size: int
    kv_cache_bytes: int | None
    micro_batch_tokens: int
    is_rematerialised: bool

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def num_completion_tokens(self) -> int:
        return self.num_rows * self.completion_tokens

    def needs_policy_logprobs(self, lag: int) -> bool:
        """Whether the actor scores the rollouts before the update."""
        return self.is_anchored or lag > 0

    def micro_batches(
        self, num_prompts: int, length: int, num_shards: int = 1
    ) -> tuple[int, Shape]:
        """(how many, the shape of each) of so many groups of completions of this length."""
        is_needed = np.ones((num_prompts, self.group_size), bool)
        shape, parts = divide(
            is_needed,
            np.full(is_needed.shape, length),
            np.full(num_prompts, self.prompt_tokens),
            self.micro_batch_tokens,
            max_tokens=self.max_tokens,
            num_shards=num_shards,
        )
        return len(parts), shape

    def demand(self, num_shards: int) -> Demand:
        """What each replica of the rollout engine samples, over so many row shards."""
        num_prompts = -(-self.num_prompts // num_shards)
        lengths = (padded_length(self.prompt_tokens), self.max_tokens)
        return Demand(*lengths, num_prompts, self.group_size, self.max_rows)


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
        page_size=rollout["page_size"],
        kv_cache_bytes=rollout["kv_cache_mb"] and rollout["kv_cache_mb"] * 2**20,
        micro_batch_tokens=learner["micro_batch_tokens"],
        is_rematerialised=learner["remat"] == "layer",
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
