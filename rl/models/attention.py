"""Who attends to whom: the functions that the network's layers are given.

What several sequences begin with is computed once. The packed tokens are, one after the other:
the `num_shared` tokens that all prompts begin with; the other tokens of each prompt [P, T], T
counting the shared ones too; the tokens of each completion [P, G, T].
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rl.models.spec import AttentionKind

Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, AttentionKind], tuple[jax.Array, Any]]
"""(query_NHC, key_NKC, value_NKC, cache and kind of this layer) -> (output_NHC, its cache)."""

_MASKED = -1e30


def attend_prompts(num_prompts: int, num_tokens: int, num_shared: int) -> Attend:
    """Causal attention of right-padded prompts. The cache becomes (key_PTKC, value_PTKC)."""

    def attend(query_NHC, key_NKC, value_NKC, _, kind):
        packed = (query_NHC, key_NKC, value_NKC)
        own_shape = (num_prompts, num_tokens - num_shared)
        query, key, value = (x[num_shared:].reshape(*own_shape, *x.shape[1:]) for x in packed)
        if not num_shared:
            return _attend_causally(query, key, value).reshape(query_NHC.shape), (key, value)
        shared = [x[None, :num_shared] for x in packed]
        output_1THC = _attend_causally(*shared)
        key, value = (
            jnp.concatenate([jnp.broadcast_to(x, (num_prompts, *x.shape[1:])), own], axis=1)
            for x, own in zip(shared[1:], (key, value), strict=True)
        )
        output_PTHC = _attend_causally(query, key, value)
        flat = (-1, *query_NHC.shape[1:])
        output_NHC = jnp.concatenate([output_1THC.reshape(flat), output_PTHC.reshape(flat)])
        return output_NHC, (key, value)

    return attend


def attend_groups(
    prompt_lengths_P: jax.Array, num_tokens: int, num_shared: int, group_size: int
) -> Attend:
    """Attention of prompts, `num_tokens` long with their padding, and groups of completions."""
    num_prompts = prompt_lengths_P.shape[0]
    seen_PS = jnp.arange(num_tokens)[None, :] < prompt_lengths_P[:, None]
    num_packed = num_shared + num_prompts * (num_tokens - num_shared)
    attend_packed_prompts = attend_prompts(num_prompts, num_tokens, num_shared)

    def attend(query_NHC, key_NKC, value_NKC, cache, kind):
        packed = (query_NHC, key_NKC, value_NKC)
        prompt_output_NHC, (key_PSKC, value_PSKC) = attend_packed_prompts(
            *(x[:num_packed] for x in packed), None, kind
        )
        query, key, value = (
            x[num_packed:].reshape(num_prompts, group_size, -1, *x.shape[1:]) for x in packed
        )
        query = _grouped(query, key.shape[3])
        causal_TS = jnp.tril(jnp.ones((key.shape[2], key.shape[2]), bool))
        scores = [
            _where(seen_PS[:, None, None, None, None], "pgtkrc,pskc->pkgrts", query, key_PSKC),
            _where(causal_TS[None, None, None, None], "pgtkrc,pgskc->pkgrts", query, key),
        ]
        prompt_weights, own_weights = _softmax(scores, value.dtype)
        output = jnp.einsum("pkgrts,pskc->pgtkrc", prompt_weights, value_PSKC)
        output += jnp.einsum("pkgrts,pgskc->pgtkrc", own_weights, value)
        output_NHC = output.reshape(-1, *query_NHC.shape[1:])
        return jnp.concatenate([prompt_output_NHC, output_NHC]), cache

    return attend


def attend_cached(prompt_lengths_P: jax.Array, group_size: int, index: jax.Array | int) -> Attend:
    """Attention of one new token a row, completion token `index` of its row.

    A layer's cache is (its prompt cache, its own cache), and becomes its own cache with the new
    token in slot `index`.
    """
    rows = (prompt_lengths_P.shape[0], group_size)

    def attend(query_NHC, key_NKC, value_NKC, cache, kind):
        (key_PKCS, value_PKSC), (key_PGKCS, value_PGKSC) = cache
        packed = (query_NHC, key_NKC, value_NKC)
        query, key, value = (x.reshape(*rows, *x.shape[1:]) for x in packed)
        query = _grouped(query, key.shape[2])
        put = jax.lax.dynamic_update_slice_in_dim
        key_PGKCS = put(key_PGKCS, key[..., None], index, axis=4)
        value_PGKSC = put(value_PGKSC, value[..., None, :], index, axis=3)
        seen_PS = jnp.arange(key_PKCS.shape[-1])[None, :] < prompt_lengths_P[:, None]
        seen_S = jnp.arange(key_PGKCS.shape[-1]) <= index
        scores = [
            _where(seen_PS[:, None, None, None], "pgkrc,pkcs->pkgrs", query, key_PKCS),
            _where(seen_S[None, None, None, None], "pgkrc,pgkcs->pkgrs", query, key_PGKCS),
        ]
        prompt_weights, own_weights = _softmax(scores, value.dtype)
        output = jnp.einsum("pkgrs,pksc->pgkrc", prompt_weights, value_PKSC)
        output += jnp.einsum("pkgrs,pgksc->pgkrc", own_weights, value_PGKSC)
        return output.reshape(query_NHC.shape), (key_PGKCS, value_PGKSC)

    return attend


def _attend_causally(query_PTHC, key_PSKC, value_PSKC):
    """The queries are those of the last T of S positions."""
    T, S = query_PTHC.shape[1], key_PSKC.shape[1]
    query = _grouped(query_PTHC, key_PSKC.shape[2])
    causal_TS = jnp.tril(jnp.ones((T, S), bool), S - T)
    scores = _where(causal_TS[None, None, None], "ptkrc,pskc->pkrts", query, key_PSKC)
    (weights,) = _softmax([scores], value_PSKC.dtype)
    return jnp.einsum("pkrts,pskc->ptkrc", weights, value_PSKC).reshape(query_PTHC.shape)


def _grouped(query: jax.Array, num_kv: int) -> jax.Array:
    """[..., H, C] -> [..., K, R, C], scaled: R query heads share each key head."""
    *batch, H, C = query.shape
    return (query * C**-0.5).reshape(*batch, num_kv, H // num_kv, C)


def _where(mask, equation: str, query: jax.Array, key: jax.Array) -> jax.Array:
    """Float32 scores of queries and keys, and none where the mask is false."""
    scores = jnp.einsum(equation, query, key, preferred_element_type=jnp.float32)
    return jnp.where(mask, scores, _MASKED)


def _softmax(scores: list[jax.Array], dtype) -> list[jax.Array]:
    """One softmax over the last axes of several arrays together."""
    maxima = [score.max(axis=-1, keepdims=True, initial=_MASKED) for score in scores]
    maximum = jax.lax.stop_gradient(functools.reduce(jnp.maximum, maxima))
    weights = [jnp.exp(score - maximum) for score in scores]
    total = sum(weight.sum(axis=-1, keepdims=True) for weight in weights)
    return [(weight / total).astype(dtype) for weight in weights]
