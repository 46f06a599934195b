"""Draws of the compiled sampler, by the options of a SamplingConfig."""

import jax
import jax.numpy as jnp
import numpy as np

from rl.rollout.sampling import SamplingConfig, sample_tokens

draw = jax.jit(sample_tokens)


def sample(logits_BV, uniforms_B, ends=(), num_tokens=0, **options):
    """The draws of rows that have `num_tokens` (one number, or one a row) already."""
    config = SamplingConfig(max_tokens=9, **options)
    arrays = jnp.asarray(logits_BV, jnp.float32), jnp.asarray(uniforms_B, jnp.float32)
    bans = config.bans(ends)
    num_tokens_B = np.broadcast_to(num_tokens, len(logits_BV))
    banned = None if bans is None else bans.at(num_tokens_B)
    return [np.asarray(result) for result in draw(*arrays, config.numbers, banned)]


def softmax(logits):
    weights = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
