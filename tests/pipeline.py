"""The stages of one run called in this process, in the order of the DAG, without Snakemake."""

from pathlib import Path

from rl.config import complete
from rl.conflicts import model_name
from rl.context import Context
from rl.mesh import uses_critic
from rl.schedule import behaviour_version, is_anchored, penalises_reward, reference_version
from rl.stage_table import stage_config
from rl.stages import run

TINY = {
    "run": "tiny",
    "model": {
        "source": "scratch",
        "architecture": {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "ffn": 64},
    },
    "task": {"name": "sort_digits", "num_digits": 3, "num_train": 32, "num_heldout": 8},
    "reward": {"functions": [{"function": "random"}]},
    "rollout": {"prompts_per_iteration": 2, "group_size": 4, "max_tokens": 6},
}


def merged(base: dict, more: dict) -> dict:
    """`more` over `base`, block by block."""
    both = dict(base)
    for key, value in more.items():
        is_block = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if is_block else value
    return both


class Pipeline:
    """Runs stages below `folder`; `memory` is what the process remembers between them."""

    def __init__(self, folder: Path, **settings):
        self.folder = folder
        self.config = complete(merged(TINY, settings))
        self.said: list[str] = []
        self.memory: dict = {}
        self.layout = "all:devices=1"

    def path(self, *parts: str) -> Path:
        return self.folder.joinpath(*parts)

    def stage(self, name: str, iteration: int = 0, inputs=(), outputs=(), **config) -> None:
        """One stage; inputs and outputs are (name, path below the folder)."""
        request = {
            "stage": name,
            "config": stage_config(self.config, name) | config,
            "iteration": iteration,
            "inputs": {key: str(self.path(path)) for key, path in inputs},
            "outputs": {key: str(self.path(path)) for key, path in outputs},
            "cost": {
                "max_rows": 64,
                "page_size": 16,
                "kv_cache_mb": None,
                "micro_batch_tokens": 500,
                "remat": 0,
                "lag": self.config["lag"],
                **self.config["checks"],
            },
            "timings": str(self.path("timings", f"{name}-{iteration}.json")),
            "layout": self.layout,
        }
        run(request, Context(self.memory, self.said.append, lambda: None))

    def start(self) -> None:
        """The base, the prompts, policy version 0 and its weights."""
        self.stage("init_policy", outputs=[("model", "base")])
        outputs = [("train", "train.parquet"), ("heldout", "heldout.parquet")]
        self.stage("prepare_prompts", outputs=outputs)
        for model in self.config["reward"]["models"]:
            outputs = [("model", f"models/{model_name(model)}")]
            source = {"source": model["source"], "dtype": model["dtype"]}
            self.stage("init_value_model", outputs=outputs, **source)
        self.stage("start_policy", 0, [("base", "base")], [("policy", "0/policy")])
        if uses_critic(self.config):
            self.stage(
                "start_critic", 0, [("trunk", "base"), ("base", "base")], [("critic", "0/critic")]
            )
        self.sync(0)

    def sync(self, n: int) -> None:
        inputs = [("policy", f"{n}/policy"), ("base", "base")]
        self.stage("sync_weights", n, inputs, [("weights", f"{n}/weights")])

    def sample(self, n: int) -> None:
        """Rollouts, rewards, log-probabilities and advantages of iteration n."""
        rollouts = ("rollouts", f"{n}/rollouts.parquet")
        self.generate(n)
        self.score(n)
        if self.config["algorithm"]["kl"]["coefficient"]:
            outputs = [("reference", f"{n}/reference.parquet")]
            inputs = [rollouts, ("base", "base")]
            version = reference_version(self.config["reference"]["refresh_every"], n)
            inputs += [("policy", f"{version}/policy")] * (version > 0)
            self.stage("reference_logprobs", n, inputs, outputs)
        if is_anchored(self.config) or self.config["lag"]:
            inputs = [rollouts, ("policy", f"{n - 1}/policy"), ("base", "base")]
            outputs = [("policy_logprobs", f"{n}/policy_logprobs.parquet")]
            self.stage("policy_logprobs", n, inputs, outputs)
        if uses_critic(self.config):
            inputs = [rollouts, ("critic", f"{n - 1}/critic"), ("trunk", "base")]
            self.stage("critic_values", n, inputs, [("values", f"{n}/values.parquet")])
        self.advantages(n)

    def generate(self, n: int) -> None:
        weights = f"{behaviour_version(self.config['lag'], n)}/weights"
        inputs = [("weights", weights), ("base", "base"), ("prompts", "train.parquet")]
        self.stage("generate_rollouts", n, inputs, [("rollouts", f"{n}/rollouts.parquet")])

    def score(self, n: int) -> None:
        if self.config["reward"]["models"]:
            self.score_with_models(n)
        inputs = self.tables(n, "rollouts", "model_scores")
        self.stage("score_rewards", n, inputs, [("rewards", f"{n}/rewards.parquet")])

    def score_with_models(self, n: int) -> None:
        names = [model_name(model) for model in self.config["reward"]["models"]]
        inputs = [("rollouts", f"{n}/rollouts.parquet"), ("prompts", "train.parquet")]
        inputs += [(f"model.{name}", f"models/{name}") for name in names]
        outputs = [("model_scores", f"{n}/model_scores.parquet")]
        self.stage("score_with_models", n, inputs, outputs, names=names)

    def advantages(self, n: int) -> None:
        names = ["rollouts", "rewards", *(["values"] * uses_critic(self.config))]
        names += ["reference", "policy_logprobs"] * penalises_reward(self.config)
        outputs = [("advantages", f"{n}/advantages.parquet")]
        self.stage("estimate_advantages", n, self.tables(n, *names), outputs)

    def tables(self, n: int, *names: str) -> list[tuple[str, str]]:
        """Those of these tables that there are."""
        paths = [(name, f"{n}/{name}.parquet") for name in names]
        return [(name, path) for name, path in paths if self.path(path).exists()]

    def learn(self, n: int) -> None:
        tables = self.tables(n, "rollouts", "advantages", "reference", "policy_logprobs")
        inputs = [("policy", f"{n - 1}/policy"), ("base", "base"), *tables]
        outputs = [("policy", f"{n}/policy"), ("figures", f"{n}/update.json")]
        self.stage("update_actor", n, inputs, outputs)
        if uses_critic(self.config):
            tables = self.tables(n, "rollouts", "advantages", "values")
            inputs = [("critic", f"{n - 1}/critic"), ("trunk", "base"), *tables]
            outputs = [("critic", f"{n}/critic"), ("figures", f"{n}/critic_update.json")]
            self.stage("update_critic", n, inputs, outputs)

    def check(self, n: int) -> None:
        names = ("rollouts", "rewards", "advantages", "reference", "policy_logprobs", "values")
        inputs = [("policy", f"{n}/policy"), ("figures", f"{n}/update.json")]
        inputs += self.tables(n, *names, "model_scores")
        if uses_critic(self.config):
            inputs += [("critic", f"{n}/critic"), ("critic_figures", f"{n}/critic_update.json")]
        self.stage("check_iteration", n, inputs, [("checks", f"{n}/checks.json")])

    def iterate(self, n: int) -> None:
        self.sample(n)
        self.learn(n)
        self.check(n)
        self.sync(n)
