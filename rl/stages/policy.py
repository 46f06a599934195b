"""Policy version 0, and the export of each version's weights for the rollout role."""

import time
from collections.abc import Iterable, Mapping
from functools import partial

from rl.artifacts import Publisher
from rl.checkpoint import (
    Kind,
    abstract_trainable,
    read_manifest,
    restore_parameters,
    save_policy,
)
from rl.context import Context
from rl.learner import init_optimizer
from rl.memory import Memory, memory_of
from rl.models.spec import ModelConfig, ModelSpec, Parameters
from rl.models.transformer import init_lora
from rl.sharding import current, name_of, placed
from rl.stages.request import Request, told_bytes
from rl.sync import (
    base_facts,
    cast,
    first_optimizer,
    held_parameters,
    load_base,
    nbytes,
    on_mesh,
    recast,
    remember_trained,
)
from rl.weights import check_identity, export_weights


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
    publish_trained(job, context, trainable, state, job.config["optimizer.name"], 0, None)
    count = sum(value.size for value in trainable.values())
    return f"{count / 1e6:.2f} M trainable parameters"


def publish_trained(
    job: Request,
    context: Context,
    trainable,
    state,
    optimizer: str,
    version: int,
    parent,
    kind: Kind = "policy",
) -> dict:
    """Write a checkpoint of this kind, the name of the stage's output, and keep its arrays for
    whoever asks for them next."""
    manifest = save_policy(
        Publisher(context.check_alive),
        job.outputs[kind],
        trainable,
        state,
        {"version": version},
        job.provenance(version=version, parent=parent, optimizer=optimizer),
        kind,
    )
    remember_trained(memory_of(context), manifest, trainable, state, kind)
    return manifest


def sync_weights(job: Request, context: Context) -> str:
    """The trained parameters in the rollout's dtype: what another process needs of this version.

    A process that does not hold them reads them from the checkpoint, some at a time.
    """
    started = time.perf_counter()
    config, base_manifest = base_facts(job.input("base"))
    manifest = read_manifest(job.input("policy"))
    check_identity(job.input("policy"), manifest, job.iteration)
    kept, exported = _specs(job, config, base_manifest["dtype"])
    outcome, parameters = _exportable(job, memory_of(context), manifest, kept, exported.dtype)
    written = export_weights(
        Publisher(context.check_alive),
        job.outputs["weights"],
        exported,
        parameters,
        base=job.input("base"),
        base_path=job.shown(job.input("base")),
        source_content_id=manifest["parameters_content_id"],
        version=manifest["version"],
        parent=manifest["parent"],
        manifest_extra=job.provenance(),
    )
    here = name_of(current())
    if outcome != "load":
        memory_of(context).put(parameters, "parameters", written["content_id"], here)
    bytes_written = nbytes(abstract_trainable(exported))
    job.costs_found["sync"] = {
        "outcome": outcome,
        "bytes_moved": 0,
        "bytes_received": 0,
        "bytes_written": bytes_written,
        "bytes_read": nbytes(abstract_trainable(kept)) if outcome == "load" else 0,
        "seconds": time.perf_counter() - started,
        "dtype": exported.dtype,
        "source_sharding": "file" if outcome == "load" else here,
        "target_sharding": here,
    }
    how = {"cast": f", cast to {exported.dtype}", "load": ", read from the checkpoint"}
    return f"{told_bytes(bytes_written)} exported{how.get(outcome, '')}"


def _specs(job: Request, config: ModelConfig, dtype: str) -> tuple[ModelSpec, ModelSpec]:
    """The policy's, as it is kept and as the rollout wants it."""
    wanted = job.config["rollout.dtype"]
    return job.spec(config, dtype), job.spec(config, dtype if wanted == "same" else wanted)


def _exportable(
    job: Request, memory: Memory, manifest: Mapping, spec: ModelSpec, dtype: str
) -> tuple[str, Parameters | Iterable[Parameters]]:
    """(outcome, the policy's parameters in this dtype, in batches if they are read from a file)."""
    held = held_parameters(memory, manifest)
    if held is None:
        batches = restore_parameters(job.input("policy"), on_mesh(abstract_trainable(spec)))
        return "load", map(partial(cast, dtype=dtype), batches)
    return recast(held, dtype)
