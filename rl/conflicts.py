"""Keys of a config that do not fit each other."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl.algorithms.presets import READ_WITH, combination_errors
from rl.mesh import check_dial, check_fit, uses_critic


def unread_keys(written: Mapping, config: Mapping, plain: Mapping) -> Iterator[str]:
    """One sentence for each key that nothing reads beside another's value, and that was written
    as something else than it is in `plain`, where nothing was written."""
    for key, (other, values) in READ_WITH.items():
        value, chosen = lookup(written, key), lookup(config, other)
        if value not in (None, lookup(plain, key)) and chosen not in values:
            yield (
                f"{key} is {value!r}, which is read only where {other} is "
                f"{' or '.join(map(str, values))}, and it is {chosen}"
            )

    for key, is_read, condition in _READ_WHERE:
        for inner, value in _leaves(lookup(written, key), key):
            if value not in (None, lookup(plain, inner)) and not is_read(config):
                yield f"{inner} is {value!r:.40}, which is read only where {condition}"


def _has_kl(config: Mapping) -> bool:
    return config["algorithm"]["kl"]["coefficient"] > 0


def _tells_passing(config: Mapping) -> bool:
    algorithm = config["algorithm"]
    return list(algorithm["pass_rate"]) != [0, 1] or algorithm["length_penalty"]["kind"] == "group"


_READ_WHERE = (
    ("critic", uses_critic, "the algorithm has a critic (algorithm.advantage.estimator is gae)"),
    ("reference", _has_kl, "algorithm.kl.coefficient is more than 0"),
    ("algorithm.kl.place", _has_kl, "algorithm.kl.coefficient is more than 0"),
    ("algorithm.kl.estimator", _has_kl, "algorithm.kl.coefficient is more than 0"),
    (
        "algorithm.passing_reward",
        _tells_passing,
        "algorithm.pass_rate or length_penalty.kind: group tells who passes",
    ),
    (
        "algorithm.overlong.penalty",
        lambda config: config["algorithm"]["overlong"]["buffer_tokens"] > 0,
        "algorithm.overlong.buffer_tokens is more than 0",
    ),
    (
        "algorithm.length_penalty.kind",
        lambda config: config["algorithm"]["length_penalty"]["coefficient"] > 0,
        "algorithm.length_penalty.coefficient is more than 0",
    ),
    *(
        (
            f"evaluation.{key}",
            lambda config: config["evaluation"]["num_samples"] > 0,
            "evaluation.num_samples is more than 0",
        )
        for key in ("pass_at", "sample_temperature")
    ),
    (
        "evaluation.num_samples",
        lambda config: config["evaluation"]["every"] > 0,
        "evaluation.every is more than 0",
    ),
    (
        "task.pass_rate",
        lambda config: config["task"]["pass_rate_column"] is not None,
        "task.pass_rate_column names a column",
    ),
    (
        "task.datasets",
        lambda config: config["task"]["name"] == "reasoning_gym",
        "task.name is reasoning_gym",
    ),
)
"""Keys, or blocks of them, that are read only under a condition: (key, condition, its words)."""


def _leaves(value, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}")
    else:
        yield key, value


def lookup(config: Mapping, dotted: str):
    """The value of a dotted key, None where it is not there."""
    for key in dotted.split("."):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def conflicts(config: Mapping) -> Iterator[str]:
    """One sentence for each case; `config` is complete, and right key by key."""
    rollout, learner, model = config["rollout"], config["learner"], config["model"]
    yield from _divided(rollout, learner, "learner")
    if uses_critic(config):
        yield from _divided(rollout, config["critic"], "critic")
        yield from _optimizer("critic.optimizer", config["critic"]["optimizer"])
    yield from _optimizer("optimizer", config["optimizer"])
    yield from combination_errors(config)
    yield from _truncated(rollout)
    yield from _scored(config)
    yield from _evaluated(config["evaluation"])
    if (model["source"] == "scratch") != (model["architecture"] is not None):
        yield (
            f"model.source is {model['source']!r} and model.architecture is "
            f"{'missing' if model['architecture'] is None else 'given'}; the source scratch needs "
            "an architecture, and no other source takes one"
        )
    if model["architecture"] is not None:
        yield from _misshapen(model["architecture"])
    task = config["task"]
    low, high = task["pass_rate"]
    if low > high:
        yield f"task.pass_rate is [{low}, {high}], expected the lower bound first"
    if task["name"] == "reasoning_gym" and not task["datasets"]:
        yield "task.datasets is empty, and the task reasoning_gym mixes them; name at least one"
    if (task["name"] == "table") != (task["train_file"] is not None):
        yield (
            f"task.name is {task['name']} and task.train_file is {task['train_file']!r}; the task "
            "table reads a file, and no other task does"
        )
    cluster = config["cluster"]
    if uses_critic(config) and len(cluster["meshes"]) > 1 and cluster["roles"]["critic"] is None:
        yield (
            f"cluster.roles.critic is missing, and the estimator gae has a critic; expected one of "
            f"the meshes {', '.join(cluster['meshes'])}"
        )
    yield from list(check_dial(cluster)) or check_fit(config)


def _divided(rollout: Mapping, learner: Mapping, block: str) -> Iterator[str]:
    prompts, updates = rollout["prompts_per_iteration"], learner["updates_per_batch"]
    if prompts % updates:
        yield (
            f"rollout.prompts_per_iteration is {prompts} (a batch of {prompts} x "
            f"{rollout['group_size']} completions), which {block}.updates_per_batch = {updates} "
            "does not divide; each update takes whole groups"
        )


def _optimizer(block: str, optimizer: Mapping) -> Iterator[str]:
    if optimizer["schedule"] != "constant" and optimizer["horizon"] is None:
        yield f"{block}.schedule is {optimizer['schedule']}, which needs {block}.horizon"
    if optimizer["name"] == "adam" and optimizer["weight_decay"]:
        yield (
            f"{block}.weight_decay is {optimizer['weight_decay']}, and {block}.name is adam, "
            "which has none; take adamw"
        )
    if optimizer["horizon"] is not None and optimizer["horizon"] <= optimizer["warmup"]:
        yield (
            f"{block}.horizon is {optimizer['horizon']}, expected more than "
            f"{block}.warmup = {optimizer['warmup']}"
        )


def _scored(config: Mapping) -> Iterator[str]:
    reward = config["reward"]
    if not reward["functions"] and not reward["models"]:
        yield "reward.functions is empty and so is reward.models; expected at least one of either"
    names = [model_name(model) for model in reward["models"]]
    names += [
        function["name"] or function["function"].rpartition(":")[2]
        for function in reward["functions"]
    ]
    for name in names:
        if names.count(name) > 1:
            yield f"reward has two components called {name}; give one of them a name of its own"
            return
    yield from _judged(config)
    if not config["evaluation"]["functions"] and config["evaluation"]["every"]:
        yield (
            "evaluation.functions is missing: reward models do not say which answers are right; "
            "name a function, or set evaluation.every: 0"
        )


def _judged(config: Mapping) -> Iterator[str]:
    """An answer is right, or passes, by its raw reward: that has to be able to say so."""
    reward, functions = config["reward"], config["evaluation"]["functions"]
    for number, function in enumerate(functions):
        if function["normalise"] != "none":
            yield (
                f"evaluation.functions.{number}.normalise is {function['normalise']}; whether an "
                "answer is right does not depend on others, expected none"
            )
    # A built-in says 1 at most; what a user's function says is the user's.
    is_built_in = all(":" not in function["function"] for function in functions)
    most = sum(max(function["weight"], 0.0) for function in functions)
    if functions and is_built_in and most < 1 - 1e-9 and config["evaluation"]["every"]:
        yield (
            f"evaluation.functions (reward.functions by default) add up to {most:g} at most, and "
            "an answer is right at 1; give evaluation.functions weights of their own"
        )
    components = [*reward["functions"], *reward["models"]]
    if _tells_passing(config) and any(part["normalise"] != "none" for part in components):
        yield (
            "algorithm.passing_reward tells who passes by the raw reward, and a component of "
            "reward is normalised; take normalise: none"
        )


def model_name(model: Mapping) -> str:
    """The component that a reward model is: its own name or its folder's."""
    return model["name"] or re.sub(r"[^A-Za-z0-9._-]", "-", Path(model["source"]).name)


