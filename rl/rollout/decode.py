"""The two compiled programs of a rollout: compute the prompts, and decode some tokens a row."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl.models.spec import ModelSpec, Parameters
from rl.models.transformer import (
    Cache,
    constrain_cache,
    decode_logits,
    empty_own_cache,
    prefill,
)
from rl.rollout.batching import prompt_slots
from rl.rollout.sampling import SamplingNumbers, sample_tokens
from rl.sharding import by_row_shard, constrain, gathered, merge_rows, split_rows

MAX_STEPS = 8
"""Most decode steps of one dispatch. How many are taken is a number, not a shape."""


class Draws(NamedTuple):
    """Sampled tokens and their log-probabilities, whole and truncated, all of one shape."""

    tokens: jax.Array
    logprobs: jax.Array
    sampling_logprobs: jax.Array


class Prefilled(NamedTuple):
    """What stays on the device from a batch's prompts."""

    cache: Cache
    lengths_P: jax.Array


@functools.partial(jax.jit, static_argnames=("spec", "num_shared"))
def start(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    prompt_tokens_PT: jax.Array,
    prompt_lengths_P: jax.Array,
    uniforms_PG: jax.Array,
    sampling: SamplingNumbers,
    num_shared: int,
) -> tuple[Prefilled, Draws]:
    """Compute each prompt once, and once only the first tokens that all share; draw every row's
    first token: Draws of [P, G].
    """
    trainable, frozen = gathered(trainable), gathered(frozen)

    def compute(prompts):
        return prefill(spec, trainable, frozen, *prompts, num_shared)

    prompts = split_rows((prompt_tokens_PT, prompt_lengths_P))
    logits_PV, cache = merge_rows(by_row_shard(compute, prompts))
    P, G = uniforms_PG.shape
    logits_PGV = jnp.broadcast_to(logits_PV[:, None, :], (P, G, logits_PV.shape[1]))
    draws = _draw(logits_PGV, uniforms_PG, sampling)
    lengths_P = constrain(prompt_lengths_P, "rows")
    return Prefilled(constrain_cache(_padded(cache)), lengths_P), _for_host(draws)


@functools.partial(jax.jit, static_argnames="spec", donate_argnames=("own_cache",))
def decode(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    prefilled: Prefilled,
    own_cache: Cache,
    uniforms_NPG: jax.Array,
    sampling: SamplingNumbers,
    eos_ids: jax.Array,
    tokens_PG: jax.Array,
    is_finished_PG: jax.Array,
    index: jax.Array | int,
    num_steps: jax.Array | int,
) -> tuple[Cache, Draws, jax.Array]:
    """Feed `tokens_PG`, each row's token number `index`, and draw up to `num_steps` more.

    `uniforms_NPG` has numbers for MAX_STEPS tokens. Returns the own cache, Draws of the same shape
    and how many steps were taken: fewer than `num_steps` where every row is finished before, as
    given or by an end-of-text token.
    """
    trainable, frozen = gathered(trainable), gathered(frozen)
    tokens_PG, is_finished_PG = constrain(tokens_PG, "rows"), constrain(is_finished_PG, "rows")
    shape = (MAX_STEPS, *tokens_PG.shape)
    blank = Draws(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(shape))

    def is_open(state):
        taken, _, _, is_finished_PG, _ = state
        return (taken < num_steps) & ~jnp.all(is_finished_PG)

    def step(state):
        taken, own_cache, tokens_PG, is_finished_PG, outputs = state
        logits_PGV, own_cache = decode_logits(
            spec,
            trainable,
            frozen,
            prefilled.cache,
            prefilled.lengths_P,
            own_cache,
            tokens_PG,
            index + taken,
        )
        draws = _draw(logits_PGV, uniforms_NPG[taken], sampling)
        is_end_PG = jnp.any(draws.tokens[:, :, None] == eos_ids[None, None, :], axis=-1)
        outputs = Draws(
            *(all_.at[taken].set(new) for all_, new in zip(outputs, draws, strict=True))
        )
        return taken + 1, own_cache, draws.tokens, is_finished_PG | is_end_PG, outputs

    state = (jnp.int32(0), own_cache, tokens_PG, is_finished_PG, blank)
    taken, own_cache, _, _, outputs = jax.lax.while_loop(is_open, step, state)
    return own_cache, _for_host(outputs), constrain(taken)


empty = jax.jit(empty_own_cache, static_argnums=(0, 1, 2, 3))


@functools.partial(jax.jit, static_argnames=("spec", "num_slots"))
def grow(spec: ModelSpec, own_cache: Cache, num_slots: int) -> Cache:
    """The same own cache with room for more tokens a row."""
    P, G = own_cache[0][0].shape[:2]
    larger = empty_own_cache(spec, P, G, num_slots)
    return constrain_cache(
        jax.tree.map(
            lambda to, old: jax.lax.dynamic_update_slice(to, old, (0,) * 5), larger, own_cache
        )
    )


@jax.jit
def compact(
    prefilled: Prefilled, own_cache: Cache, prompts_B: jax.Array, members_B: jax.Array
) -> tuple[Prefilled, Cache]:
    """The chosen rows alone, as [B, 1] groups of one, each with its own copy of its prompt."""
    cache = jax.tree.map(lambda values_P: values_P[prompts_B], prefilled.cache)
    own_cache = jax.tree.map(lambda values_PG: values_PG[prompts_B, members_B][:, None], own_cache)
    lengths_B = constrain(prefilled.lengths_P[prompts_B], "rows")
    return Prefilled(constrain_cache(cache), lengths_B), constrain_cache(own_cache)


def _padded(cache: Cache) -> Cache:
    """A prompt cache of one of few sizes; attention leaves out what is beyond a prompt's length."""
    num_tokens = cache[0][0].shape[-1]
    ends = (0, prompt_slots(num_tokens) - num_tokens)
    none = (0, 0)
    return [
        (jnp.pad(key, (none, none, none, ends)), jnp.pad(value, (none, none, ends, none)))
        for key, value in cache
    ]


def _draw(logits_PGV, uniforms_PG, sampling) -> Draws:
    # Each replica draws from whole rows: a search in a split vocabulary would wait for others.
    logits_PG_V = constrain(logits_PGV.reshape(-1, logits_PGV.shape[-1]), "rows")
    draws = sample_tokens(logits_PG_V, uniforms_PG.reshape(-1), sampling)
    return Draws(*(values_PG.reshape(uniforms_PG.shape) for values_PG in draws))


def _for_host(draws: Draws) -> Draws:
    """On every device, so that each process of the mesh can read all of it."""
    return Draws(*map(constrain, draws))
