"""The attention that the network's layers are given, and its arithmetic over blocks of keys."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rl.models.spec import AttentionKind

Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, AttentionKind], tuple[jax.Array, Any]]
"""(query_NHC, key_NKC, value_NKC, cache and kind of this layer) -> (output_NHC, its cache)."""

_MASKED = -1e30
_KEYS = {3: "ksc", 4: "kpsc", 5: "kpbsc"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_blocks(query_KPBRTC, keys, values, masks, soft_cap):
    """output_KPBRTC of queries (scaled already) on every key that they see in any block.

    keys, values: a list of arrays [K, S, C], seen by the queries of all p and b, [K, P, S, C], by
    those of all b, or [K, P, B, S, C]. masks: which query sees which key, bool [P, B, T, S] or
    broadcasting to it, or None for all; each query sees one key at least. soft_cap: see
    `AttentionKind`. R query heads share a key head.

    Scores and softmax are float32. Between the passes one number is kept for each pair of query
    and key, exp(score - maximum): the gradient of a score is weight * (gradient of the weight -
    output . its gradient) (Dao et al. 2022, appendix B.2).
    """
    return _forward(query_KPBRTC, keys, values, masks, soft_cap)[0]


def _forward(query, keys, values, masks, soft_cap):
    scores = [
        _masked(_scores(query, key, soft_cap), mask) for key, mask in zip(keys, masks, strict=True)
    ]
    maxima = [score.max(axis=-1, keepdims=True) for score in scores]
    maximum = functools.reduce(jnp.maximum, maxima)
    terms = [jnp.exp(score - maximum) for score in scores]
    total = sum(term.sum(axis=-1, keepdims=True) for term in terms)
    terms = [term.astype(query.dtype) for term in terms]
    output = sum(
        _einsum(f"kpbrts,{_KEYS[value.ndim]}->kpbrtc", term, value)
        for term, value in zip(terms, values, strict=True)
    )
    output = (output / total).astype(query.dtype)
    return output, (query, keys, values, terms, total, output)


def _backward(soft_cap, saved, output_gradient):
    query, keys, values, terms, total, output = saved
    scaled = output_gradient.astype(jnp.float32) / total
    delta = (scaled * output.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    scaled = scaled.astype(query.dtype)
    query_gradient, key_gradients, value_gradients = 0.0, [], []
    for key, value, term in zip(keys, values, terms, strict=True):
        letters = _KEYS[value.ndim]
        value_gradients.append(
            _einsum(f"kpbrts,kpbrtc->{letters}", term, scaled).astype(value.dtype)
        )
        weight_gradient = _einsum(f"kpbrtc,{letters}->kpbrts", scaled, value)
        score_gradient = term * (weight_gradient - delta)
        _, pull = jax.vjp(functools.partial(_scores, soft_cap=soft_cap), query, key)
        of_query, of_key = pull(score_gradient)
        query_gradient += of_query
        key_gradients.append(of_key)
    return query_gradient.astype(query.dtype), key_gradients, value_gradients, None


attend_blocks.defvjp(_forward, _backward)


def _scores(query, key, soft_cap):
    scores = _einsum(f"kpbrtc,{_KEYS[key.ndim]}->kpbrts", query, key)
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _masked(scores, mask_PBTS):
    if mask_PBTS is None:
        return scores
    return jnp.where(mask_PBTS[None, :, :, None], scores, _MASKED)


def _einsum(equation: str, *arrays) -> jax.Array:
    return jnp.einsum(equation, *arrays, preferred_element_type=jnp.float32)
