"""Attention over pages in plain XLA: what runs everywhere.

XLA reads no table within a product, so pages are gathered once for the steps of a dispatch: the own
pages of each row, and the full pages of a prompt once for several rows of its group, which attend
to them in one product. Steps append to the gathered copy; at the end what is new goes to the pages.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl.models.spec import AttentionKind
from rl.rollout.attention import pool as pages
from rl.rollout.attention.pool import LayerPool
from rl.rollout.attention.scores import (
    grouped,
    is_seen,
    masked_scores,
    part_of_softmax,
    weighted,
)


class SharedPrompts(NamedTuple):
    """The rows of a dispatch by what they share: U units of up to M rows of one prompt.

    A row that is alone is a unit of its own; unused places of a unit hold any row.
    """

    pages_UN: jax.Array  # the shared pages of each unit, TRASH beyond
    lengths_U: jax.Array  # how many tokens they hold
    rows_UM: jax.Array
    place_B: jax.Array  # of each row, among units times M
    own_pages_BN: jax.Array  # each row's pages after the shared ones
    own_start_B: jax.Array  # position of the first slot there


class Gathered(NamedTuple):
    """What one layer's steps read and write, in place of its pool."""

    shared_key_UKCS: jax.Array
    shared_value_UKSC: jax.Array
    own_key_BKCS: jax.Array  # the last slots are for what the steps append
    own_value_BKSC: jax.Array


def gather(pool: LayerPool, prompts: SharedPrompts, num_steps: int) -> Gathered:
    """The pages of a dispatch, with room for `num_steps` more tokens a row."""
    own_key, own_value = pages.read(pool, prompts.own_pages_BN)
    none = (0, 0)
    return Gathered(
        *pages.read(pool, prompts.pages_UN),
        jnp.pad(own_key, (none, none, none, (0, num_steps))),
        jnp.pad(own_value, (none, none, (0, num_steps), none)),
    )


def append_and_attend(
    query_BHC: jax.Array,
    key_BKC: jax.Array,
    value_BKC: jax.Array,
    gathered: Gathered,
    prompts: SharedPrompts,
    first_position_B: jax.Array,
    number: jax.Array,
    num_steps: int,
    kind: AttentionKind,
) -> tuple[jax.Array, Gathered]:
    """Step `number` of a dispatch whose rows began at `first_position_B`."""
    K = key_BKC.shape[1]
    num_own = gathered.own_key_BKCS.shape[3] - num_steps
    put = jax.lax.dynamic_update_slice_in_dim
    own_key = put(gathered.own_key_BKCS, key_BKC[..., None], num_own + number, axis=3)
    own_value = put(gathered.own_value_BKSC, value_BKC[:, :, None], num_own + number, axis=2)
    query_BKRC = grouped(query_BHC, K)
    position_B = first_position_B + number
    old_S = prompts.own_start_B[:, None] + jnp.arange(num_own)[None, :]
    # A slot of the pages that a step of this dispatch will fill is still empty here.
    old_S = jnp.where(old_S < first_position_B[:, None], old_S, position_B[:, None] + 1)
    positions_BS = jnp.concatenate(
        [old_S, first_position_B[:, None] + jnp.arange(num_steps)[None, :]], axis=1
    )
    mask_BS = is_seen(position_B[:, None], positions_BS, kind)
    scores = masked_scores("bkrc,bkcs->bkrs", query_BKRC, own_key, mask_BS[:, None, None], kind)
    weights, total, maximum = part_of_softmax(scores)
    output = weighted("bkrs,bksc->bkrc", weights, own_value)
    if gathered.shared_key_UKCS.shape[3]:
        part = _attend_shared(query_BKRC, position_B, gathered, prompts, kind)
        output, total = _joined((output, total, maximum), part)
    output_BHC = (output / total).astype(query_BHC.dtype).reshape(query_BHC.shape)
    return output_BHC, gathered._replace(own_key_BKCS=own_key, own_value_BKSC=own_value)


def scatter(
    pool: LayerPool,
    gathered: Gathered,
    table_BN: jax.Array,
    first_position_B: jax.Array,
    num_steps: int,
) -> LayerPool:
    """The pool with what the steps appended."""
    page_size = pages.page_size(pool)
    positions_BT = first_position_B[:, None] + jnp.arange(num_steps)[None, :]
    pages_BT = jnp.take_along_axis(table_BN, positions_BT // page_size, axis=1)
    key_BTKC = gathered.own_key_BKCS[..., -num_steps:].transpose(0, 3, 1, 2)
    value_BTKC = gathered.own_value_BKSC[:, :, -num_steps:].transpose(0, 2, 1, 3)
    flat = (-1, *key_BTKC.shape[2:])
    slots_M = (positions_BT % page_size).reshape(-1)
    return pages.write(
        pool, key_BTKC.reshape(flat), value_BTKC.reshape(flat), pages_BT.reshape(-1), slots_M
    )


def _attend_shared(query_BKRC, position_B, gathered: Gathered, prompts: SharedPrompts, kind):
    """(output, total, maximum) over the shared pages, each [B, K, R, ...]."""
    U, M = prompts.rows_UM.shape
    K, R = query_BKRC.shape[1:3]
    query_UKMRC = query_BKRC[prompts.rows_UM].transpose(0, 2, 1, 3, 4)
    positions_S = jnp.arange(gathered.shared_key_UKCS.shape[3])
    in_prompt_US = positions_S[None, :] < prompts.lengths_U[:, None]
    seen_UMS = is_seen(position_B[prompts.rows_UM][:, :, None], positions_S[None, None, :], kind)
    mask = (seen_UMS & in_prompt_US[:, None, :])[:, None, :, None, :]
    scores = masked_scores("ukmrc,ukcs->ukmrs", query_UKMRC, gathered.shared_key_UKCS, mask, kind)
    weights, total, maximum = part_of_softmax(scores)
    output = weighted("ukmrs,uksc->ukmrc", weights, gathered.shared_value_UKSC)

    def of_rows(values_UKMRX):
        values = values_UKMRX.transpose(0, 2, 1, 3, 4).reshape(U * M, K, R, -1)
        return values[prompts.place_B]

    return of_rows(output), of_rows(total), of_rows(maximum)


def _joined(part, other):
    """(output, total) of two parts of a softmax, which has no masked weight."""
    (output, total, maximum), (other_output, other_total, other_maximum) = part, other
    highest = jnp.maximum(maximum, other_maximum)
    scale, other_scale = jnp.exp(maximum - highest), jnp.exp(other_maximum - highest)
    # Where a part is wholly masked its maximum is MASKED, and its scale 0.
    return (
        output * scale + other_output * other_scale,
        total * scale + other_total * other_scale,
    )
