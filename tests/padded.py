"""Scores of groups of padded completions, through the packed forward pass, one in a bin of its own.

A bin's inputs are the prompt's last token and all but the last of the completion.
"""

import jax.numpy as jnp

from rl.models.packed import Packed
from rl.models.scoring import completion_hidden
from rl.models.scoring import completion_logprobs as packed_logprobs
from rl.models.transformer import network


def pad_to_bins(prompt_tokens_PT, prompt_lengths_P, completion_tokens_PGT):
    """Each completion alone in a bin, its padding too: masks say what counts."""
    prompts, lengths = jnp.asarray(prompt_tokens_PT), jnp.asarray(prompt_lengths_P)
    completions = jnp.asarray(completion_tokens_PGT)
    _, G, T = completions.shape
    last_PG1 = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)[:, None].repeat(G, axis=1)
    positions_P1T = (lengths - 1)[:, None, None] + jnp.arange(T)[None, None, :]
    return Packed(
        prompt_tokens_PS=prompts[:, :-1],
        prompt_lengths_P=lengths - 1,
        inputs_PBT=jnp.concatenate([last_PG1, completions[:, :, :-1]], axis=2),
        targets_PBT=completions,
        positions_PBT=jnp.broadcast_to(positions_P1T, completions.shape),
        segments_PBT=jnp.zeros(completions.shape, int),
    )


def completion_logprobs(
    spec,
    trainable,
    frozen,
    prompt_tokens_PT,
    prompt_lengths_P,
    completion_tokens_PGT,
    completion_lengths_PG,
    temperature,
    num_shared=0,
    **options,
):
    """(logprobs_PGT, entropy_PGT); 0 on padding."""
    packed = pad_to_bins(prompt_tokens_PT, prompt_lengths_P, completion_tokens_PGT)
    scores = packed_logprobs(spec, trainable, frozen, packed, temperature, num_shared, **options)
    T = completion_tokens_PGT.shape[2]
    mask_PGT = jnp.arange(T)[None, None, :] < jnp.asarray(completion_lengths_PG)[:, :, None]
    return tuple(jnp.where(mask_PGT, score_PGT, 0.0) for score_PGT in scores)


def next_token_logits(spec, trainable, frozen, prompt_tokens_PT, prompt_lengths_P):
    """logits_PV of what follows each prompt."""
    places_P11 = jnp.zeros((len(prompt_lengths_P), 1, 1), int)
    packed = pad_to_bins(prompt_tokens_PT, prompt_lengths_P, places_P11)
    hidden_PBTD = completion_hidden(spec, trainable, frozen, packed)
    return network(spec, trainable, frozen).logits(hidden_PBTD[:, 0, 0])
