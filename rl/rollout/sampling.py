"""Draw a token from each row of logits, and say how likely it was.

One uniform number decides one token, by inverse CDF in two levels: the row's weights are summed by
blocks, the block that the number falls into is found, then the token in it. The sums give the
log-probability for free, and nothing is sorted: top-k and top-p are thresholds on the weights,
found by bisection on their float bits, so tokens that tie at a threshold are all kept.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl.errors import MeshdialError

NUM_BLOCKS = 64  # of the two-level search; a vocabulary that does not divide is padded


class SamplingNumbers(NamedTuple):
    """What the compiled sampler reads of a SamplingConfig: numbers, so a sweep compiles once."""

    temperature: float | jax.Array
    top_k: int | jax.Array
    top_p: float | jax.Array
    min_p: float | jax.Array


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are sampled.

    max_tokens: most tokens of a completion. temperature: 0 is greedy. top_k: 0 is off.
    top_p: 1 is off. min_p: 0 is off. stop: texts that end a completion.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        bounds = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            "min_p": (0 <= self.min_p <= 1, "from 0 (off) to 1"),
            "stop": (all(self.stop), "no empty text"),
        }
        for name, (is_legal, expected) in bounds.items():
            if not is_legal:
                found = getattr(self, name)
                raise MeshdialError(f"sampling: {name} is {found!r}, expected {expected}")

    @property
    def is_truncating(self) -> bool:
        """Whether tokens are sampled from less than the whole distribution."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def numbers(self) -> SamplingNumbers:
        return SamplingNumbers(
            np.float32(self.temperature),
            np.int32(min(self.top_k, 2**31 - 1)),
            np.float32(self.top_p),
            np.float32(self.min_p),
        )


