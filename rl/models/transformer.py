"""The network's parameters as a flat dict: their names and shapes, fresh ones, adapters merged."""

import functools
import zlib

import jax.numpy as jnp
import numpy as np
from flax import nnx

from rl.models.layers import Transformer
from rl.models.spec import ModelConfig, ModelSpec, Parameters
from rl.sharding import gathered


@functools.cache
def _structure(spec: ModelSpec):
    """The network without its parameters, and each parameter's (path in it, shape) by name."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(spec)))
    leaves = nnx.to_flat_state(state)
    return graph, {".".join(map(str, path)): (path, leaf.shape) for path, leaf in leaves}


def network(spec: ModelSpec, trainable: Parameters, frozen: Parameters) -> Transformer:
    graph, leaves = _structure(spec)
    parameters = gathered({**frozen, **trainable})
    flat = {path: nnx.Param(parameters[name]) for name, (path, _) in leaves.items()}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, the adapter's included, by name."""
    return {name: shape for name, (_, shape) in sorted(_structure(spec)[1].items())}


def trainable_names(spec: ModelSpec) -> list[str]:
    """Names of what is trained: the adapter's parameters if there is one, and a value head's, else
    all."""
    names = list(parameter_shapes(spec))
    return [name for name in names if is_lora(name) or name == VALUE_HEAD] if spec.lora else names


def is_lora(name: str) -> bool:
    return name.endswith((".lora_a", ".lora_b"))


def init_parameters(config: ModelConfig, seed: int, dtype: str = "float32") -> Parameters:
    """Fresh parameters: matrices normal with deviation 0.02, norms one, biases zero.

    Each tensor's values depend on (seed, name) alone.
    """
    shapes = parameter_shapes(ModelSpec(config))
    return {name: jnp.asarray(_fresh(name, shapes[name], seed), dtype) for name in shapes}


def _fresh(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if name.endswith(".scale"):
        return np.ones(shape, np.float32)
    if name.endswith(".bias"):
        return np.zeros(shape, np.float32)
    return 0.02 * _generator(name, seed).standard_normal(shape, np.float32)


VALUE_HEAD = "score.kernel"


def init_value_head(spec: ModelSpec) -> Parameters:
    """A fresh value head, which says 0 of every state."""
    return {VALUE_HEAD: jnp.zeros((spec.config.hidden_size, 1), spec.dtype)}


def init_lora(spec: ModelSpec, seed: int) -> Parameters:
    """A fresh adapter that changes nothing yet: lora_a uniform in +-1/sqrt(in), lora_b zero.

    The bound is that of PEFT's Kaiming initialisation. Empty where the spec has no adapter.
    """
    fresh = {}
    for name, shape in parameter_shapes(spec).items():
        if name.endswith(".lora_a"):
            values = _generator(name, seed).uniform(-1.0, 1.0, shape) / np.sqrt(shape[0])
            fresh[name] = jnp.asarray(values, spec.dtype)
        elif name.endswith(".lora_b"):
            fresh[name] = jnp.zeros(shape, spec.dtype)
    return fresh


def _generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def merge_lora(spec: ModelSpec, trainable: Parameters, frozen: Parameters) -> Parameters:
    """The same model without an adapter: kernel + lora_a @ lora_b * alpha / rank."""
    parameters = {**frozen, **trainable}
    merged = {name: value for name, value in parameters.items() if not is_lora(name)}
    for name in parameters:
        if name.endswith(".lora_a"):
            stem = name.removesuffix(".lora_a")
            update = parameters[name] @ parameters[f"{stem}.lora_b"] * spec.lora.scale
            merged[f"{stem}.kernel"] = parameters[f"{stem}.kernel"] + update
    return merged
