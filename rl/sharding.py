"""Where arrays lie on a mesh: one table from logical axes to mesh axes, and nothing else anywhere.

1. A layout, the dial's word for a mesh, becomes a `jax.sharding.Mesh` over (data, fsdp, tensor).
2. Every parameter names its logical axes; the table says which mesh axis shards each of them.
3. A stage runs `on` the mesh of its role: what it makes is placed there, and compiled code
   constrains its arrays by the same table.

Parameters are shared by all roles of a mesh, so they are sharded alike for all of them: tensor
parallel (Shoeybi et al. 2019), and fully sharded over fsdp (Rajbhandari et al. 2020), from where
they are gathered for use. Rows of a batch, and replicas of a decoder, are spread over data and
fsdp. An array axis that a mesh axis does not divide stays whole.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl.errors import MeshdialError
from rl.mesh import check_sizes
from rl.models.spec import ModelConfig
from rl.processes.runtime import AXES, Layout

RULES = {
    "rows": ("data", "fsdp"),
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}
"""Logical axis -> mesh axes. What is not here is not sharded."""

KERNEL_AXES = {
    "embed_tokens": ("vocab", "embed"),
    "q_proj": ("embed", "heads"),
    "k_proj": ("embed", "kv_heads"),
    "v_proj": ("embed", "kv_heads"),
    "o_proj": ("heads", "embed"),
    "gate_proj": ("embed", "mlp"),
    "up_proj": ("embed", "mlp"),
    "down_proj": ("mlp", "embed"),
    "lm_head": ("embed", "vocab"),
    "score": ("embed", None),
}
"""Logical axes of each module's matrix as it lies in memory, [in, out]."""

_current: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)


def logical_axes(name: str) -> tuple[str | None, ...]:
    """The logical axes of the parameter `name`; norms have one that is not sharded."""
    *_, module, kind = name.split(".")
    kernel = KERNEL_AXES.get(module)
    if kernel is None:
        return (None,)
    by_kind = {"bias": kernel[1:], "lora_a": (kernel[0], None), "lora_b": (None, kernel[1])}
    return by_kind.get(kind, kernel)


# Meshes


def device_mesh(layouts: Sequence[Layout], name: str) -> Mesh:
    """The mesh `name` of a process that has the devices of all `layouts`, end to end.

    MeshdialError if JAX has fewer devices than the layouts want.
    """
    chosen = next((layout for layout in layouts if layout.name == name), None)
    if chosen is None:
        known = ", ".join(layout.name for layout in layouts)
        raise MeshdialError(f"mesh {name!r} is not one of this process: {known}")
    start = sum(layout.num_devices for layout in layouts[: layouts.index(chosen)])
    wanted = max(chosen.num_devices, 1)  # a process without accelerators computes on one CPU
    devices = jax.devices()[start : start + wanted]
    if len(devices) < wanted:
        raise MeshdialError(
            f"mesh {name} wants devices {start} to {start + wanted - 1} of its process, which has "
            f"{len(jax.devices())} ({jax.devices()[0].platform})"
        )
    return Mesh(np.array(devices).reshape([size for _, size in chosen.axes]), AXES)


def check_model_fits(axes: Mapping[str, int], config: ModelConfig, where: str) -> None:
    """MeshdialError, naming the axis, if a model's sizes cannot be split over a mesh."""
    for sentence in check_sizes(axes, vars(config), where):
        raise MeshdialError(sentence)


@contextlib.contextmanager
def on(mesh: Mesh) -> Iterator[None]:
    """Within, arrays are placed on `mesh`, and programs compile for it."""
    token = _current.set(mesh)
    try:
        with jax.set_mesh(mesh):
            yield
    finally:
        _current.reset(token)


def current() -> Mesh:
    """The mesh that the calling code runs on; a single device where nobody has chosen one."""
    mesh = _current.get()
    return mesh or Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES)


def num_row_shards() -> int:
    """Into how many parts the rows of a batch are split on the current mesh."""
    mesh = _current.get()
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def name_of(mesh: Mesh) -> str:
    """Names a mesh by its devices and shape: the key of what lies there."""
    shape = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    first = mesh.devices.flat[0]
    return f"{first.platform}:{first.id}+{mesh.size}" + (f"({shape})" if shape else "")


