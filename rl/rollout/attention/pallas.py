"""Attention over pages on accelerators, by the Pallas kernels that JAX ships.

On GPUs that is `jax.experimental.pallas.ops.gpu.paged_attention`, on TPUs
`jax.experimental.pallas.ops.tpu.paged_attention`: flash attention (Dao et al. 2022) of one query a
row that follows the table of pages (Kwon et al. 2023) itself. Both want the pool of one layer as
[K, N, S, C] for keys and for values. Appending is a scatter into it before the kernel runs.
"""

import contextlib
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rl.errors import MeshdialError
from rl.models.spec import AttentionKind, ModelSpec
from rl.rollout.shapes import power_of_two
from rl.sharding import RULES, current

PagedPool = tuple[jax.Array, jax.Array]
"""(key_KNSC, value_KNSC) of one layer."""

AXES = ("kv_heads", None, None, None)
"""Logical axes of both arrays."""

_BLOCK_BYTES = {"gpu": 2**15, "tpu": 2**17}
"""Most bytes of keys that a kernel takes from their pages at once: they, as many values, and the
next block of both have to fit beside each other into the fast memory of a core."""

_LEAST_SLOTS = 16
"""Fewest keys, and channels, in a product of GPUs' matrix units."""


def supports(spec: ModelSpec, page_size: int, platform: str) -> str | None:
    """Why the kernel of a platform, named as JAX names it, cannot decode a model; None if it can.

    Sizes are those that the kernels' lowering to Triton and to Mosaic takes, and no smaller than a
    tile of the matrix units.
    """
    name = f"Pallas paged attention on {platform}"
    if platform not in _KERNELS:
        return f"{name}: JAX has it for {' and '.join(_KERNELS)} only"
    kinds = map(spec.config.attention_kind, range(spec.config.num_hidden_layers))
    windows = [kind.window for kind in kinds if kind.window is not None]
    if windows:
        return f"{name} has no sliding window, and the model has one of {windows[0]} tokens"
    most = _BLOCK_BYTES[platform] // (spec.config.head_dim * jnp.dtype(spec.dtype).itemsize)
    reason = (_gpu_lacks if platform == "gpu" else _tpu_lacks)(spec, page_size)
    if reason is None and page_size > most:
        reason = f"wants a page_size of {most} at most, and it is {page_size}"
    return reason and f"{name} {reason}"


def _gpu_lacks(spec: ModelSpec, page_size: int) -> str | None:
    head_dim = spec.config.head_dim
    if head_dim < _LEAST_SLOTS or head_dim != power_of_two(head_dim):
        return f"wants a head_dim of 16, 32, 64, ..., and the model's is {head_dim}"
    if page_size != power_of_two(page_size):
        return f"wants a page_size of 8, 16, 32, ..., and it is {page_size}"
    return None


def _tpu_lacks(spec: ModelSpec, page_size: int) -> str | None:
    if spec.dtype != "bfloat16":
        return f"rounds keys and values to bfloat16, and the model's dtype is {spec.dtype}"
    if spec.config.head_dim % 128:
        return f"wants a multiple of 128 as head_dim, and the model's is {spec.config.head_dim}"
    if page_size % 16:
        return f"wants a multiple of 16 as page_size, and it is {page_size}"
    return None


# The pool


def page_size(pool: PagedPool) -> int:
    return pool[0].shape[2]


def empty(spec: ModelSpec, num_pages: int, page_size: int) -> PagedPool:
    shape = (spec.config.num_key_value_heads, num_pages, page_size, spec.config.head_dim)
    return jnp.zeros(shape, spec.dtype), jnp.zeros(shape, spec.dtype)


def write(
    pool: PagedPool,
    key_MKC: jax.Array,
    value_MKC: jax.Array,
    pages_M: jax.Array,
    slots_M: jax.Array,
) -> PagedPool:
    """Put each of M tokens into its slot of its page."""
    key_KNSC, value_KNSC = pool
    return (
        key_KNSC.at[:, pages_M, slots_M].set(key_MKC.swapaxes(0, 1)),
        value_KNSC.at[:, pages_M, slots_M].set(value_MKC.swapaxes(0, 1)),
    )


