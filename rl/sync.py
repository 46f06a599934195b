"""From a policy version to its parameters on a role's mesh, and what that cost.

Weights are named by version; memory is only a cache of files. A stage asks for the parameters that
a folder states by content id, on the mesh that it runs on:

    alias      the process holds these very arrays there: nothing moves
    cast       it holds them there in another dtype
    reshard    it holds them on another mesh: cast first, then they move between devices
    load       they are read from the folder, each device its own slices, every block verified

An update takes a policy out of memory, since it overwrites its arrays, and puts the next one in.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from rl import group
from rl.artifacts import MANIFEST, read_json
from rl.checkpoint import Kind, abstract_trainable, restore_parameters, restore_policy
from rl.checkpoint import read_manifest as read_policy_manifest
from rl.learner import OptimizerConfig, init_optimizer
from rl.memory import Memory
from rl.models.families import model_config, read_config
from rl.models.spec import Head, ModelConfig, ModelSpec, Parameters
from rl.models.tokenizer import Tokenizer
from rl.models.transformer import parameter_shapes, trainable_names
from rl.sharding import (
    check_model_fits,
    current,
    name_of,
    parameter_shardings,
    shard_bytes,
    tree_shardings,
)
from rl.stages.request import Request
from rl.weights import check_identity, load_model, load_weights, read_manifest


@dataclass(frozen=True)
class Base:
    """A shared model: the policy before reinforcement learning, which is the reference too, or a
    model with a value head."""

    config: ModelConfig
    parameters: Parameters
    dtype: str
    content_id: str
    head: Head

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(self.config, None, self.dtype, self.head)


@dataclass(frozen=True)
class Policy:
    """A version of a policy, or of a critic, under training."""

    spec: ModelSpec
    trainable: Parameters
    frozen: Parameters
    optimizer_state: Any
    version: int
    content_id: str


@dataclass(frozen=True)
class RolloutPolicy:
    """A policy version that is only sampled from, and what its sync cost."""

    spec: ModelSpec
    trainable: Parameters
    frozen: Parameters
    version: int
    content_id: str
    sync: dict[str, Any]


# The base


def base_facts(folder: Path) -> tuple[ModelConfig, dict]:
    """(config, manifest) of a shared model, without its weights; its sizes fit the mesh."""
    config = model_config(read_config(folder), folder / "config.json")
    check_model_fits(current().shape, config, f"the mesh {name_of(current())}")
    return config, read_json(folder / MANIFEST)


def load_base(
    memory: Memory, folder: Path, dtype: str | None = None, is_private: bool = False
) -> Base:
    """A shared model on the mesh; its values must have the content id that its manifest states.

    `dtype` casts it. `is_private` gives arrays of the caller's own, which it may overwrite.
    """
    config, manifest = base_facts(folder)
    wanted, head = dtype or manifest["dtype"], manifest.get("head", "lm")
    key = ("base", manifest["content_id"], wanted, name_of(current()))
    parameters = None if is_private else memory.get(*key)
    if parameters is None:
        shardings = _shardings(ModelSpec(config, None, wanted, head))
        parameters = load_model(folder, manifest, wanted, shardings).parameters
        if not is_private:
            memory.put(parameters, *key)
    return Base(config, parameters, wanted, manifest["content_id"], head)


def _shardings(spec: ModelSpec) -> dict[str, jax.sharding.NamedSharding]:
    """Where what `spec` trains, or all of a model without an adapter, lies on this mesh."""
    shapes = parameter_shapes(spec)
    return parameter_shardings({name: shapes[name] for name in trainable_names(spec)}, current())


def _frozen(memory: Memory, folder: Path, spec: ModelSpec) -> Parameters:
    """What `spec`'s policy does not train: the base under an adapter, else nothing."""
    return load_base(memory, folder, spec.dtype).parameters if spec.lora else {}


def tokenizer_of(memory: Memory, folder: Path) -> Tokenizer:
    """The tokenizer of a shared model."""
    identity = read_json(folder / MANIFEST)["content_id"]
    held = memory.get("tokenizer", identity)
    if held is None:
        held = Tokenizer.load(folder)
        memory.put(held, "tokenizer", identity)
    return held


# The actor


