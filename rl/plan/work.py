"""What one iteration of a run does, whatever it runs on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from rl.learner.packing import Shape, divide
from rl.mesh import roles_on_meshes, uses_critic
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec
from rl.rollout.pages import Demand
from rl.rollout.shapes import padded_length
from rl.schedule import is_anchored, num_sampled_prompts
from rl.tasks import make_prompts

UNKNOWN_PROMPT_TOKENS = 256
NUM_MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 0}
"""Float32 values that the optimizer keeps for each trained parameter (`rl.learner.optimizer`)."""


@dataclass(frozen=True)
class Critic:
    """A value model and how it is trained. `source` is None where it starts from the base."""

    spec: ModelSpec
    source: str | None
    num_moments: int
    num_updates: int
    num_epochs: int


@dataclass(frozen=True)
class RewardModel:
    source: str
    spec: ModelSpec


@dataclass(frozen=True)
class Work:
    """Lengths in tokens are those of every prompt and completion; `max_tokens` is the longest
    completion that memory must allow for. `num_sampled` prompts are sampled and scored, and
    `num_prompts` of them trained on, in `num_epochs` times `num_updates` updates."""

    spec: ModelSpec
    rollout_dtype: str
    num_moments: int
    has_reference: bool
    num_prompts: int
    num_sampled: int
    group_size: int
    num_updates: int
    num_epochs: int
    is_anchored: bool  # several updates a batch, another rollout dtype, or a KL in the reward
    prompt_tokens: int
    completion_tokens: int
    max_tokens: int
    max_rows: int
    page_size: int
    kv_cache_bytes: int | None
    micro_batch_tokens: int
    is_rematerialised: bool
    is_reference_refreshed: bool = False  # the reference is an earlier policy
    critic: Critic | None = None
    reward_models: tuple[RewardModel, ...] = ()

    @property
    def num_completion_tokens(self) -> int:
        """That are sampled in an iteration."""
        return self.num_sampled * self.group_size * self.completion_tokens

    @property
    def of_critic(self) -> "Work":
        """The same batch, where the model is the critic."""
        names = ("spec", "num_moments", "num_updates", "num_epochs")
        return replace(self, **{name: getattr(self.critic, name) for name in names})

    def of_model(self, spec: ModelSpec) -> "Work":
        """The same batch, where the model is another."""
        return replace(self, spec=spec)

    def specs_of(self, role: str) -> tuple[ModelSpec, ...]:
        """The models that a role computes with."""
        if role == "critic":
            return (self.critic.spec,) if self.critic else ()
        return tuple(m.spec for m in self.reward_models) if role == "reward" else (self.spec,)

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
        num_prompts = -(-self.num_sampled // num_shards)
        lengths = (padded_length(self.prompt_tokens), self.max_tokens)
        return Demand(*lengths, num_prompts, self.group_size, self.max_rows)


def work_of(
    run: Mapping,
    model: ModelConfig,
    prompt_tokens: int,
    completion_tokens: int,
    others: Mapping[str, ModelConfig] | None = None,
) -> Work:
    """From a run's complete config; lengths as given. `others`: the sizes of its critic's and its
    reward models' sources. A critic from a source that is not among them is taken to have the
    sizes of `model`, and a reward model is left out."""
    others = others or {}
    dtype, rollout, learner = run["model"]["dtype"], run["rollout"], run["learner"]
    rollout_dtype = dtype if rollout["dtype"] == "same" else rollout["dtype"]
    return Work(
        spec=ModelSpec(model, lora_of(run["lora"]), dtype),
        rollout_dtype=rollout_dtype,
        num_moments=NUM_MOMENTS[run["optimizer"]["name"]],
        has_reference="reference" in roles_on_meshes(run),
        num_prompts=rollout["prompts_per_iteration"],
        num_sampled=num_sampled_prompts(rollout),
        group_size=rollout["group_size"],
        num_updates=learner["updates_per_batch"],
        num_epochs=learner["epochs"],
        is_anchored=is_anchored(run),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        max_tokens=max(rollout["max_tokens"], completion_tokens),
        max_rows=rollout["max_rows"],
        page_size=rollout["page_size"],
        kv_cache_bytes=rollout["kv_cache_mb"] and rollout["kv_cache_mb"] * 2**20,
        micro_batch_tokens=learner["micro_batch_tokens"],
        is_rematerialised=learner["remat"] == "layer",
        is_reference_refreshed=run["reference"]["refresh_every"] is not None,
        critic=_critic(run, model, others) if uses_critic(run) else None,
        reward_models=tuple(
            RewardModel(m["source"], ModelSpec(others[m["source"]], None, m["dtype"], "value"))
            for m in run["reward"]["models"]
            if m["source"] in others
        ),
    )


def _critic(run: Mapping, model: ModelConfig, others: Mapping[str, ModelConfig]) -> Critic:
    """In the dtype of the policy, whatever it starts from."""
    block = run["critic"]
    config = others.get(block["source"], model)
    return Critic(
        spec=ModelSpec(config, lora_of(block["lora"]), run["model"]["dtype"], "value"),
        source=block["source"],
        num_moments=NUM_MOMENTS[block["optimizer"]["name"]],
        num_updates=block["updates_per_batch"],
        num_epochs=block["epochs"],
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