def _evaluated(evaluation: Mapping) -> Iterator[str]:
    for k in evaluation["pass_at"]:
        if evaluation["num_samples"] and k > evaluation["num_samples"]:
            yield (
                f"evaluation.pass_at has {k}, expected at most evaluation.num_samples = "
                f"{evaluation['num_samples']}"
            )


def _misshapen(architecture: Mapping) -> Iterator[str]:
    width, heads, kv_heads = (architecture[key] for key in ("width", "heads", "kv_heads"))
    where = "model.architecture"
    if width % (2 * heads):
        yield f"{where}.width is {width}, expected a multiple of 2 x heads = {2 * heads}"
    if heads % kv_heads:
        yield f"{where}.heads is {heads}, expected a multiple of kv_heads = {kv_heads}"
    if architecture["tokenizer"] == "characters" and not architecture["alphabet"]:
        yield f"{where}.alphabet is missing, which the tokenizer characters needs"


def _truncated(rollout: Mapping) -> Iterator[str]:
    limits = {
        "top_k": rollout["top_k"] > 0,
        "top_p": rollout["top_p"] < 1,
        "min_p": rollout["min_p"] > 0,
        "forbidden_tokens": bool(rollout["forbidden_tokens"]),
        "min_tokens": rollout["min_tokens"] > 0,
    }
    cutting = [key for key, is_cutting in limits.items() if is_cutting]
    if cutting and not rollout["train_on_truncated"]:
        yield (
            f"rollout.{cutting[0]} truncates the sampling distribution, so that training would be "
            "off-policy; set rollout.train_on_truncated: true to do it all the same"
        )
    if rollout["min_tokens"] > rollout["max_tokens"]:
        yield (
            f"rollout.min_tokens is {rollout['min_tokens']}, expected at most rollout.max_tokens = "
            f"{rollout['max_tokens']}"
        )
