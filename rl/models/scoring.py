"""What a network says of packed completions: hidden states, and from them log-probabilities."""

import jax
import jax.numpy as jnp

from rl.models.packed import Packed, attend_packed, flat_tokens, num_prompt_tokens
from rl.models.spec import ModelSpec, Parameters
from rl.models.token_scores import token_scores
from rl.models.transformer import network


def completion_hidden(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    packed: Packed,
    num_shared: int = 0,
    is_rematerialised: bool = False,
) -> jax.Array:
    """hidden_PBTD: the normalised last hidden state in each place, which predicts its target.

    num_shared: how many first tokens are the same in all prompts. `is_rematerialised`: layers keep
    their input alone for the backward pass, and are computed once more in it.
    """
    return _hidden(network(spec, trainable, frozen), packed, num_shared, is_rematerialised)


def completion_logprobs(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    packed: Packed,
    temperature: jax.Array | float,
    num_shared: int = 0,
    is_rematerialised: bool = False,
    is_entropy_fixed: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(logprobs_PBT, entropy_PBT), float32, of softmax(logits / temperature): finite on padding.

    The entropy is that of the whole distribution a token was drawn from, in nats; without a
    gradient of its own where `is_entropy_fixed`. Temperature 0 (greedy decoding) scores at
    temperature 1. The rest is as in `completion_hidden`.
    """
    model = network(spec, trainable, frozen)
    hidden_PBTD = _hidden(model, packed, num_shared, is_rematerialised)
    temperature = jnp.asarray(temperature, jnp.float32)
    kernel, width_axis = model.head()
    scores = token_scores(
        width_axis,
        is_entropy_fixed,
        spec.config.final_logit_softcapping,
        hidden_PBTD.reshape(-1, hidden_PBTD.shape[-1]),
        kernel,
        packed.targets_PBT.reshape(-1),
        jnp.where(temperature > 0, temperature, 1.0),
    )
    return tuple(score_N.reshape(packed.targets_PBT.shape) for score_N in scores)


def completion_values(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    packed: Packed,
    num_shared: int = 0,
    is_rematerialised: bool = False,
) -> jax.Array:
    """values_PBT, float32: what a value head says of the state in each place, before its target;
    finite on padding. The rest is as in `completion_hidden`."""
    model = network(spec, trainable, frozen)
    hidden_PBTD = _hidden(model, packed, num_shared, is_rematerialised)
    values_N = model.values(hidden_PBTD.reshape(-1, hidden_PBTD.shape[-1]))
    return values_N.reshape(packed.targets_PBT.shape)


def _hidden(model, packed: Packed, num_shared: int, is_rematerialised: bool) -> jax.Array:
    hidden_ND, _ = model.hidden(
        *flat_tokens(packed, num_shared),
        attend_packed(packed, num_shared),
        [None] * model.config.num_hidden_layers,
        num_prompt_tokens(packed, num_shared),
        is_rematerialised,
    )
    return hidden_ND.reshape(*packed.inputs_PBT.shape, -1)
