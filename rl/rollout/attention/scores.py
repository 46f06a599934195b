"""What all ways to attend share: scaled queries, soft-capped and masked scores, softmax."""

import jax
import jax.numpy as jnp

from rl.models.spec import AttentionKind

MASKED = -1e30


def grouped(query_BHC: jax.Array, num_kv: int) -> jax.Array:
    """[..., H, C] -> [..., K, R, C], scaled: R query heads share each key head."""
    *batch, H, C = query_BHC.shape
    return (query_BHC * C**-0.5).reshape(*batch, num_kv, H // num_kv, C)


def masked_scores(
    equation: str, query: jax.Array, key: jax.Array, mask: jax.Array, kind: AttentionKind
) -> jax.Array:
    """Float32 scores where the mask, which broadcasts, is true."""
    scores = jnp.einsum(equation, query, key, preferred_element_type=jnp.float32)
    if kind.soft_cap is not None:
        scores = kind.soft_cap * jnp.tanh(scores / kind.soft_cap)
    return jnp.where(mask, scores, MASKED)


def is_seen(query_positions: jax.Array, key_positions: jax.Array, kind: AttentionKind) -> jax.Array:
    """Which keys a query may see by their positions, which broadcast against each other."""
    distance = query_positions - key_positions
    mask = distance >= 0
    return mask if kind.window is None else mask & (distance < kind.window)


def part_of_softmax(scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(weights, their sum, maximum) of a part of a softmax, the last two with a last axis of 1."""
    maximum = scores.max(axis=-1, keepdims=True, initial=MASKED)
    weights = jnp.exp(scores - maximum)
    return weights, weights.sum(axis=-1, keepdims=True), maximum


def weighted(equation: str, weights: jax.Array, value: jax.Array) -> jax.Array:
    """Float32 sums of values by softmax weights that are not normalised yet."""
    return jnp.einsum(
        equation, weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
