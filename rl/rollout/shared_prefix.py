"""Compute what all prompts of a batch begin with once: a few-shot preamble, a system prompt."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rl.models.spec import ModelSpec, Parameters
from rl.models.transformer import Cache, _attend_groups, _last, _network, prefill

PREFIX_MULTIPLE = 8
"""The shared length is rounded down to it, so that like batches compile the same shapes."""


def num_shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens to compute once, each prompt keeping at least one of its own."""
    if len(prompts) < 2:
        return 0
    most = min(len(prompt) for prompt in prompts) - 1
    heads = np.array([prompt[:most] for prompt in prompts])
    is_same_T = (heads == heads[:1]).all(axis=0)
    num_same = most if is_same_T.all() else int(is_same_T.argmin())
    return num_same // PREFIX_MULTIPLE * PREFIX_MULTIPLE


def prefill_after(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    prompt_tokens_PT: jax.Array,
    prompt_lengths_P: jax.Array,
    num_shared: int,
) -> tuple[jax.Array, Cache]:
    """`prefill`, with the first `num_shared` tokens, the same in all prompts, computed once.

    The prefix is to the prompts what a prompt is to its group's completions, so it runs as one.
    """
    if not num_shared:
        return prefill(spec, trainable, frozen, prompt_tokens_PT, prompt_lengths_P)
    own_tokens_PT = prompt_tokens_PT[:, num_shared:]
    P, T = own_tokens_PT.shape
    attend_groups = _attend_groups((1, num_shared), (1, P, T), jnp.full(1, num_shared, jnp.int32))

    def whole(x_NKC):
        shared_TKC, own_N_KC = x_NKC[:num_shared], x_NKC[num_shared:]
        shared_PTKC = jnp.broadcast_to(shared_TKC[None], (P, *shared_TKC.shape))
        return jnp.concatenate([shared_PTKC, own_N_KC.reshape(P, T, *x_NKC.shape[1:])], axis=1)

    def attend(query_NHC, key_NKC, value_NKC, _):
        output_NHC, _ = attend_groups(query_NHC, key_NKC, value_NKC, None)
        key_PTKC, value_PTKC = whole(key_NKC), whole(value_NKC)
        return output_NHC, (key_PTKC.transpose(0, 2, 3, 1), value_PTKC.transpose(0, 2, 1, 3))

    network = _network(spec, trainable, frozen)
    own_positions_PT = jnp.broadcast_to(num_shared + jnp.arange(T)[None, :], (P, T))
    positions_N = jnp.concatenate([jnp.arange(num_shared), own_positions_PT.reshape(-1)])
    tokens_N = jnp.concatenate([prompt_tokens_PT[0, :num_shared], own_tokens_PT.reshape(-1)])
    no_caches = [None] * spec.config.num_hidden_layers
    hidden_ND, cache = network.hidden(tokens_N, positions_N, attend, no_caches)
    own_PTD = hidden_ND[num_shared:].reshape(P, T, -1)
    return network.logits(_last(own_PTD, prompt_lengths_P - num_shared)), cache
