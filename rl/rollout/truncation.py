"""Top-k, top-p and min-p: which tokens they leave.

Each is a threshold on the weights, found by bisection on their float bits: nothing is sorted, and
tokens that tie at a threshold are all kept.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def keep_from(least_B: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """A function that keeps the weights of at least `least_B`, and puts zero for the others."""
    return lambda weights: jnp.where(weights >= align(least_B, weights), weights, 0.0)


def least_weight(weights_BNM: jax.Array, sampling) -> jax.Array:
    """least_B: the smallest weight that is kept. The largest weight of a row is exactly 1.

    In Hugging Face's order: top-k, then top-p of what top-k left, then min-p.
    """
    num_tokens = weights_BNM[0].size

    def num_kept(least_B):
        return add_up(jnp.where(weights_BNM >= align(least_B, weights_BNM), 1.0, 0.0))

    def mass_kept(least_B):
        return add_up(keep_from(least_B)(weights_BNM))

    def top_k(least_B):
        everything_B = jnp.full_like(least_B, num_tokens)
        wanted_B = jnp.minimum(sampling.top_k, everything_B)
        return _largest_threshold(num_kept, wanted_B, least_B, everything_B, jnp.ones_like)

    def top_p(least_B):
        mass_B = mass_kept(least_B)
        # All tokens below this have less than half of the mass that may go.
        spare_B = (1 - sampling.top_p) * mass_B / (2 * num_tokens)
        low_B = jnp.maximum(least_B, spare_B)
        return _largest_threshold(
            mass_kept, sampling.top_p * mass_B, low_B, mass_B, lambda weight_B: weight_B
        )

    def unchanged(least_B):
        return least_B

    least_B = jnp.zeros(weights_BNM.shape[0])
    least_B = jax.lax.cond(sampling.top_k > 0, top_k, unchanged, least_B)
    least_B = jax.lax.cond(sampling.top_p < 1, top_p, unchanged, least_B)
    return jnp.maximum(least_B, sampling.min_p)


def align(values_B: jax.Array, like: jax.Array) -> jax.Array:
    """[B] -> [B, 1, ...] of as many axes as `like` has."""
    return jnp.expand_dims(values_B, range(1, like.ndim))


def add_up(values_BNM: jax.Array) -> jax.Array:
    """sums_B, by blocks, which rounds less."""
    return jnp.sum(jnp.sum(values_BNM, axis=-1), axis=-1)


class _Bracket(NamedTuple):
    """Bits of a threshold that keeps enough and of one that does not, and what each keeps."""

    low_B: jax.Array
    high_B: jax.Array
    kept_low_B: jax.Array
    kept_high_B: jax.Array


def _largest_threshold(measure, wanted_B, low_B, most_B, weigh) -> jax.Array:
    """The largest threshold_B at which measure(threshold_B) >= wanted_B, or one that keeps as much.

    `measure` is at most `most_B` and falls as the threshold rises, at each token of that weight by
    `weigh(threshold_B)`; `low_B` is known to keep enough. The bits of floats that are not negative
    order as the floats do, so that halving an interval of integers is exact after 30 rounds. A row
    is done before when it has one token between its bounds, whatever others still need.
    """

    def is_open(bracket):
        num_between_B = (bracket.kept_low_B - bracket.kept_high_B) / weigh(_float(bracket.low_B))
        return (bracket.high_B - bracket.low_B > 1) & ~(num_between_B < 1.5)

    def halve(bracket):
        low_B, high_B, kept_low_B, kept_high_B = bracket
        middle_B = low_B + (high_B - low_B) // 2
        kept_B = measure(_float(middle_B))
        rises_B = is_open(bracket) & (kept_B >= wanted_B)
        falls_B = is_open(bracket) & (kept_B < wanted_B)
        return _Bracket(
            jnp.where(rises_B, middle_B, low_B),
            jnp.where(falls_B, middle_B, high_B),
            jnp.where(rises_B, kept_B, kept_low_B),
            jnp.where(falls_B, kept_B, kept_high_B),
        )

    above_one = jnp.full_like(low_B, np.nextafter(np.float32(1), np.float32(2)))
    bracket = _Bracket(_bits(low_B), _bits(above_one), most_B, jnp.zeros_like(low_B))
    bracket = jax.lax.while_loop(lambda bracket: jnp.any(is_open(bracket)), halve, bracket)
    return _float(bracket.low_B)


def _bits(values_B) -> jax.Array:
    return jax.lax.bitcast_convert_type(values_B, jnp.int32)


def _float(bits_B) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits_B, jnp.float32)
