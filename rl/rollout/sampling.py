"""Draw a token from each row of logits, and say how likely it was.

1. Ids that a row may not draw lose their logits.
2. Logits become weights: probabilities relative to the most probable token's.
3. Top-k, top-p and min-p are one threshold on the weights, found by bisection on their float bits:
   nothing is sorted, and tokens that tie at the threshold are all kept.
4. One uniform number decides the token, by inverse CDF in two levels: the weights are summed by
   blocks, the block that the number falls into is found, then the token in it. The sums give the
   log-probability for free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl.errors import MeshdialError
from rl.rollout.truncation import add_up, align, keep_from, least_weight
from rl.sharding import constrain

NUM_BLOCKS = 64  # of the two-level search; a vocabulary that does not divide is padded
NUM_UNIFORMS = 512  # of one call: a program for each number of rows would compile for a second
ALWAYS = 2**31 - 1  # more tokens than any completion has


Kind = Literal["greedy", "whole", "truncated"]
"""Ways to draw a token: the likeliest, from all, from what truncation left."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingNumbers:
    """What the compiled sampler reads of a SamplingConfig: numbers, so that a sweep compiles once,
    and the way to draw, so that no program has to have all three."""

    temperature: float | jax.Array
    top_k: int | jax.Array
    top_p: float | jax.Array
    min_p: float | jax.Array
    kind: Kind = field(metadata={"static": True})


class Banned(NamedTuple):
    """Ids, each named once, and the rows that may not draw them."""

    ids_N: jax.Array
    is_banned_BN: jax.Array