def load_policy(job: Request, memory: Memory, version: int, is_taken: bool = False) -> Policy:
    """The policy of the request's input `policy`, from memory or its checkpoint.

    MeshdialError if it is of another version. `is_taken`: the caller will overwrite the arrays, so
    that the memory must forget them, the rollout's aliases too.
    """
    config, base_manifest = base_facts(job.input("base"))
    spec = job.spec(config, base_manifest["dtype"])
    return _trained(memory, job.input("policy"), job.input("base"), spec, version, is_taken)


def load_critic(job: Request, memory: Memory, version: int, is_taken: bool = False) -> Policy:
    """As `load_policy`, the critic of the inputs `critic` and `trunk`, the model it started from.

    Under an adapter its trunk is that model's own arrays, the actor's where they share both.
    """
    config, manifest = base_facts(job.input("trunk"))
    spec = job.critic_spec(config, manifest["dtype"])
    return _trained(memory, job.input("critic"), job.input("trunk"), spec, version, is_taken)


def _trained(
    memory: Memory, folder: Path, base_folder: Path, spec: ModelSpec, version: int, is_taken: bool
) -> Policy:
    kind = "critic" if spec.head == "value" else "policy"
    manifest = read_json(folder / MANIFEST)
    check_identity(folder, manifest, version)
    held = memory.get(kind, manifest["content_id"], name_of(current()))
    if held is None:
        held = _restored(folder, spec, manifest["optimizer"], kind)
        remember_trained(memory, manifest, *held, kind)
    if is_taken:
        memory.forget(held)
    trainable, state = held
    frozen, identity = _frozen(memory, base_folder, spec), manifest["parameters_content_id"]
    return Policy(spec, trainable, frozen, state, version, identity)


def _restored(folder: Path, spec: ModelSpec, optimizer: str, kind: Kind) -> tuple[Parameters, Any]:
    trainable = abstract_trainable(spec)
    state = jax.eval_shape(partial(init_optimizer, first_optimizer(optimizer)), trainable)
    return restore_policy(folder, *map(on_mesh, (trainable, state)), kind)[:2]


def on_mesh(shapes: Any) -> Any:
    """Shapes and dtypes, with where they lie on this mesh."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        tree_shardings(shapes, current()),
    )


def first_optimizer(kind: str) -> OptimizerConfig:
    """The optimizer's state depends on its kind alone; the numbers are those of the updates."""
    return OptimizerConfig(
        kind=kind,
        learning_rate=0.0,
        schedule="constant",
        warmup_updates=0,
        schedule_updates=0,
        beta1=0.0,
        beta2=0.0,
        epsilon=1e-8,
        weight_decay=0.0,
        clip_norm=1.0,
    )


def remember_trained(
    memory: Memory, manifest: Mapping, trainable: Parameters, state: Any, kind: Kind
) -> None:
    """Hold what was just published, for whoever asks for it next."""
    place = name_of(current())
    memory.put((trainable, state), kind, manifest["content_id"], place)
    if kind == "policy":  # which rollouts know by its parameters alone
        memory.put(trainable, "parameters", manifest["parameters_content_id"], place)


def held_parameters(memory: Memory, manifest: Mapping) -> Parameters | None:
    """The parameters of the policy of this manifest, if they are on this mesh."""
    place = name_of(current())
    held = memory.get("policy", manifest["content_id"], place)
    return held[0] if held else memory.get("parameters", manifest["parameters_content_id"], place)


# The reference role


def load_reference(job: Request, memory: Memory, version: int) -> tuple[ModelSpec, Parameters, Any]:
    """(spec, trainable, frozen) of the reference: the base, or the version of input `policy`.

    Under an adapter both are the base's own arrays, the latter beside an adapter of its own: a
    policy under training overwrites its arrays, and a reference stays.
    """
    if "policy" not in job.inputs:
        base = load_base(memory, job.input("base"))
        return base.spec, {}, base.parameters
    folder = job.input("policy")
    config, base_manifest = base_facts(job.input("base"))
    spec = job.spec(config, base_manifest["dtype"])
    manifest = read_policy_manifest(folder)
    check_identity(folder, manifest, version)
    key = ("reference", manifest["parameters_content_id"], name_of(current()))
    trainable = memory.get(*key)
    if trainable is None:
        batches = restore_parameters(folder, on_mesh(abstract_trainable(spec)))
        trainable = {name: value for batch in batches for name, value in batch.items()}
        memory.put(trainable, *key)
    return spec, trainable, _frozen(memory, job.input("base"), spec)


# The rollout role