# Shardings of whole arrays


def parameter_sharding(name: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, _partition(logical_axes(name), shape, mesh))


def parameter_shardings(
    shapes: Mapping[str, tuple[int, ...]], mesh: Mesh
) -> dict[str, NamedSharding]:
    """The sharding of each parameter, from its name and shape."""
    return {name: parameter_sharding(name, shape, mesh) for name, shape in shapes.items()}


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
    """As `parameter_shardings`, for any tree of arrays (or their shapes) with parameters' names as
    dict keys, such as an optimizer's state; a leaf below no such key is on every device."""

    def choose(path, leaf):
        keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        axes = logical_axes(keys[-1]) if keys else ()
        return NamedSharding(mesh, _partition(axes[: leaf.ndim], leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(choose, tree)


def placed(tree: Any) -> Any:
    """A tree of parameters, or of an optimizer's state, on the current mesh."""
    return jax.tree.map(_place, tree, tree_shardings(tree, current()))


def _place(leaf: Any, sharding: NamedSharding) -> jax.Array:
    is_there = isinstance(leaf, jax.Array) and leaf.sharding.device_set == sharding.device_set
    if is_there or sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)  # the same in every process
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def on_rows(values: np.ndarray) -> jax.Array:
    """A host array, the same in every process, with its leading axis spread over the row shards."""
    mesh = current()
    sharding = NamedSharding(mesh, _partition(("rows",), values.shape, mesh))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _partition(axes: Sequence[str | None], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    def mesh_axes(axis: str | None, size: int):
        chosen = RULES.get(axis)
        names = (chosen,) if isinstance(chosen, str) else chosen or ()
        names = tuple(name for name in names if mesh.shape[name] > 1)
        if size % math.prod(mesh.shape[name] for name in names):
            return None
        return names[0] if len(names) == 1 else names or None

    parts = list(map(mesh_axes, axes, shape))
    while parts and parts[-1] is None:  # as compiled programs spell what they return
        parts.pop()
    return PartitionSpec(*parts)


def shard_bytes(array: jax.Array) -> int:
    """What each device holds of an array."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


# In compiled code


def constrain(array: jax.Array, *axes: str | None) -> jax.Array:
    """`array` with these logical axes, sharded as the table says; all others on every device."""
    mesh = _current.get()
    if mesh is None or mesh.size == 1:
        return array
    return jax.lax.with_sharding_constraint(array, _partition(axes, array.shape, mesh))


def constrain_tree(tree: Any) -> Any:
    """A tree of parameters or optimizer state, laid out as `placed` would."""
    mesh = _current.get()
    if mesh is None or mesh.size == 1:
        return tree
    partitions = jax.tree.map(lambda sharding: sharding.spec, tree_shardings(tree, mesh))
    return jax.lax.with_sharding_constraint(tree, partitions)


def gathered(parameters: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The parameters for use: no longer split over fsdp."""
    kept = {axis for axis, mesh_axis in RULES.items() if mesh_axis == "tensor"}
    return {
        name: constrain(value, *(axis if axis in kept else None for axis in logical_axes(name)))
        for name, value in parameters.items()
    }


def by_row_shard(function: Callable[[Any], Any], rows: Any) -> Any:
    """`function` of each row shard's part of `rows`, whose arrays all lead with the shards' axis;
    where there is one shard, `rows` has no such axis, and nor have the results."""
    if num_row_shards() == 1:
        return function(rows)
    split = tuple(name for name in RULES["rows"] if current().shape[name] > 1)
    return jax.vmap(function, spmd_axis_name=split)(rows)


def split_rows(tree: Any) -> Any:
    """Arrays [rows, ...] as `by_row_shard` wants them: [shards, rows of a shard, ...]."""
    size = num_row_shards()
    if size == 1:
        return tree
    return jax.tree.map(
        lambda x: constrain(x.reshape(size, x.shape[0] // size, *x.shape[1:]), "rows"), tree
    )


def merge_rows(tree: Any) -> Any:
    """The inverse of `split_rows`."""
    if num_row_shards() == 1:
        return tree
    return jax.tree.map(
        lambda x: constrain(x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), "rows"), tree
    )
