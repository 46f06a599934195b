"""Parameters of a model as lists of shapes: counted, and cut up for a mesh, without an array."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from rl.models.spec import ModelSpec
from rl.models.transformer import VALUE_HEAD, is_lora, parameter_shapes
from rl.sharding import AXES, parameter_sharding

FIRST_LAYER = "layers.0."
FLOAT32 = 4


@dataclass(frozen=True)
class Tensors:
    """`count` parameters of one shape, which all layers have alike; `name` is the first one's."""

    name: str
    shape: tuple[int, ...]
    count: int

    @property
    def size(self) -> int:
        return self.count * math.prod(self.shape)


Chosen = tuple[Tensors, ...]


@functools.cache
def tensors(spec: ModelSpec) -> Chosen:
    """All parameters, the adapter's included."""
    num_layers = spec.config.num_hidden_layers
    one_layer = replace(spec, config=replace(spec.config, num_hidden_layers=1))
    return tuple(
        Tensors(name, shape, num_layers if name.startswith(FIRST_LAYER) else 1)
        for name, shape in parameter_shapes(one_layer).items()
    )


def trainable(spec: ModelSpec) -> Chosen:
    """What is trained and synced: the adapter where there is one, and a value head, else all."""
    if spec.lora is None:
        return tensors(spec)
    return tuple(t for t in tensors(spec) if is_lora(t.name) or t.name == VALUE_HEAD)


def base(spec: ModelSpec) -> Chosen:
    """The model without its adapter."""
    return tuple(t for t in tensors(spec) if not is_lora(t.name))


def num_parameters(chosen: Chosen) -> int:
    return sum(t.size for t in chosen)


def itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def device_size(chosen: Chosen, axes: Mapping[str, int]) -> int:
    """How many parameters one device of a mesh holds: sharded over fsdp and tensor (`rl.sharding`;
    Rajbhandari et al. 2020, Shoeybi et al. 2019), whole on each replica of `data`."""
    return _device_size(chosen, tuple(axes.get(axis, 1) for axis in AXES))


def gathered_size(chosen: Chosen, axes: Mapping[str, int]) -> int:
    """As `device_size`, of parameters gathered over fsdp for use."""
    return device_size(chosen, {**axes, "fsdp": 1})


@functools.cache
def _device_size(chosen: Chosen, sizes: tuple[int, ...]) -> int:
    mesh = AbstractMesh(sizes, AXES)
    return sum(
        t.count * math.prod(parameter_sharding(t.name, t.shape, mesh).shard_shape(t.shape))
        for t in chosen
    )
