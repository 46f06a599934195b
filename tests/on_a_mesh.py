"""A tiny policy written and read on a mesh of any shape, in a process or group of its own.

    python -c "from tests.on_a_mesh import main; main()" FOLDER 1,4,1 NAME_TO_WRITE NAME_TO_READ

The values come from a seed, so that what is on disk can be held against them anywhere. `main`
prints one line of JSON: content ids and bytes read, the same in each process of a group.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax

from rl import group, sharding
from rl.artifacts import Publisher, content_id, described, read_json, write_json
from rl.checkpoint import restore_policy, save_policy
from rl.models.families import WEIGHTS_FILE, write_model
from rl.models.safetensors_file import read_safetensors
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec
from rl.models.transformer import parameter_shapes, trainable_names
from rl.stages.base import identity_of
from rl.weights import export_weights, load_model, load_weights

CONFIG = ModelConfig(
    vocab_size=24_000,  # of 64 values: two blocks, so that one of them may be another process's
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
)
FULL = ModelSpec(CONFIG)
LORA = ModelSpec(CONFIG, LoraConfig(3, 6.0, ("q_proj", "v_proj", "down_proj")))
SPECS = {"full": FULL, "lora": LORA}
OPTIMIZER = optax.adam(1e-3)


def values_of(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Every trainable parameter; all values are different."""
    generator = np.random.default_rng(5)
    shapes = parameter_shapes(spec)
    return {n: generator.standard_normal(shapes[n], np.float32) for n in trainable_names(spec)}


def mesh_of(shape: tuple[int, ...]) -> jax.sharding.Mesh:
    devices = jax.devices()[: math.prod(shape)]
    return jax.sharding.Mesh(np.array(devices).reshape(shape), sharding.AXES)


def placed(values: dict[str, np.ndarray], mesh) -> dict[str, jax.Array]:
    shardings = sharding.parameter_shardings({n: v.shape for n, v in values.items()}, mesh)
    return {
        name: jax.make_array_from_callback(value.shape, shardings[name], lambda i, v=value: v[i])
        for name, value in values.items()
    }


@partial(jax.jit, static_argnums=1)
def state_of(trainable: dict, number: int):
    """An optimizer's state in which nothing is zero."""
    gradients = jax.tree.map(lambda value: value * number, trainable)
    return OPTIMIZER.update(gradients, OPTIMIZER.init(trainable))[1]


def make_base(folder: Path) -> None:
    """A base whose values are those of the full policy, with the manifest of a stage."""
    write_model(folder, CONFIG, values_of(FULL), {"tokenizer.json": b"{}"})
    identity = identity_of(folder, described(read_safetensors(folder / WEIGHTS_FILE)))
    write_json(Publisher(), folder / "manifest.json", {"dtype": "float32", **identity})


def write(folder: Path, name: str, mesh) -> dict:
    """Exports and checkpoints of both specs, as NAME-full and so on."""
    found = {}
    for kind, spec in SPECS.items():
        trainable = placed(values_of(spec), mesh)
        options = {"base": folder / "base", "base_path": "../base", "version": 1}
        weights = folder / f"{name}-{kind}"
        manifest = export_weights(Publisher(), weights, spec, trainable, **options)
        state = state_of(trainable, 3)
        saved = save_policy(Publisher(), folder / f"{name}-{kind}-policy", trainable, state, {})
        found[kind] = {
            "in memory": content_id(trainable),
            "weights": manifest["content_id"],
            "source": manifest["source_content_id"],
            "policy": saved["content_id"],
        }
    return found


def read(folder: Path, name: str, mesh) -> dict:
    """Content ids of what comes back on this mesh, and the bytes that this process read."""
    found = {}
    for kind, spec in SPECS.items():
        shapes = {n: parameter_shapes(spec)[n] for n in trainable_names(spec)}
        shardings = sharding.parameter_shardings(shapes, mesh)
        loaded = load_weights(folder / f"{name}-{kind}", spec, shardings)
        trainable = placed(values_of(spec), mesh)
        abstract = jax.tree.map(_shape_of, (trainable, state_of(trainable, 3)))
        restored, state, _ = restore_policy(folder / f"{name}-{kind}-policy", *abstract)
        assert all(restored[n].sharding == shardings[n] for n in shardings)
        assert all(loaded.parameters[n].sharding == shardings[n] for n in shardings)
        found[kind] = {
            "loaded": content_id(loaded.parameters),
            "restored": content_id(restored),
            "state": content_id(dict(enumerate_leaves(state))),
            "read": group.gather(loaded.bytes_read),
        }
    manifest = read_json(folder / "base" / "manifest.json")
    shardings = sharding.parameter_shardings(parameter_shapes(FULL), mesh)
    base = load_model(folder / "base", manifest, "float32", shardings)
    found["base"] = content_id(base.parameters)
    return found


def enumerate_leaves(tree):
    return ((str(number), leaf) for number, leaf in enumerate(jax.tree.leaves(tree)))


def _shape_of(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def main() -> None:
    folder, shape, written, to_read = sys.argv[1:5]
    group.join()
    mesh = mesh_of(tuple(map(int, shape.split(","))))
    said = write(Path(folder), written, mesh)
    print(json.dumps([said, read(Path(folder), to_read, mesh)]))
