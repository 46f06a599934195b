"""From a policy version to its parameters on a role's mesh, and what that cost.

Weights are named by version; memory is only a cache of files. A stage asks for the parameters that
a folder states by content id:

    alias    the process holds these very arrays: nothing moves
    cast     it holds them in another dtype
    load     they are read from the folder, and every block is verified

An update takes a policy out of memory, since it overwrites its arrays, and puts the next one in.
"""

import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rl.artifacts import MANIFEST, content_id, read_json
from rl.checkpoint import abstract_trainable, restore_policy
from rl.context import Context
from rl.errors import MeshdialError
from rl.learner import OptimizerConfig, init_optimizer
from rl.models.families import model_config, read_config, read_model
from rl.models.spec import ModelConfig, ModelSpec, Parameters
from rl.models.tokenizer import Tokenizer
from rl.stages.request import Request
from rl.weights import load_weights, read_manifest


@dataclass(frozen=True)
class Base:
    """The policy before reinforcement learning, which is the reference too."""

    config: ModelConfig
    parameters: Parameters
    dtype: str
    content_id: str


@dataclass(frozen=True)
class Policy:
    """A policy version under training."""

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


@dataclass
class Memory:
    """What a process holds of weights, by kind and content id, under a byte budget.

    The entry that was used longest ago goes first. `budget_bytes` is half of the machine's memory
    unless $MESHDIAL_CACHE_BYTES says otherwise.
    """

    budget_bytes: int = field(default_factory=lambda: _default_budget())
    entries: OrderedDict[tuple, Any] = field(default_factory=OrderedDict)

    def get(self, *key: str) -> Any:
        """The entry of this key, or None."""
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def put(self, value: Any, *key: str) -> None:
        self.entries[key] = value
        self.entries.move_to_end(key)
        while len(self.entries) > 1 and self._bytes() > self.budget_bytes:
            self.entries.popitem(last=False)

    def take(self, *key: str) -> Any:
        """The entry of this key, which the memory forgets, or None."""
        return self.entries.pop(key, None)

    def _bytes(self) -> int:
        # Aliases share their arrays, so that each array counts once.
        arrays = {
            id(leaf): getattr(leaf, "nbytes", 0)
            for leaf in jax.tree.leaves([_arrays(e) for e in self.entries.values()])
        }
        return sum(arrays.values())


def memory_of(context: Context) -> Memory:
    """The memory of the process that runs a stage."""
    return context.memory.setdefault("weights", Memory())


def _arrays(entry: Any) -> Any:
    if isinstance(entry, Base):
        return entry.parameters
    return entry


def _default_budget() -> int:
    given = os.environ.get("MESHDIAL_CACHE_BYTES")
    return int(given) if given else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


# The base


def base_facts(folder: Path) -> tuple[ModelConfig, dict]:
    """(config, manifest) of a shared model, without its weights."""
    return model_config(read_config(folder), folder / "config.json"), read_json(folder / MANIFEST)


def load_base(
    memory: Memory, folder: Path, dtype: str | None = None, is_private: bool = False
) -> Base:
    """A shared model on the mesh; its values must have the content id that its manifest states.

    `dtype` casts it. `is_private` gives arrays of the caller's own, which it may overwrite.
    """
    _, manifest = base_facts(folder)
    identity, stored = manifest["content_id"], manifest["dtype"]
    wanted = dtype or stored
    held = None if is_private else memory.get("base", identity, wanted)
    if held is not None:
        return held
    config, arrays = read_model(folder)
    if content_id(arrays) != manifest["parameters_content_id"]:
        raise MeshdialError(
            f"{folder} is damaged: its weights do not match the content id in its manifest"
        )
    parameters = placed({name: jnp.asarray(array, wanted) for name, array in arrays.items()})
    base = Base(config, parameters, wanted, identity)
    if not is_private:
        memory.put(base, "base", identity, wanted)
    return base


def placed(tree: Any) -> Any:
    """The arrays committed to the mesh: to compile for others than these would be a second time."""
    return jax.device_put(tree, jax.sharding.SingleDeviceSharding(jax.devices()[0]))


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


