"""Keys of a config that do not fit each other."""

from collections.abc import Iterator, Mapping

from rl.mesh import check_dial, check_fit


def conflicts(config: Mapping) -> Iterator[str]:
    """One sentence for each case; `config` is complete, and right key by key."""
    rollout, learner, model = config["rollout"], config["learner"], config["model"]
    prompts, updates = rollout["prompts_per_iteration"], learner["updates_per_batch"]
    if prompts % updates:
        yield (
            f"rollout.prompts_per_iteration is {prompts} (a batch of {prompts} x "
            f"{rollout['group_size']} completions), which learner.updates_per_batch = {updates} "
            "does not divide; each update takes whole groups"
        )
    yield from _truncated(rollout)
    if (model["source"] == "scratch") != (model["architecture"] is not None):
        yield (
            f"model.source is {model['source']!r} and model.architecture is "
            f"{'missing' if model['architecture'] is None else 'given'}; the source scratch needs "
            "an architecture, and no other source takes one"
        )
    if model["architecture"] is not None:
        yield from _misshapen(model["architecture"])
    optimizer = config["optimizer"]
    if optimizer["schedule"] != "constant" and optimizer["horizon"] is None:
        yield f"optimizer.schedule is {optimizer['schedule']}, which needs optimizer.horizon"
    if optimizer["name"] == "adam" and optimizer["weight_decay"]:
        yield (
            f"optimizer.weight_decay is {optimizer['weight_decay']}, and optimizer.name is adam, "
            "which has none; take adamw"
        )
    if optimizer["horizon"] is not None and optimizer["horizon"] <= optimizer["warmup"]:
        yield (
            f"optimizer.horizon is {optimizer['horizon']}, expected more than "
            f"optimizer.warmup = {optimizer['warmup']}"
        )
    task = config["task"]
    if (task["name"] == "table") != (task["train_file"] is not None):
        yield (
            f"task.name is {task['name']} and task.train_file is {task['train_file']!r}; the task "
            "table reads a file, and no other task does"
        )
    yield from list(check_dial(config["cluster"])) or check_fit(config)


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
