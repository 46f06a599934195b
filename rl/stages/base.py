"""Models before reinforcement learning: made from their source, and trained on answers first."""

import json
from collections.abc import Mapping
from pathlib import Path

from rl import group
from rl.artifacts import (
    MANIFEST,
    Publisher,
    described,
    id_of_blocks,
    json_content_id,
    read_json,
    read_table,
    write_json,
)
from rl.context import Context
from rl.learner import OptimizerConfig, init_optimizer, pack_supervised, supervised_update
from rl.memory import memory_of
from rl.models.config_file import write_model_config
from rl.models.families import (
    WEIGHTS_FILE,
    model_config,
    read_config,
    read_tokenizer_files,
    write_model_files,
)
from rl.models.safetensors_file import read_safetensors
from rl.models.sources import TOKEN_ID_KEYS, prepare_model
from rl.models.spec import ModelSpec
from rl.models.tokenizer import Tokenizer
from rl.sharding import placed
from rl.stages.request import Request
from rl.stages.tokens import encode_prompts
from rl.sync import load_base, tokenizer_of
from rl.tasks import iteration_window
from rl.weights import write_parameters

WARM_START_TOKENS = 4096
"""Of a micro-batch of supervised training."""


def init_policy(job: Request, context: Context) -> str:
    """Any model source as a Hugging Face folder with a manifest."""
    model = job.config["model"]
    publisher = Publisher(context.check_alive)
    with publisher.directory(job.outputs["model"]) as folder:
        facts = group.first(lambda: _prepared(folder, model))
        tensors = described(read_safetensors(folder / WEIGHTS_FILE))
        write_json(Publisher(), folder / MANIFEST, facts | identity_of(folder, tensors))
    return f"{facts['name']}, {facts['num_parameters'] / 1e6:.1f} M parameters, {facts['dtype']}"


def init_value_model(job: Request, context: Context) -> str:
    """As `init_policy`, a model with a value head: what a critic starts from, or a reward model."""
    settings = job.config
    with Publisher(context.check_alive).directory(job.outputs["model"]) as folder:
        facts = group.first(
            lambda: prepare_model(settings["source"], folder, dtype=settings["dtype"], head="value")
        )
        tensors = described(read_safetensors(folder / WEIGHTS_FILE))
        manifest = facts | identity_of(folder, tensors) | {"head": "value"}
        write_json(Publisher(), folder / MANIFEST, manifest)
    return f"{facts['name']}, {facts['num_parameters'] / 1e6:.1f} M parameters, {facts['dtype']}"


def _prepared(folder: Path, model: Mapping) -> dict:
    return prepare_model(
        model["source"], folder, model["architecture"], model["seed"], model["dtype"]
    )


def identity_of(folder: Path, tensors: Mapping[str, Mapping]) -> dict:
    """The content ids of a model folder: of its parameters, and of all that decides what it says,
    which is those, the config, and the tokenizer with its EOS and chat template.

    `tensors` are the {dtype, shape, blocks} of those in its file. So whoever loads the folder can
    verify just the blocks that it reads.
    """
    files = read_tokenizer_files(folder)
    parts = {
        "parameters_content_id": id_of_blocks(tensors),
        "config": write_model_config(model_config(read_config(folder), folder / "config.json")),
        "tokenizer": {name: json_content_id(files[name].decode()) for name in sorted(files)},
    }
    return {
        "content_id": json_content_id(parts),
        "parameters_content_id": parts["parameters_content_id"],
        "tokenizer": parts["tokenizer"],
        "tensors": tensors,
    }


def warm_start(job: Request, context: Context) -> str:
    """The model after supervised training on the task's own answers."""
    settings = job.config["warm_start"]
    base = load_base(memory_of(context), job.input("model"), is_private=True)
    tokenizer = tokenizer_of(memory_of(context), job.input("model"))
    prompts = read_table(job.input("prompts"), "prompts")
    tokens, answers = _answers(prompts, tokenizer, job.config["rollout.max_tokens"])
    optimizer = OptimizerConfig(
        kind="adam",
        learning_rate=settings["learning_rate"],
        schedule="cosine",
        warmup_updates=min(20, settings["updates"] // 10),
        schedule_updates=settings["updates"],
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.0,
        clip_norm=1.0,
    )
    trainable = base.parameters
    state = placed(init_optimizer(optimizer, trainable))
    spec = ModelSpec(base.config, None, base.dtype)
    size = min(settings["batch_size"], prompts.num_rows)
    for number in range(1, settings["updates"] + 1):
        context.check_alive()
        rows = iteration_window(prompts.num_rows, size, settings["seed"], number)
        batch = pack_supervised([tokens[row] for row in rows], [answers[row] for row in rows])
        trainable, state, figures = supervised_update(
            spec, trainable, {}, state, batch, optimizer, WARM_START_TOKENS
        )
        if number % 50 == 0:
            context.progress(
                f"warm_start update {number}/{settings['updates']}, loss {figures['loss']:.3f}"
            )
    _write_warm_model(job, context, trainable, base, settings)
    return f"{settings['updates']} updates, loss {figures['loss']:.3f}"


def _answers(prompts, tokenizer: Tokenizer, max_tokens: int):
    """Tokens of the prompts and of their answers.

    A task that says how a perfect completion reads is taken at its word; else it is the ground
    truth and the tokenizer's EOS.
    """
    _, tokens = encode_prompts(prompts, tokenizer)
    answers = [_answer(row, tokenizer)[:max_tokens] for row in prompts.to_pylist()]
    return tokens, answers


def _answer(row: dict, tokenizer: Tokenizer) -> list[int]:
    target = json.loads(row["info"]).get("target")
    if target is not None:
        return tokenizer.encode(target, special_tokens=False)
    return tokenizer.encode(row["ground_truth"], special_tokens=False) + list(tokenizer.eos_ids[:1])


def _write_warm_model(job: Request, context: Context, trainable, base, settings) -> None:
    source = job.input("model")
    values = read_config(source)
    with Publisher(context.check_alive).directory(job.outputs["model"]) as folder:
        if group.is_first():
            token_ids = {key: values.get(key) for key in TOKEN_ID_KEYS}
            files = read_tokenizer_files(source)
            write_model_files(folder, base.config, files, base.dtype, token_ids)
        tensors = write_parameters(folder / WEIGHTS_FILE, trainable, base.dtype)
        manifest = read_json(source / MANIFEST) | identity_of(folder, tensors)
        manifest |= {"parent": base.content_id, "warm_start": dict(settings)}
        write_json(Publisher(), folder / MANIFEST, manifest)