def read(pool: PagedPool, table_RN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(key_RKCS, value_RKSC): each row's pages one after the other."""
    (key_KRNSC, value_KRNSC) = (pages_KNSC[:, table_RN] for pages_KNSC in pool)
    K, R, N, S, C = key_KRNSC.shape
    key_RKCS = key_KRNSC.transpose(1, 0, 4, 2, 3).reshape(R, K, C, N * S)
    return key_RKCS, value_KRNSC.transpose(1, 0, 2, 3, 4).reshape(R, K, N * S, C)


def copy(pool: PagedPool, sources_M: jax.Array, targets_M: jax.Array) -> PagedPool:
    """Each target page becomes what its source is."""
    key, value = (pages_KNSC.at[:, targets_M].set(pages_KNSC[:, sources_M]) for pages_KNSC in pool)
    return key, value


# Attention


def append_and_attend(
    query_BHC: jax.Array,
    key_BKC: jax.Array,
    value_BKC: jax.Array,
    pool: PagedPool,
    table_BN: jax.Array,
    position_B: jax.Array,
    kind: AttentionKind,
    platform: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, PagedPool]:
    """Put one new token a row into the pool, and attend to it and to all tokens before it.

    The rows are those of one replica, each at `position_B` below N * S of its pages `table_BN`.
    Query heads and kv heads, the pool's too, may be split over the mesh: no device asks another.
    `platform` is that of the current mesh if not given; `interpret` runs its kernel on any.
    MeshdialError for a kind with a window.
    """
    if kind.window is not None:
        raise MeshdialError(
            f"Pallas paged attention: a window of {kind.window} tokens, expected none"
        )
    platform = platform or current().devices.flat[0].platform
    kernel = functools.partial(_KERNELS[platform], soft_cap=kind.soft_cap, interpret=interpret)
    page_bytes = page_size(pool) * pool[0].shape[3] * pool[0].dtype.itemsize
    run = functools.partial(_append_and_attend, kernel, _BLOCK_BYTES[platform] // page_bytes)
    return _by_head_shard(run)(query_BHC, key_BKC, value_BKC, pool, table_BN, position_B)


def _append_and_attend(
    kernel: Callable, most_pages: int, query_BHC, key_BKC, value_BKC, pool, table_BN, position_B
):
    C, S, N = query_BHC.shape[-1], page_size(pool), table_BN.shape[1]
    pages_B = jnp.take_along_axis(table_BN, position_B[:, None] // S, axis=1)[:, 0]
    pool = write(pool, key_BKC, value_BKC, pages_B, position_B % S)
    num_block_pages = min(power_of_two(most_pages + 1) // 2, power_of_two(N))
    num_block_pages = max(num_block_pages, _LEAST_SLOTS // S)
    # Kernels take whole blocks of pages: what is added here lies beyond every row's length.
    table_BN = jnp.pad(table_BN, ((0, 0), (0, -N % num_block_pages)))
    output_BHC = kernel(query_BHC * C**-0.5, *pool, table_BN, position_B + 1, num_block_pages)
    return output_BHC, pool


def _attend_on_gpu(query, key, value, table, lengths, num_block_pages, soft_cap, interpret):
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    packed = (query, key, value, table, lengths)
    sizes = {"pages_per_compute_block": num_block_pages, "attn_logits_soft_cap": soft_cap}
    num_splits = math.gcd(table.shape[1] // num_block_pages, 16)  # of a row, computed side by side
    return paged_attention(*packed, k_splits=num_splits, interpret=interpret, **sizes)


def _attend_on_tpu(query, key, value, table, lengths, num_block_pages, soft_cap, interpret):
    from jax.experimental.pallas import tpu
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    packed = (query, key, value, lengths, table)
    sizes = {"pages_per_compute_block": num_block_pages, "attn_logits_soft_cap": soft_cap}
    with tpu.force_tpu_interpret_mode() if interpret else contextlib.nullcontext():
        return paged_attention(*packed, **sizes)


_KERNELS = {"gpu": _attend_on_gpu, "tpu": _attend_on_tpu}


def _by_head_shard(run: Callable) -> Callable:
    """`run` on each device's heads: the compiler cannot split a kernel by itself."""
    mesh, axis = current(), RULES["kv_heads"]
    if mesh.size == 1:
        return run
    heads, pool, whole = PartitionSpec(None, axis), PartitionSpec(axis), PartitionSpec()
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(heads, heads, heads, (pool, pool), whole, whole),
        out_specs=(heads, (pool, pool)),
        check_vma=False,  # the kernels do not tell what their results vary over
    )
