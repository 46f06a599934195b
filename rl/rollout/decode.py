"""The compiled programs of a rollout: prefill chunks of prompts, copy pages, decode some tokens.

Where the mesh has several row shards, each a replica with a pool of its own, every array of rows,
chunks or pages leads with the shards' axis.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl.models.spec import ModelSpec, Parameters
from rl.models.transformer import network
from rl.rollout.attention.backends import Backend, Places
from rl.rollout.attention.pool import LayerPool
from rl.rollout.attention.scores import (
    grouped,
    is_seen,
    masked_scores,
    part_of_softmax,
    weighted,
)
from rl.rollout.pages import TRASH
from rl.rollout.sampling import Bans, SamplingNumbers, sample_tokens
from rl.sharding import by_row_shard, constrain, gathered, num_row_shards

MAX_STEPS = 8
"""Most decode steps of one dispatch. How many are taken is a number, not a shape."""


class Draws(NamedTuple):
    """Sampled tokens and their log-probabilities, whole and truncated, all of one shape."""

    tokens: jax.Array
    logprobs: jax.Array
    sampling_logprobs: jax.Array


class Rows(NamedTuple):
    """One sample a row. A row without a sample has nothing left to draw."""

    tokens_B: jax.Array  # the last token there is
    num_drawn_B: jax.Array  # completion tokens there are
    num_left_B: jax.Array  # that it may still draw
    places: Places


class Chunks(NamedTuple):
    """Consecutive tokens of prompts, right-padded."""

    tokens_RT: jax.Array
    lengths_R: jax.Array
    position_R: jax.Array  # of each chunk's first token
    table_RN: jax.Array  # the pages of all its tokens and those before


@functools.partial(jax.jit, static_argnames=("spec", "backend", "num_pages", "page_size"))
def empty_pools(
    spec: ModelSpec, backend: Backend, num_pages: int, page_size: int
) -> list[LayerPool]:
    """A pool for each layer, of so many pages in each replica."""

    def make(_):
        layers = range(spec.config.num_hidden_layers)
        return [backend.pool.empty(spec, num_pages, page_size) for _ in layers]

    return _laid_out(backend, by_row_shard(make, jnp.zeros(num_row_shards())))


@functools.partial(jax.jit, static_argnames=("spec", "backend"), donate_argnames=("pools",))
def prefill(
    spec: ModelSpec,
    backend: Backend,
    trainable: Parameters,
    frozen: Parameters,
    pools: list[LayerPool],
    chunks: Chunks,
) -> tuple[list[LayerPool], jax.Array]:
    """Put keys and values of the chunks' tokens into their pages; also returns hidden_RD, the
    normalised last hidden state of each chunk's last token.

    In each layer all chunks write before any reads, so that one may continue another.
    """

    def compute(of_shard):
        pools, chunks = of_shard
        R, T = chunks.tokens_RT.shape
        positions_RT = chunks.position_R[:, None] + jnp.arange(T)[None, :]
        model = network(spec, trainable, frozen)
        attend = _attend_chunks(backend, chunks, positions_RT)
        tokens_N, positions_N = chunks.tokens_RT.reshape(-1), positions_RT.reshape(-1)
        hidden_ND, pools = model.hidden(tokens_N, positions_N, attend, pools)
        last_N = jnp.arange(R) * T + jnp.maximum(chunks.lengths_R - 1, 0)
        return pools, hidden_ND[last_N]

    trainable, frozen = gathered(trainable), gathered(frozen)
    pools, hidden_RD = by_row_shard(compute, (pools, _spread(chunks)))
    return _laid_out(backend, pools), constrain(hidden_RD)


@functools.partial(jax.jit, static_argnames="spec")
def draw_first(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    hidden_BD: jax.Array,
    uniforms_B: jax.Array,
    sampling: SamplingNumbers,
    bans: Bans | None,
) -> Draws:
    """The first token of completions, from the hidden states of their prompts' last tokens."""
    logits_BV = network(spec, trainable, frozen).logits(constrain(hidden_BD, "rows"))
    banned = None if bans is None else bans.at(jnp.zeros(len(uniforms_B), jnp.int32))
    draws = sample_tokens(constrain(logits_BV, "rows"), uniforms_B, sampling, banned)
    return Draws(*map(constrain, draws))


@functools.partial(jax.jit, static_argnames="backend", donate_argnames="pools")
def copy_pages(
    backend: Backend, pools: list[LayerPool], sources_M: jax.Array, targets_M: jax.Array
) -> list[LayerPool]:
    """Each target page becomes what its source is."""

    def copy(of_shard):
        pools, sources_M, targets_M = of_shard
        return [backend.pool.copy(pool, sources_M, targets_M) for pool in pools]

    return _laid_out(backend, by_row_shard(copy, (pools, *_spread((sources_M, targets_M)))))


