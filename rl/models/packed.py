"""Completions packed for scoring: how they lie in memory, and who attends to whom.

A group's prompt is computed once for all of its completions, and what all prompts begin with once
for all groups. Several completions of a group share a bin, one after the other, each seeing its
prompt and its own tokens only. What is fed in a place is the token before the one that the hidden
state there predicts: the prompt's last token is fed once for each completion, and not with the
prompt.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl.models.attention import Attend, attend_blocks


class Packed(NamedTuple):
    """P prompts with B bins of T places each, int32.

    prompt_tokens_PS: each prompt without its last token, right-padded; the first `num_shared` are
        the same in all prompts.
    prompt_lengths_P: how many of them are real, from `num_shared` to S.
    inputs_PBT, targets_PBT: the token that is fed in each place, and the one it predicts.
    positions_PBT: where the fed token stands in its sequence, prompt and completion.
    segments_PBT: which completion of its bin a place belongs to; on padding a number of no
        completion.
    """

    prompt_tokens_PS: jax.Array
    prompt_lengths_P: jax.Array
    inputs_PBT: jax.Array
    targets_PBT: jax.Array
    positions_PBT: jax.Array
    segments_PBT: jax.Array


def flat_tokens(packed: Packed, num_shared: int) -> tuple[jax.Array, jax.Array]:
    """(tokens_N, positions_N) in the order in which they go through the layers: what all prompts
    share, the rest of each prompt, the bins."""
    P, S = packed.prompt_tokens_PS.shape
    positions_S = jnp.arange(S)
    own_PS = jnp.broadcast_to(positions_S[None, num_shared:], (P, S - num_shared))
    prompts_PS = packed.prompt_tokens_PS
    tokens = prompts_PS[0, :num_shared], prompts_PS[:, num_shared:], packed.inputs_PBT
    positions = positions_S[:num_shared], own_PS, packed.positions_PBT
    return tuple(jnp.concatenate([x.reshape(-1) for x in part]) for part in (tokens, positions))


def num_prompt_tokens(packed: Packed, num_shared: int) -> int:
    """How many of the flat tokens are prompts'; padding counts."""
    P, S = packed.prompt_tokens_PS.shape
    return num_shared + P * (S - num_shared)


SHARED, PROMPTS, BINS = range(3)
"""The kinds of tokens; each attends to its own kind and to those before it."""


def attend_packed(packed: Packed, num_shared: int) -> Attend:
    """The attention of `flat_tokens`, or of their bins' queries alone; there is no cache."""
    P, B, T = packed.inputs_PBT.shape
    S = packed.prompt_tokens_PS.shape[1]
    query_shapes = (1, 1, num_shared), (P, 1, S - num_shared), (P, B, T)
    key_shapes = (num_shared,), (P, S - num_shared), (P, B, T)
    ends = num_shared, num_prompt_tokens(packed, num_shared)
    kinds = [kind for kind in (SHARED, PROMPTS, BINS) if query_shapes[kind][2]]

    def attend(query_NHC, key_NKC, value_NKC, cache, attention):
        K, H, C = key_NKC.shape[1], *query_NHC.shape[1:]
        keys, values = (
            [
                jnp.moveaxis(x.reshape(*shape, K, C), -2, 0)
                for x, shape in zip(jnp.split(x_NKC, ends), key_shapes, strict=True)
            ]
            for x_NKC in (key_NKC, value_NKC)
        )
        is_whole = query_NHC.shape[0] == key_NKC.shape[0]
        queries = jnp.split(query_NHC, ends) if is_whole else [None, None, query_NHC]
        outputs = []
        for kind in kinds if is_whole else [BINS]:
            seen = [other for other in kinds if other <= kind]
            query = queries[kind].reshape(*query_shapes[kind], K, H // K, C) * C**-0.5
            output_KPBRTC = attend_blocks(
                query.transpose(3, 0, 1, 4, 2, 5),
                [keys[other] for other in seen],
                [values[other] for other in seen],
                [_mask(packed, num_shared, kind, other, attention.window) for other in seen],
                attention.soft_cap,
            )
            outputs.append(output_KPBRTC.transpose(1, 2, 4, 0, 3, 5).reshape(-1, H, C))
        return jnp.concatenate(outputs), cache

    return attend


def _mask(packed: Packed, num_shared: int, kind: int, other: int, window: int | None):
    """Which tokens of one kind see which of another, bool [P, B, T, S] or broadcasting to it; None
    where all see all."""
    S = packed.prompt_tokens_PS.shape[1]
    positions_S = jnp.arange(S)[None, None, :]
    positions = positions_S[..., :num_shared], positions_S[..., num_shared:], packed.positions_PBT
    distance = positions[kind][..., :, None] - positions[other][..., None, :]
    tests = []
    if kind == other:
        tests.append(distance >= 0)
    if window is not None:
        tests.append(distance < window)
    if (kind, other) == (BINS, PROMPTS):
        lengths = packed.prompt_lengths_P[:, None, None, None]
        tests.append(positions[PROMPTS][..., None, :] < lengths)
    if (kind, other) == (BINS, BINS):
        segments = packed.segments_PBT
        tests.append(segments[..., :, None] == segments[..., None, :])
    return functools.reduce(jnp.logical_and, tests) if tests else None
