"""Blocks of an array that several processes hold parts of, put together by their devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


@functools.lru_cache(maxsize=4096)
def summed(sharding: Any, num_axes: int, axis: int, num_rows: int) -> Callable:
    """A program that puts rows [start, start + num_rows) of an array so sharded on every device.

    Each device places what it has of them among zeros, and the sum over the mesh axes that split
    the array is exact, since it adds bit patterns. A slice would gather the whole array first.
    """
    spec = (*sharding.spec, *[None] * (num_axes - len(sharding.spec)))
    names = [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]
    splitting = tuple(name for part in names for name in part)

    def place(local: jax.Array, start: jax.Array) -> jax.Array:
        is_bool = local.dtype == jnp.bool_
        unsigned = f"uint{8 * local.dtype.itemsize}"
        bits = local if is_bool else jax.lax.bitcast_convert_type(local, unsigned)
        parts = [jax.lax.axis_size(part) if part else 1 for part in names]
        offsets = [
            jax.lax.axis_index(part) * size if part else jnp.int32(0)
            for part, size in zip(names, local.shape, strict=True)
        ]
        held = min(num_rows, local.shape[axis])
        first = jnp.clip(start - offsets[axis], 0, local.shape[axis] - held)
        rows = jax.lax.dynamic_slice_in_dim(bits.astype(unsigned), first, held, axis)
        shape = [size * part for size, part in zip(local.shape, parts, strict=True)]
        shape[axis] = num_rows + 2 * held  # margins for rows that are not of the block
        offsets[axis] += first - start + held
        offsets[axis] = jnp.clip(offsets[axis], 0, num_rows + held)
        wide = jax.lax.dynamic_update_slice(jnp.zeros(shape, unsigned), rows, offsets)
        block = jax.lax.slice_in_dim(wide, held, held + num_rows, axis=axis)
        total = jax.lax.psum(block, splitting)
        return total.astype(bool) if is_bool else jax.lax.bitcast_convert_type(total, local.dtype)

    specs = (sharding.spec, PartitionSpec())
    whole = jax.shard_map(
        place, mesh=sharding.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(whole)
