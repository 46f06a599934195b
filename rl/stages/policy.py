"""Policy version 0, and the export of each version's weights for the rollout role."""

import time

from rl.artifacts import MANIFEST, Publisher, read_json
from rl.checkpoint import save_policy
from rl.context import Context
from rl.learner import init_optimizer
from rl.memory import memory_of
from rl.models.transformer import init_lora
from rl.sharding import current, name_of, placed
from rl.stages.request import Request
from rl.sync import (
    base_facts,
    cast,
    first_optimizer,
    load_base,
    load_policy,
    nbytes,
    remember_policy,
)
from rl.weights import export_weights


def start_policy(job: Request, context: Context) -> str:
    """Policy version 0: the base as it is, or under an adapter that changes nothing yet."""
    folder = job.input("base")
    config, manifest = base_facts(folder)
    spec = job.spec(config, manifest["dtype"])
    if spec.lora:
        trainable = placed(init_lora(spec, job.config["seed"]))
    else:
        trainable = load_base(memory_of(context), folder, is_private=True).parameters
    state = placed(init_optimizer(first_optimizer(job.config["optimizer.name"]), trainable))
    publish_policy(job, context, trainable, state, job.config["optimizer.name"], 0, None)
    count = sum(value.size for value in trainable.values())
    return f"{count / 1e6:.2f} M trainable parameters"


def publish_policy(
    job: Request, context: Context, trainable, state, optimizer: str, version: int, parent
) -> dict:
    """Write a policy's checkpoint, and keep its arrays for whoever asks for it next."""
    manifest = save_policy(
        Publisher(context.check_alive),
        job.outputs["policy"],
        trainable,
        state,
        {"version": version},
        job.provenance(version=version, parent=parent, optimizer=optimizer),
    )
    remember_policy(memory_of(context), manifest, trainable, state)
    return manifest


def sync_weights(job: Request, context: Context) -> str:
    """The trained parameters in the rollout's dtype: what another process needs of this version."""
    policy = load_policy(job, memory_of(context))
    started = time.perf_counter()
    dtype = job.config["rollout.dtype"]
    dtype = policy.spec.dtype if dtype == "same" else dtype
    parameters = cast(policy.trainable, dtype)
    is_alias = all(parameters[name] is value for name, value in policy.trainable.items())
    target = job.outputs["weights"]
    manifest = export_weights(
        Publisher(context.check_alive),
        target,
        job.spec(policy.spec.config, dtype),
        parameters,
        base=job.input("base"),
        base_path=job.shown(job.input("base")),
        source_content_id=policy.content_id,
        version=policy.version,
        parent=read_json(job.input("policy") / MANIFEST)["parent"],
        manifest_extra=job.provenance(),
    )
    here = name_of(current())
    memory_of(context).put(parameters, "parameters", manifest["content_id"], here)
    job.costs_found["sync"] = {
        "outcome": "alias" if is_alias else "cast",
        "bytes_moved": 0,
        "bytes_received": 0,
        "bytes_written": nbytes(parameters),
        "bytes_read": 0,
        "seconds": time.perf_counter() - started,
        "dtype": dtype,
        "source_sharding": here,
        "target_sharding": here,
    }
    outcome = "alias, 0 bytes moved" if is_alias else f"cast to {dtype}"
    return f"{outcome}, {nbytes(parameters) / 1e6:.1f} MB exported"