@functools.partial(jax.jit, static_argnames=("spec", "backend"), donate_argnames=("pools",))
def decode(
    spec: ModelSpec,
    backend: Backend,
    trainable: Parameters,
    frozen: Parameters,
    pools: list[LayerPool],
    rows: Rows,
    uniforms_NB: jax.Array,
    sampling: SamplingNumbers,
    bans: Bans | None,
    eos_ids: jax.Array,
    num_steps: jax.Array | int,
) -> tuple[list[LayerPool], Draws, jax.Array]:
    """Feed every row's last token, and draw up to `num_steps` more a row.

    `uniforms_NB` decide them, of MAX_STEPS tokens a row. Returns the pools, Draws of the same shape
    and how many steps were taken: fewer than `num_steps` where every row has ended before, by an
    end-of-text token or for having none left.
    """
    trainable, frozen = gathered(trainable), gathered(frozen)
    rows = _spread(rows)

    def begin(of_shard):
        pools, rows = of_shard
        return backend.begin(pools, rows.places, MAX_STEPS)

    caches = by_row_shard(begin, (pools, rows))

    def is_open(state):
        taken, _, _, has_ended_B, _ = state
        return (taken < num_steps) & ~jnp.all(has_ended_B)

    def step(state):
        taken, caches, tokens_B, has_ended_B, outputs = state

        def advance(of_shard):
            caches, rows, tokens_B, uniforms_B = of_shard
            model = network(spec, trainable, frozen)
            attend = backend.attend(rows.places, taken, MAX_STEPS)
            position_B = rows.places.position_B + taken
            hidden_BD, caches = model.hidden(tokens_B, position_B, attend, caches)
            # Each replica draws from whole rows: a search in a split vocabulary would wait.
            logits_BV = constrain(model.logits(hidden_BD))
            banned = None if bans is None else bans.at(rows.num_drawn_B + taken)
            draws = Draws(*sample_tokens(logits_BV, uniforms_B, sampling, banned))
            is_end_B = jnp.any(draws.tokens[:, None] == eos_ids[None, :], axis=1)
            return caches, draws, is_end_B | (taken + 1 >= rows.num_left_B)

        caches, draws, ends_B = by_row_shard(
            advance, (caches, rows, tokens_B, _spread(uniforms_NB[taken]))
        )
        outputs = Draws(
            *(all_.at[taken].set(new) for all_, new in zip(outputs, draws, strict=True))
        )
        return taken + 1, caches, draws.tokens, has_ended_B | ends_B, outputs

    shape = (MAX_STEPS, *rows.tokens_B.shape)
    blank = Draws(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(shape))
    state = (jnp.int32(0), caches, rows.tokens_B, rows.num_left_B <= 0, blank)
    taken, caches, _, _, outputs = jax.lax.while_loop(is_open, step, state)

    def end(of_shard):
        pools, caches, rows = of_shard
        return backend.end(pools, caches, rows.places, MAX_STEPS)

    pools = _laid_out(backend, by_row_shard(end, (pools, caches, rows)))
    # On every device, so that each process of the mesh can read all of it.
    return pools, Draws(*map(constrain, outputs)), constrain(taken)


def _attend_chunks(backend: Backend, chunks: Chunks, positions_RT: jax.Array):
    R, T = positions_RT.shape

    def attend(query_NHC, key_NKC, value_NKC, pool, kind):
        page_size = backend.pool.page_size(pool)
        is_token_RT = jnp.arange(T)[None, :] < chunks.lengths_R[:, None]
        pages_RT = jnp.take_along_axis(chunks.table_RN, positions_RT // page_size, axis=1)
        pages_N = jnp.where(is_token_RT, pages_RT, TRASH).reshape(-1)
        slots_N = (positions_RT % page_size).reshape(-1)
        pool = backend.pool.write(pool, key_NKC, value_NKC, pages_N, slots_N)
        key_RKCS, value_RKSC = backend.pool.read(pool, chunks.table_RN)
        query = grouped(query_NHC.reshape(R, T, *query_NHC.shape[1:]), key_NKC.shape[1])
        query_RKGTC = query.transpose(0, 2, 3, 1, 4)
        positions_S = jnp.arange(key_RKCS.shape[3])
        mask_RTS = is_seen(positions_RT[:, :, None], positions_S[None, None, :], kind)
        mask = mask_RTS[:, None, None]
        scores = masked_scores("rkgtc,rkcs->rkgts", query_RKGTC, key_RKCS, mask, kind)
        weights, total, _ = part_of_softmax(scores)
        output_RKGTC = weighted("rkgts,rksc->rkgtc", weights / total, value_RKSC)
        output = output_RKGTC.transpose(0, 3, 1, 2, 4)
        return output.astype(query_NHC.dtype).reshape(query_NHC.shape), pool

    return attend


def _spread(tree: Any) -> Any:
    """Arrays with the shards' axis in front, laid out over the row shards."""
    if num_row_shards() == 1:
        return tree
    return jax.tree.map(lambda array: constrain(array, "rows"), tree)


def _laid_out(backend: Backend, pools: list[LayerPool]) -> list[LayerPool]:
    """Pools with their replicas and their kv heads spread over the mesh."""
    axes = backend.pool.AXES
    if num_row_shards() > 1:
        axes = ("rows", *axes)
    return jax.tree.map(lambda array: constrain(array, *axes), pools)
