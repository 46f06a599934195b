"""Who attends to whom: the functions that the network's layers are given.

What several sequences begin with is computed once. A *level* is an array of tokens [P, G, T]: the
tokens that all prompts share [1, 1, T], what is each prompt's own [P, 1, T], the completions
[P, G, T]. A token attends, in a single softmax, to what its sequence has in the levels above,
and causally to its own row.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""(query_NHC, key_NKC, value_NKC, cache of this layer) -> (output_NHC, cache of this layer)."""

_MASKED = -1e30


class Level(NamedTuple):
    """Right-padded rows of tokens; the position of a row's first one, and the row's length."""

    tokens_PGT: jax.Array
    start_P: jax.Array
    length_P: jax.Array

    @property
    def positions_PGT(self) -> jax.Array:
        T = self.tokens_PGT.shape[2]
        positions = self.start_P[:, None, None] + jnp.arange(T)[None, None, :]
        return jnp.broadcast_to(positions, self.tokens_PGT.shape)


def prompt_levels(prompt_tokens_PT: jax.Array, prompt_lengths_P: jax.Array, num_shared: int):
    """Whole prompts as levels: their first `num_shared` tokens, the same in all, and the rest."""
    shared_T, own_PT = prompt_tokens_PT[0, :num_shared], prompt_tokens_PT[:, num_shared:]
    shared_1 = jnp.full(1, num_shared)
    start_P = jnp.full_like(prompt_lengths_P, num_shared)
    own = Level(own_PT[:, None, :], start_P, prompt_lengths_P - num_shared)
    return [Level(shared_T[None, None, :], jnp.zeros_like(shared_1), shared_1), own][not num_shared :]


def pack(arrays: list[jax.Array]) -> jax.Array:
    """One array [N, ...] of a [P, G, T, ...] array for each level."""
    return jnp.concatenate([array.reshape(-1, *array.shape[3:]) for array in arrays])


def unpack(levels: list[Level], packed: jax.Array) -> list[jax.Array]:
    """The inverse of `pack`."""
    shapes = [level.tokens_PGT.shape for level in levels]
    ends = [sum(map(math.prod, shapes[: i + 1])) for i in range(len(shapes))]
    parts = jnp.split(packed, ends[:-1])
    return [part.reshape(*s, *packed.shape[1:]) for s, part in zip(shapes, parts, strict=True)]


def attend_levels(levels: list[Level]) -> Attend:
    """Attention among the packed tokens of `levels`. The cache passes through."""
    # What padding sees is of no consequence, and so is what a level's own padding holds: it
    # comes last in its row.
    sees_above = [
        jnp.arange(level.tokens_PGT.shape[2])[None, :] < level.length_P[:, None] for level in levels
    ]

    def attend_one(number: int, query_PGTHC, keys: list, values: list):
        query = _grouped(query_PGTHC, keys[0].shape[3])
        T = query.shape[2]
        causal_TS = jnp.tril(jnp.ones((T, T), bool))
        masks = [sees_PS[:, None, None, None, None, :] for sees_PS in sees_above[:number]]
        masks.append(causal_TS[None, None, None, None, :, :])
        scores = [
            jnp.where(mask, _einsum("pgtkrc,pgskc->pkgrts", query, key), _MASKED)
            for mask, key in zip(masks, keys, strict=True)
        ]
        outputs = [
            jnp.einsum("pkgrts,pgskc->pgtkrc", weights.astype(value.dtype), value)
            for weights, value in zip(_softmax(scores), values, strict=True)
        ]
        return sum(outputs).reshape(query_PGTHC.shape)

    def attend(query_NHC, key_NKC, value_NKC, cache):
        queries, keys, values = (unpack(levels, x) for x in (query_NHC, key_NKC, value_NKC))
        outputs = [
            attend_one(number, query, keys[: number + 1], values[: number + 1])
            for number, query in enumerate(queries)
        ]
        return pack(outputs), cache

    return attend


def attend_prompts(levels: list[Level]) -> Attend:
    """Attention among the levels of prompts; the cache becomes that of whole prompts."""
    attend_packed = attend_levels(levels)
    P = levels[-1].tokens_PGT.shape[0]

    def whole(x_NKC):
        parts = [part[:, 0] for part in unpack(levels, x_NKC)]
        parts = [jnp.broadcast_to(part, (P, *part.shape[1:])) for part in parts]
        return jnp.concatenate(parts, axis=1)

    def attend(query_NHC, key_NKC, value_NKC, _):
        output_NHC, _ = attend_packed(query_NHC, key_NKC, value_NKC, None)
        key_PTKC, value_PTKC = whole(key_NKC), whole(value_NKC)
        return output_NHC, (key_PTKC.transpose(0, 2, 3, 1), value_PTKC.transpose(0, 2, 1, 3))

    return attend


def attend_cached(prompt_lengths_P: jax.Array, group_size: int, index: jax.Array | int) -> Attend:
    """Attention of one new token a row, completion token `index` of its row.

    A layer's cache is (its prompt cache, its own cache), and becomes its own cache with the new
    token in slot `index`.
    """
    P, G = prompt_lengths_P.shape[0], group_size

    def attend(query_NHC, key_NKC, value_NKC, cache):
        (key_PKCS, value_PKSC), (key_PGKCS, value_PGKSC) = cache
        query, key, value = (
            x.reshape(P, G, *x.shape[1:]) for x in (query_NHC, key_NKC, value_NKC)
        )
        query = _grouped(query, key.shape[2])
        key_PGKCS = jax.lax.dynamic_update_slice_in_dim(key_PGKCS, key[..., None], index, 4)
        value_PGKSC = jax.lax.dynamic_update_slice_in_dim(
            value_PGKSC, value[..., None, :], index, 3
        )
        seen_PS = jnp.arange(key_PKCS.shape[-1])[None, :] < prompt_lengths_P[:, None]
        seen_S = jnp.arange(key_PGKCS.shape[-1]) <= index
        shared = _einsum("pgkrc,pkcs->pkgrs", query, key_PKCS)
        own = _einsum("pgkrc,pgkcs->pkgrs", query, key_PGKCS)
        shared, own = _softmax(
            [
                jnp.where(seen_PS[:, None, None, None, :], shared, _MASKED),
                jnp.where(seen_S[None, None, None, None, :], own, _MASKED),
            ]
        )
        output = jnp.einsum("pkgrs,pksc->pgkrc", shared.astype(value.dtype), value_PKSC)
        output += jnp.einsum("pkgrs,pgksc->pgkrc", own.astype(value.dtype), value_PGKSC)
        return output.reshape(query_NHC.shape), (key_PGKCS, value_PGKSC)

    return attend


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _grouped(query: jax.Array, num_kv: int) -> jax.Array:
    """[..., H, C] -> [..., K, R, C], scaled: R query heads share each key head."""
    *batch, H, C = query.shape
    return (query * C**-0.5).reshape(*batch, num_kv, H // num_kv, C)


def _softmax(scores: list[jax.Array]) -> list[jax.Array]:
    """One softmax over the last axes of several arrays together."""
    maxima = [score.max(axis=-1, keepdims=True) for score in scores]
    maximum = jax.lax.stop_gradient(functools.reduce(jnp.maximum, maxima))
    weights = [jnp.exp(score - maximum) for score in scores]
    total = sum(weight.sum(axis=-1, keepdims=True) for weight in weights)
    return [weight / total for weight in weights]