def load_policy(job: Request, memory: Memory, is_taken: bool = False) -> Policy:
    """The policy of the request's input `policy`, from memory or its checkpoint.

    `is_taken`: the caller will overwrite the arrays, so that the memory must forget them.
    """
    folder, base_folder = job.input("policy"), job.input("base")
    config, base_manifest = base_facts(base_folder)
    spec = job.spec(config, base_manifest["dtype"])
    manifest = read_json(folder / MANIFEST)
    key = ("policy", manifest["content_id"])
    held = memory.get(*key)
    if held is None:
        held = _restored(folder, spec, manifest["optimizer"])
        remember_policy(memory, manifest, *held)
    if is_taken:
        memory.take(*key)
        # The rollout's alias goes first: its arrays are about to be overwritten.
        memory.take("parameters", manifest["parameters_content_id"])
    trainable, state = held
    version, identity = manifest["version"], manifest["parameters_content_id"]
    frozen = _frozen(memory, base_folder, spec)
    return Policy(spec, trainable, frozen, state, version, identity)


def _restored(folder: Path, spec: ModelSpec, optimizer: str) -> tuple[Parameters, Any]:
    trainable = abstract_trainable(spec)
    state = jax.eval_shape(partial(init_optimizer, first_optimizer(optimizer)), trainable)
    return restore_policy(folder, trainable, state)[:2]


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


def remember_policy(memory: Memory, manifest: Mapping, trainable: Parameters, state: Any) -> None:
    """Hold a policy that was just published, for whoever asks for it next."""
    memory.put((trainable, state), "policy", manifest["content_id"])
    # Rollouts know a policy by its parameters alone.
    memory.put(trainable, "parameters", manifest["parameters_content_id"])


# The rollout role


def rollout_policy(job: Request, memory: Memory) -> RolloutPolicy:
    """The policy of the request's input `weights`, in the dtype that it was exported in; the base
    itself where the request has no such input."""
    base_folder = job.input("base")
    config, base_manifest = base_facts(base_folder)
    if "weights" not in job.inputs:
        base = load_base(memory, base_folder)
        sync = {"outcome": "base", "bytes_moved": 0}
        return RolloutPolicy(
            ModelSpec(config, None, base.dtype), {}, base.parameters, 0, base.content_id, sync
        )
    manifest = read_manifest(job.input("weights"))
    spec = job.spec(config, manifest["dtype"])
    trainable, sync = synced(memory, job.input("weights"), spec, base_manifest["content_id"])
    frozen = _frozen(memory, base_folder, spec)
    return RolloutPolicy(spec, trainable, frozen, manifest["version"], manifest["content_id"], sync)


def synced(
    memory: Memory, folder: Path, spec: ModelSpec, base_content_id: str
) -> tuple[Parameters, dict]:
    """(the parameters that an export of a policy on this base states, what getting them cost)."""
    started = time.perf_counter()
    manifest = read_manifest(folder)
    identity = manifest["content_id"]
    moved = read = 0
    outcome, parameters = "alias", memory.get("parameters", identity)
    if parameters is None:
        source = memory.get("parameters", manifest["source_content_id"])
        if source is not None:
            outcome = "cast"
            parameters = cast(source, spec.dtype)
        else:
            outcome = "load"
            loaded = load_weights(folder, spec, base_content_id=base_content_id)
            parameters = placed({name: jnp.asarray(value) for name, value in loaded.items()})
            moved = read = nbytes(parameters)
        memory.put(parameters, "parameters", identity)
    cost = {
        "outcome": outcome,
        "bytes_moved": moved,
        "bytes_read": read,
        "seconds": time.perf_counter() - started,
        "dtype": spec.dtype,
    }
    return parameters, cost


def nbytes(parameters: Mapping[str, jax.Array]) -> int:
    return sum(value.nbytes for value in parameters.values())


def cast(parameters: Parameters, dtype: str) -> Parameters:
    """The parameters in the rollout's dtype; the very same arrays where it is theirs."""
    return {
        name: value if value.dtype == dtype else value.astype(dtype)
        for name, value in parameters.items()
    }