def sample_tokens(
    logits_BV: jax.Array, uniforms_B: jax.Array, sampling: SamplingConfig | SamplingNumbers
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(tokens_B, logprobs_B, sampling_logprobs_B), each token decided by a uniform in [0, 1).

    `logprobs_B` are log softmax(logits / temperature) of the whole vocabulary. Truncation comes in
    Hugging Face's order: temperature, top-k, top-p of what top-k left, min-p relative to the most
    probable token; `sampling_logprobs_B` are normalised over what is left. At temperature 0 the
    token is the argmax (the first, in a tie), and both are its log softmax(logits).
    """
    logits_BV = logits_BV.astype(jnp.float32)
    logits_BNM = _blocks(logits_BV)
    is_greedy = jnp.asarray(sampling.temperature == 0)
    temperature = jnp.where(is_greedy, 1.0, sampling.temperature)
    peak_B = jnp.max(logits_BV, axis=-1)

    def weigh(logits):
        """Probabilities relative to the most probable token's, which is exactly 1."""
        return jnp.exp((logits - _align(peak_B, logits)) / temperature)

    def weigh_kept(logits):
        return jnp.where(logits >= _align(least_B, logits), weigh(logits), 0.0)

    def everything():
        return jnp.full_like(peak_B, -jnp.inf)

    def truncated():
        return _least_kept(logits_BNM, weigh(logits_BNM), sampling)

    is_whole = ~is_greedy & ~_truncates(sampling)
    kind = jnp.where(is_greedy, 0, jnp.where(is_whole, 1, 2))
    least_B = jax.lax.switch(kind, [lambda: peak_B, everything, truncated])
    # Of greedy's ties the number 0 draws the first.
    uniforms_B = jnp.where(is_greedy, 0.0, uniforms_B)
    tokens_B, kept_B = _inverse_cdf(logits_BNM, weigh_kept, uniforms_B)
    total_B = jax.lax.cond(is_whole, lambda: kept_B, lambda: _sum(weigh(logits_BNM)))
    log_weights_B = (_take(logits_BV, tokens_B) - peak_B) / temperature
    sampling_total_B = jnp.where(is_greedy, total_B, kept_B)
    return (
        tokens_B,
        log_weights_B - jnp.log(total_B),
        log_weights_B - jnp.log(sampling_total_B),
    )


@functools.partial(jax.jit, static_argnames="num_positions")
def sample_uniforms(
    seed: int | jax.Array,
    iteration: int | jax.Array,
    prompt_numbers_P: jax.Array,
    samples_PG: jax.Array,
    num_positions: int,
) -> jax.Array:
    """uniforms_TPG in [0, 1), multiples of 2**-24: the number that decides each token.

    It follows from what the token is, by jax.random.fold_in of (seed, iteration, prompt number,
    sample, position), each from 0 to 2**32 - 1; not from where it is computed.
    """
    fold_in, over = jax.random.fold_in, jax.vmap
    key = fold_in(jax.random.key(seed, impl="threefry2x32"), iteration)
    keys_P = over(fold_in, (None, 0))(key, prompt_numbers_P)
    keys_PG = over(over(fold_in, (None, 0)))(keys_P, samples_PG)
    positions_T = jnp.arange(num_positions, dtype=jnp.uint32)
    keys_TPG = over(over(over(fold_in, (0, None)), (0, None)), (None, 0))(keys_PG, positions_T)
    bits_TPG = over(over(over(lambda key: jax.random.bits(key, (), jnp.uint32))))(keys_TPG)
    return (bits_TPG >> 8).astype(jnp.float32) * jnp.float32(2**-24)


# Truncation


def _truncates(sampling) -> bool | jax.Array:
    return (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)


def _least_kept(logits_BNM, weights_BNM, sampling) -> jax.Array:
    """least_B: the smallest logit that top-k, top-p and min-p keep."""
    # The barrier: a weight must round alike wherever it is compared.
    weights_BNM = jax.lax.optimization_barrier(weights_BNM)

    def is_kept(least_B):
        return weights_BNM >= _align(least_B, weights_BNM)

    def num_kept(least_B):
        return _sum(jnp.where(is_kept(least_B), 1.0, 0.0))

    def mass_kept(least_B):
        return _sum(jnp.where(is_kept(least_B), weights_BNM, 0.0))

    def top_k(least_B):
        wanted = jnp.minimum(sampling.top_k, weights_BNM[0].size).astype(jnp.float32)
        return _largest_threshold(num_kept, wanted, least_B)

    def top_p(least_B):
        return _largest_threshold(mass_kept, sampling.top_p * mass_kept(least_B), least_B)

    def unchanged(least_B):
        return least_B

    least_B = jnp.zeros(weights_BNM.shape[0])
    least_B = jax.lax.cond(sampling.top_k > 0, top_k, unchanged, least_B)
    least_B = jax.lax.cond(sampling.top_p < 1, top_p, unchanged, least_B)
    least_B = jnp.maximum(least_B, sampling.min_p)
    return jnp.min(jnp.where(is_kept(least_B), logits_BNM, jnp.inf), axis=(1, 2))


def _largest_threshold(measure, wanted, low_B) -> jax.Array:
    """The largest threshold_B at which measure(threshold_B) >= wanted.

    `measure` falls as the threshold rises, and `low_B` is known to be low enough. The bits of
    floats that are not negative order as the floats do, so that halving an interval of integers
    is exact after 30 rounds.
    """

    def is_open(interval):
        low_B, high_B = interval
        return jnp.any(high_B - low_B > 1)

    def halve(interval):
        low_B, high_B = interval
        middle_B = low_B + (high_B - low_B) // 2
        is_enough_B = measure(jax.lax.bitcast_convert_type(middle_B, jnp.float32)) >= wanted
        return jnp.where(is_enough_B, middle_B, low_B), jnp.where(is_enough_B, high_B, middle_B)

    low_B = jax.lax.bitcast_convert_type(low_B, jnp.int32)
    above_one = np.float32(1).view(np.int32) + 1  # no weight exceeds 1
    low_B, _ = jax.lax.while_loop(is_open, halve, (low_B, jnp.full_like(low_B, above_one)))
    return jax.lax.bitcast_convert_type(low_B, jnp.float32)


# The search


def _inverse_cdf(values_BNM, weigh, uniforms_B) -> tuple[jax.Array, jax.Array]:
    """(tokens_B, total_B): the token at which the running sum of the weights passes u * total.

    `weigh` turns values into weights, anew for the one block that is searched: storing every
    weight costs more. A token without weight is never taken, also where rounding puts u * total at
    the very end of its block or of the row: then the last token with a weight is.
    """
    sums_BN = jnp.sum(weigh(values_BNM), axis=-1)
    running_BN = jnp.cumsum(sums_BN, axis=-1)
    total_B = running_BN[:, -1]
    target_B = uniforms_B * total_B
    block_B = _first_beyond(running_BN, sums_BN, target_B)
    before_BN = jnp.pad(running_BN[:, :-1], ((0, 0), (1, 0)))
    rest_B = target_B - _take(before_BN, block_B)
    weights_BM = weigh(_take(values_BNM, block_B))
    offset_B = _first_beyond(jnp.cumsum(weights_BM, axis=-1), weights_BM, rest_B)
    return block_B * values_BNM.shape[2] + offset_B, total_B


def _first_beyond(running_BN, weights_BN, target_B) -> jax.Array:
    """The first index with a weight whose running sum exceeds the target, else the last with one.

    The weight is asked for because a parallel running sum can rise, by rounding, at a zero.
    """
    num = weights_BN.shape[1]
    index_1N = jnp.arange(num, dtype=jnp.int32)[None, :]
    has_weight_BN = weights_BN > 0
    is_beyond_BN = has_weight_BN & (running_BN > target_B[:, None])
    first_B = jnp.min(jnp.where(is_beyond_BN, index_1N, num), axis=1)
    last_B = jnp.max(jnp.where(has_weight_BN, index_1N, 0), axis=1)
    return jnp.minimum(first_B, last_B)


def _take(values_BN_, index_B) -> jax.Array:
    """The entry (or the row) at each row's own index."""
    return jnp.take_along_axis(values_BN_, _align(index_B, values_BN_), axis=1)[:, 0]


def _blocks(logits_BV) -> jax.Array:
    """[B, V] -> [B, N, M], padded by impossible tokens where the blocks do not divide V."""
    num_tokens = logits_BV.shape[1]
    num_blocks = min(NUM_BLOCKS, num_tokens)
    missing = -num_tokens % num_blocks
    if missing:
        logits_BV = jnp.pad(logits_BV, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    return logits_BV.reshape(logits_BV.shape[0], num_blocks, -1)


def _align(values_B, like) -> jax.Array:
    """[B] -> [B, 1, ...] of as many axes as `like` has."""
    return jnp.expand_dims(values_B, range(1, like.ndim))


def _sum(values_BNM) -> jax.Array:
    return jnp.sum(jnp.sum(values_BNM, axis=-1), axis=-1)
