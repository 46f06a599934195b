"""The pool of one layer's keys and values, by pages: [N, K, C, S] and [N, K, S, C].

Channels before slots for keys, slots before channels for values: the order that a processor reads
fastest, in which both products of attention go along the last axis.
"""

import jax
import jax.numpy as jnp

from rl.models.spec import ModelSpec

LayerPool = tuple[jax.Array, jax.Array]
"""(key_NKCS, value_NKSC) of one layer."""


AXES = (None, "kv_heads", None, None)
"""Logical axes of both arrays."""


def page_size(pool: LayerPool) -> int:
    return pool[0].shape[-1]


def page_bytes(spec: ModelSpec, page_size: int) -> int:
    """What one page takes over all layers."""
    config = spec.config
    num_values = 2 * config.num_key_value_heads * config.head_dim * page_size
    return config.num_hidden_layers * num_values * jnp.dtype(spec.dtype).itemsize


def empty(spec: ModelSpec, num_pages: int, page_size: int) -> LayerPool:
    K, C = spec.config.num_key_value_heads, spec.config.head_dim
    return (
        jnp.zeros((num_pages, K, C, page_size), spec.dtype),
        jnp.zeros((num_pages, K, page_size, C), spec.dtype),
    )


def write(
    pool: LayerPool,
    key_MKC: jax.Array,
    value_MKC: jax.Array,
    pages_M: jax.Array,
    slots_M: jax.Array,
) -> LayerPool:
    """Put each of M tokens into its slot of its page."""
    key_NKCS, value_NKSC = pool
    return (
        key_NKCS.at[pages_M, :, :, slots_M].set(key_MKC),
        value_NKSC.at[pages_M, :, slots_M].set(value_MKC),
    )


def read(pool: LayerPool, table_RN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(key_RKCS, value_RKSC): each row's pages one after the other."""
    key_NKCS, value_NKSC = pool
    R, N = table_RN.shape
    _, K, C, S = key_NKCS.shape
    key = key_NKCS[table_RN].transpose(0, 2, 3, 1, 4).reshape(R, K, C, N * S)
    value = value_NKSC[table_RN].transpose(0, 2, 1, 3, 4).reshape(R, K, N * S, C)
    return key, value


def copy(pool: LayerPool, sources_M: jax.Array, targets_M: jax.Array) -> LayerPool:
    """Each target page becomes what its source is."""
    key_NKCS, value_NKSC = pool
    return key_NKCS.at[targets_M].set(key_NKCS[sources_M]), value_NKSC.at[targets_M].set(
        value_NKSC[sources_M]
    )