def rollout_policy(job: Request, memory: Memory, version: int) -> RolloutPolicy:
    """The policy of the request's input `weights`, in the dtype that it was exported in; the base
    itself where the request has no such input.

    MeshdialError if it is of another version or base.
    """
    base_folder = job.input("base")
    config, base_manifest = base_facts(base_folder)
    if "weights" not in job.inputs:
        base = load_base(memory, base_folder)
        sync = {"outcome": "base", "bytes_moved": 0}
        return RolloutPolicy(
            ModelSpec(config, None, base.dtype), {}, base.parameters, 0, base.content_id, sync
        )
    manifest = read_manifest(job.input("weights"))
    check_identity(job.input("weights"), manifest, version, base_manifest["content_id"])
    spec = job.spec(config, manifest["dtype"])
    trainable, sync = synced(memory, job.input("weights"), spec, base_manifest["content_id"])
    frozen = _frozen(memory, base_folder, spec)
    return RolloutPolicy(spec, trainable, frozen, version, manifest["content_id"], sync)


def synced(
    memory: Memory, folder: Path, spec: ModelSpec, base_content_id: str
) -> tuple[Parameters, dict]:
    """(the parameters that an export of a policy on this base states, what getting them cost)."""
    started = time.perf_counter()
    manifest = read_manifest(folder)
    identity, source_id = manifest["content_id"], manifest["source_content_id"]
    here, read, source = name_of(current()), 0, "file"
    known = memory.get("parameters", identity, here)
    held = known or memory.get("parameters", source_id, here)
    if held is None:
        held = memory.elsewhere("parameters", identity) or memory.elsewhere("parameters", source_id)
    if held is not None:
        outcome, parameters, received, source = _moved(held, spec)
    else:
        loaded = load_weights(folder, spec, _shardings(spec), base_content_id=base_content_id)
        outcome, parameters, read = "load", loaded.parameters, sum(group.gather(loaded.bytes_read))
        received = {name: _device_bytes(value) for name, value in parameters.items()}
    if parameters is not known:
        memory.put(parameters, "parameters", identity, here)
    jax.block_until_ready(parameters)
    return parameters, {
        "outcome": outcome,
        "bytes_moved": nbytes({name: parameters[name] for name, size in received.items() if size}),
        "bytes_received": sum(received.values()),
        "bytes_written": 0,
        "bytes_read": read,
        "seconds": time.perf_counter() - started,
        "dtype": spec.dtype,
        "source_sharding": source,
        "target_sharding": here,
    }


def _moved(held: Parameters, spec: ModelSpec) -> tuple[str, Parameters, dict[str, int], str]:
    """(outcome, parameters on this mesh in `spec`'s dtype, bytes that devices received of each, the
    mesh that they came from)."""
    source = name_of(next(iter(held.values())).sharding.mesh)
    outcome, parameters = recast(held, spec.dtype)  # before they travel
    if source == name_of(current()):
        return outcome, parameters, dict.fromkeys(held, 0), source
    moved = jax.device_put(parameters, _shardings(spec))
    received = {name: _received(parameters[name], moved[name]) for name in moved}
    return "reshard", moved, received, source


def _received(before: jax.Array, after: jax.Array) -> int:
    """Bytes of `after` on devices that did not hold that very slice of `before`."""
    had = before.sharding.devices_indices_map(before.shape)
    wants = after.sharding.devices_indices_map(after.shape)
    num_new = sum(had.get(device) != index for device, index in wants.items())
    return num_new * shard_bytes(after)


def _device_bytes(array: jax.Array) -> int:
    """Bytes on all devices of the mesh together, replicas counted."""
    return len(array.sharding.device_set) * shard_bytes(array)


def nbytes(parameters: Mapping[str, jax.Array]) -> int:
    """Bytes of the parameters, or of arrays of their shapes, each element once."""
    return sum(value.size * value.dtype.itemsize for value in parameters.values())


def recast(held: Parameters, dtype: str) -> tuple[str, Parameters]:
    """("alias", the very same) where they have this dtype, else ("cast", the parameters in it)."""
    if all(value.dtype == dtype for value in held.values()):
        return "alias", held
    return "cast", cast(held, dtype)


def cast(parameters: Parameters, dtype: str) -> Parameters:
    """The parameters in the rollout's dtype; the very same arrays where it is theirs."""
    return {
        name: value if value.dtype == dtype else value.astype(dtype)
        for name, value in parameters.items()
    }