class Bans(NamedTuple):
    """Ids, each named once, that a completion may not draw while it has fewer than least_N tokens.

    Of few lengths: filled up with an id that is not banned at all.
    """

    ids_N: np.ndarray
    least_N: np.ndarray

    def at(self, num_tokens_B: jax.Array) -> Banned:
        """For rows that have so many tokens."""
        return Banned(self.ids_N, num_tokens_B[:, None] < self.least_N[None, :])


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are sampled.

    max_tokens: most tokens of a completion. temperature: 0 is greedy. top_k: 0 is off.
    top_p: 1 is off. min_p: 0 is off. stop: texts that end a completion. min_tokens: so many tokens
    come before an end-of-text token or the end of a stop text. forbidden_ids: tokens that are never
    drawn. time_limit_s: seconds until a sample ends with what it has; None for no limit. eos_ids:
    tokens that end a completion; None for the tokenizer's.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    forbidden_ids: tuple[int, ...] = ()
    time_limit_s: float | None = None
    eos_ids: tuple[int, ...] | None = None

    def __post_init__(self):
        time_limit = float("inf") if self.time_limit_s is None else self.time_limit_s
        bounds = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            "min_p": (0 <= self.min_p <= 1, "from 0 (off) to 1"),
            "stop": (all(self.stop), "no empty text"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, "0 (off) to max_tokens"),
            "forbidden_ids": (all(i >= 0 for i in self.forbidden_ids), "ids of 0 or more"),
            "time_limit_s": (time_limit > 0, "more than 0, or None (off)"),
            "eos_ids": (all(i >= 0 for i in self.eos_ids or ()), "ids of 0 or more"),
        }
        for name, (is_legal, expected) in bounds.items():
            if not is_legal:
                found = getattr(self, name)
                raise MeshdialError(f"sampling: {name} is {found!r}, expected {expected}")

    @property
    def kind(self) -> Kind:
        has_threshold = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return "greedy" if self.temperature == 0 else "truncated" if has_threshold else "whole"

    @property
    def is_truncating(self) -> bool:
        """Whether tokens are sampled from less than the whole distribution."""
        has_bans = self.min_tokens > 0 or bool(self.forbidden_ids)
        return has_bans or self.kind == "truncated"

    @property
    def numbers(self) -> SamplingNumbers:
        return SamplingNumbers(
            np.float32(self.temperature),
            np.int32(min(self.top_k, 2**31 - 1)),
            np.float32(self.top_p),
            np.float32(self.min_p),
            self.kind,
        )

    def ends(self, tokenizer_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids that end a completion, where these are the tokenizer's."""
        return tuple(tokenizer_ids if self.eos_ids is None else self.eos_ids)

    def bans(self, tokenizer_ids: Sequence[int]) -> Bans | None:
        """What may not be drawn; None where everything may, so that it costs nothing there."""
        ends = self.ends(tokenizer_ids) if self.min_tokens else ()
        least = dict.fromkeys(ends, self.min_tokens)
        least |= dict.fromkeys(self.forbidden_ids, ALWAYS)
        if not least:
            return None
        num_unused = max(8, 2 ** (len(least) - 1).bit_length()) - len(least)
        ids, counts = [*least, *[0] * num_unused], [*least.values(), *[0] * num_unused]
        return Bans(np.array(ids, np.int32), np.array(counts, np.int32))


def check_ids(sampling: SamplingConfig, ends: Sequence[int], vocab_size: int) -> None:
    """Refuses ids beyond the model's vocabulary, and bans of every token of it."""
    whose = {
        "rollout.forbidden_tokens": sampling.forbidden_ids,
        "what ends a completion (rollout.stop_token_ids and the tokenizer's own)": ends,
    }
    for name, ids in whose.items():
        if beyond := [i for i in ids if i >= vocab_size]:
            raise MeshdialError(
                f"{name} has the id {beyond[0]}, expected ids below {vocab_size}, the size of the "
                "model's vocabulary"
            )
    banned = {*sampling.forbidden_ids, *(ends if sampling.min_tokens else ())}
    if len(banned) == vocab_size:
        raise MeshdialError(
            f"rollout.forbidden_tokens leaves none of the {vocab_size} tokens of the model's "
            "vocabulary, expected at least one that does not end the completion"
        )


def sample_tokens(
    logits_BV: jax.Array,
    uniforms_B: jax.Array,
    sampling: SamplingNumbers,
    banned: Banned | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(tokens_B, logprobs_B, sampling_logprobs_B), each token decided by a uniform in [0, 1).

    `logprobs_B` are log softmax(logits / temperature) of the whole vocabulary. Banned ids go first;
    then truncation comes in Hugging Face's order: temperature, top-k, top-p of what top-k left,
    min-p relative to the most probable token; `sampling_logprobs_B` are normalised over what is
    left. At temperature 0 the token is the argmax of what is not banned (the first, in a tie), and
    both are its log-probabilities at temperature 1.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    allowed_BV = logits_BV if banned is None else _without(logits_BV, banned)
    temperature = 1.0 if sampling.kind == "greedy" else sampling.temperature
    peak_B = jnp.max(allowed_BV, axis=-1)

    def weigh(logits):
        """Probabilities relative to the most probable token's, which is exactly 1."""
        return jnp.exp((logits - align(peak_B, logits)) / temperature)

    tokens_B, total_B, kept_B = _draw(_blocks(allowed_BV), weigh, uniforms_B, sampling)
    log_weights_B = (_take(logits_BV, tokens_B) - peak_B) / temperature
    log_total_B = jnp.log(total_B)
    if banned is not None:
        log_banned_B = _log_banned(logits_BV, banned, peak_B, temperature)
        log_total_B = jnp.logaddexp(log_total_B, log_banned_B)
    return tokens_B, log_weights_B - log_total_B, log_weights_B - jnp.log(kept_B)


def _draw(blocks_BNM, weigh, uniforms_B, sampling) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(tokens_B, total_B, kept_B): the sums of all weights, and of those that truncation left."""

    if sampling.kind == "greedy":
        block_B = jnp.argmax(jnp.max(blocks_BNM, axis=-1), axis=-1)
        offset_B = jnp.argmax(_take(blocks_BNM, block_B), axis=-1)
        total_B = add_up(weigh(blocks_BNM))
        return block_B * blocks_BNM.shape[2] + offset_B, total_B, total_B
    if sampling.kind == "whole":
        tokens_B, total_B = _inverse_cdf(blocks_BNM, weigh, uniforms_B)
        return tokens_B, total_B, total_B
    # The barrier: a weight is computed once, so that it is the same wherever it is compared.
    weights_BNM = jax.lax.optimization_barrier(weigh(blocks_BNM))
    least_B = least_weight(weights_BNM, sampling)
    tokens_B, kept_B = _inverse_cdf(weights_BNM, keep_from(least_B), uniforms_B)
    return tokens_B, add_up(weights_BNM), kept_B


def uniforms_at(
    seed: jax.Array,
    iteration: jax.Array,
    prompt_numbers_M: jax.Array,
    samples_M: jax.Array,
    positions_M: jax.Array,
) -> jax.Array:
    """uniforms_M in [0, 1), multiples of 2**-24: the number that decides each token.

    It follows from what the token is, by jax.random.fold_in of (seed, iteration, prompt number,
    sample, position in the completion), each from 0 to 2**32 - 1; not from where it is computed.
    """
    fold_in = jax.random.fold_in
    key = fold_in(jax.random.key(seed, impl="threefry2x32"), iteration)
    keys_M = jax.vmap(fold_in, (None, 0))(key, prompt_numbers_M)
    keys_M = jax.vmap(fold_in)(jax.vmap(fold_in)(keys_M, samples_M), positions_M)
    bits_M = jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys_M)
    return (bits_M >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def draw_uniforms(
    seed: int,
    iteration: int,
    prompt_numbers_M: np.ndarray,
    samples_M: np.ndarray,
    positions_M: np.ndarray,
) -> np.ndarray:
    """uniforms_M of any number of tokens, by one small program."""
    names = np.stack([prompt_numbers_M, samples_M, positions_M]).astype(np.uint32)
    num_parts = -(-names.shape[1] // NUM_UNIFORMS)
    padded = np.zeros((3, num_parts * NUM_UNIFORMS), np.uint32)
    padded[:, : names.shape[1]] = names
    parts = padded.reshape(3, num_parts, NUM_UNIFORMS).swapaxes(0, 1)
    drawn = [_draw_part(np.uint32(seed), np.uint32(iteration), part) for part in parts]
    return np.concatenate(jax.device_get(drawn))[: names.shape[1]]


@jax.jit
def _draw_part(seed, iteration, names):
    return constrain(uniforms_at(seed, iteration, *names))  # each process of a mesh reads them all


# Bans


def _without(logits_BV, banned: Banned) -> jax.Array:
    """The logits with those of banned ids at minus infinity."""
    highest_BN = jnp.where(banned.is_banned_BN, -jnp.inf, jnp.inf)
    # Rows are named too: a scatter of whole columns would transpose the logits and back.
    rows_B1 = jnp.arange(logits_BV.shape[0])[:, None]
    return logits_BV.at[rows_B1, banned.ids_N[None, :]].min(highest_BN)


def _log_banned(logits_BV, banned: Banned, peak_B, temperature) -> jax.Array:
    """The log of the summed weights of what is banned, which may be far above any that is not."""
    logits_BN = (logits_BV[:, banned.ids_N] - peak_B[:, None]) / temperature
    return jax.nn.logsumexp(logits_BN, axis=-1, where=banned.is_banned_BN)


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
    return jnp.take_along_axis(values_BN_, align(index_B, values_BN_), axis=1)[:, 0]


def _blocks(logits_BV) -> jax.Array:
    """[B, V] -> [B, N, M], padded by impossible tokens where the blocks do not divide V."""
    num_tokens = logits_BV.shape[1]
    num_blocks = min(NUM_BLOCKS, num_tokens)
    missing = -num_tokens % num_blocks
    if missing:
        logits_BV = jnp.pad(logits_BV, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    return logits_BV.reshape(logits_BV.shape[0], num_blocks, -1)
