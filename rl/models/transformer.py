"""Pure functions of a flat parameter dict: score completions, prefill prompts, decode a token.

A group's prompt is computed once, and once for all prompts is what they begin with. All these
tokens go through every layer as one list. Prompts are right-padded: their tokens have positions
0 to length - 1, and completion token t has position length + t.
"""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rl.models.attention import attend_cached, attend_groups, attend_prompts
from rl.models.layers import Transformer
from rl.models.spec import ModelConfig, ModelSpec, Parameters
from rl.sharding import constrain, gathered

Cache = list[tuple[jax.Array, jax.Array]]
"""Keys and values of each layer, channels before slots for keys: the order that decodes fastest.

A prompt cache holds [P, K, C, T] and [P, K, T, C], a completions' own cache [P, G, K, C, S] and
[P, G, K, S, C].
"""

MAX_LOGITS = 2**26
"""Logits held at once in `completion_logprobs`: 256 MiB. More are scored in chunks."""


# The parameters


@functools.cache
def _structure(spec: ModelSpec):
    """The network without its parameters, and each parameter's (path in it, shape) by name."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(spec)))
    leaves = nnx.to_flat_state(state)
    return graph, {".".join(map(str, path)): (path, leaf.shape) for path, leaf in leaves}


def _network(spec: ModelSpec, trainable: Parameters, frozen: Parameters) -> Transformer:
    graph, leaves = _structure(spec)
    parameters = gathered({**frozen, **trainable})
    flat = {path: nnx.Param(parameters[name]) for name, (path, _) in leaves.items()}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, the adapter's included, by name."""
    return {name: shape for name, (_, shape) in sorted(_structure(spec)[1].items())}


def trainable_names(spec: ModelSpec) -> list[str]:
    """Names of what is trained: the adapter's parameters if there is one, else all."""
    names = list(parameter_shapes(spec))
    return [name for name in names if is_lora(name)] if spec.lora else names


def is_lora(name: str) -> bool:
    return name.endswith((".lora_a", ".lora_b"))


def init_parameters(config: ModelConfig, seed: int, dtype: str = "float32") -> Parameters:
    """Fresh parameters: matrices normal with deviation 0.02, norms one, biases zero.

    Each tensor's values depend on (seed, name) alone.
    """
    shapes = parameter_shapes(ModelSpec(config))
    return {name: jnp.asarray(_fresh(name, shapes[name], seed), dtype) for name in shapes}


def _fresh(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if name.endswith(".scale"):
        return np.ones(shape, np.float32)
    if name.endswith(".bias"):
        return np.zeros(shape, np.float32)
    return 0.02 * _generator(name, seed).standard_normal(shape, np.float32)


def init_lora(spec: ModelSpec, seed: int) -> Parameters:
    """A fresh adapter that changes nothing yet: lora_a uniform in +-1/sqrt(in), lora_b zero.

    The bound is that of PEFT's Kaiming initialisation. Empty where the spec has no adapter.
    """
    fresh = {}
    for name, shape in parameter_shapes(spec).items():
        if name.endswith(".lora_a"):
            values = _generator(name, seed).uniform(-1.0, 1.0, shape) / np.sqrt(shape[0])
            fresh[name] = jnp.asarray(values, spec.dtype)
        elif name.endswith(".lora_b"):
            fresh[name] = jnp.zeros(shape, spec.dtype)
    return fresh


def _generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def merge_lora(spec: ModelSpec, trainable: Parameters, frozen: Parameters) -> Parameters:
    """The same model without an adapter: kernel + lora_a @ lora_b * alpha / rank."""
    parameters = {**frozen, **trainable}
    merged = {name: value for name, value in parameters.items() if not is_lora(name)}
    for name in parameters:
        if name.endswith(".lora_a"):
            stem = name.removesuffix(".lora_a")
            update = parameters[name] @ parameters[f"{stem}.lora_b"] * spec.lora.scale
            merged[f"{stem}.kernel"] = parameters[f"{stem}.kernel"] + update
    return merged


# Scoring completions


def completion_logprobs(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    prompt_tokens_PT: jax.Array,
    prompt_lengths_P: jax.Array,
    completion_tokens_PGT: jax.Array,
    completion_lengths_PG: jax.Array,
    temperature: jax.Array | float,
    num_shared: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """(logprobs_PGT, entropy_PGT), float32, of softmax(logits / temperature); 0 on padding.

    The entropy is that of the whole distribution a token was drawn from, in nats. Temperature 0
    (greedy decoding) scores at temperature 1. Every prompt and T are at least one token long.
    num_shared: how many first tokens are the same in all prompts, and shorter than every prompt.
    """
    network = _network(spec, trainable, frozen)
    P, G, T = completion_tokens_PGT.shape
    S = prompt_tokens_PT.shape[1]
    tokens_PGT = completion_tokens_PGT[:, :, :-1]  # the last token predicts nothing
    positions_PGT = prompt_lengths_P[:, None, None] + jnp.arange(T - 1)[None, None, :]
    positions_PGT = jnp.broadcast_to(positions_PGT, tokens_PGT.shape)
    prompt_tokens_N, prompt_positions_N = _packed_prompts(prompt_tokens_PT, num_shared)
    hidden_ND, _ = network.hidden(
        jnp.concatenate([prompt_tokens_N, tokens_PGT.reshape(-1)]),
        jnp.concatenate([prompt_positions_N, positions_PGT.reshape(-1)]),
        attend_groups(prompt_lengths_P, S, num_shared, G),
        [None] * spec.config.num_hidden_layers,
    )
    num_packed = prompt_tokens_N.shape[0]
    last_PD = _last_hidden(hidden_ND[:num_packed], prompt_lengths_P, num_shared)
    first_PG1D = jnp.broadcast_to(last_PD[:, None, None, :], (P, G, 1, last_PD.shape[1]))
    own_PGTD = hidden_ND[num_packed:].reshape(P, G, T - 1, last_PD.shape[1])
    hidden_PGTD = jnp.concatenate([first_PG1D, own_PGTD], axis=2)
    scores = _score(
        network, hidden_PGTD.reshape(P * G * T, -1), completion_tokens_PGT.reshape(-1), temperature
    )
    mask_PGT = jnp.arange(T)[None, None, :] < completion_lengths_PG[:, :, None]
    logprobs_PGT, entropy_PGT = (
        jnp.where(mask_PGT, score_N.reshape(P, G, T), 0.0) for score_N in scores
    )
    return logprobs_PGT, entropy_PGT


def _packed_prompts(prompt_tokens_PT: jax.Array, num_shared: int) -> tuple[jax.Array, jax.Array]:
    """Tokens and positions, each [N]: what all prompts share, then the rest of each prompt."""
    P, T = prompt_tokens_PT.shape
    positions_T = jnp.arange(T)
    own_positions_PT = jnp.broadcast_to(positions_T[None, num_shared:], (P, T - num_shared))
    tokens = [prompt_tokens_PT[0, :num_shared], prompt_tokens_PT[:, num_shared:].reshape(-1)]
    positions = [positions_T[:num_shared], own_positions_PT.reshape(-1)]
    return jnp.concatenate(tokens), jnp.concatenate(positions)


def _last_hidden(hidden_ND, prompt_lengths_P, num_shared) -> jax.Array:
    """hidden_PD of each prompt's last token, out of those of packed prompts."""
    P = prompt_lengths_P.shape[0]
    own_PTD = hidden_ND[num_shared:].reshape(P, -1, hidden_ND.shape[1])
    last_P = prompt_lengths_P - num_shared - 1
    return jnp.take_along_axis(own_PTD, last_P[:, None, None], axis=1)[:, 0]


def _score(network: Transformer, hidden_ND, targets_N, temperature):
    """(logprob_N, entropy_N) of target tokens, chunked so that few logits are held at once."""
    temperature = jnp.where(jnp.asarray(temperature) > 0, temperature, 1.0)

    def score(hidden_ND, targets_N):
        logits_NV = network.logits(hidden_ND) / temperature
        normaliser_N = jax.nn.logsumexp(logits_NV, axis=-1)
        probabilities_NV = jnp.exp(logits_NV - normaliser_N[:, None])
        entropy_N = normaliser_N - jnp.sum(probabilities_NV * logits_NV, axis=-1)
        target_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=1)[:, 0]
        return target_N - normaliser_N, entropy_N

    N = targets_N.shape[0]
    num_chunks = -(-N * network.config.vocab_size // MAX_LOGITS)
    if num_chunks == 1:
        return score(hidden_ND, targets_N)
    size = -(-N // num_chunks)
    padding = num_chunks * size - N
    hidden = jnp.pad(hidden_ND, ((0, padding), (0, 0))).reshape(num_chunks, size, -1)
    targets = jnp.pad(targets_N, (0, padding)).reshape(num_chunks, size)
    logprobs, entropy = jax.lax.map(lambda chunk: jax.checkpoint(score)(*chunk), (hidden, targets))
    return logprobs.reshape(-1)[:N], entropy.reshape(-1)[:N]


# Generating


def prefill(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    prompt_tokens_PT: jax.Array,
    prompt_lengths_P: jax.Array,
    num_shared: int = 0,
) -> tuple[jax.Array, Cache]:
    """(logits_PV after each prompt's last token, prompt cache).

    num_shared: how many first tokens are the same in all prompts, and shorter than every prompt.
    """
    network = _network(spec, trainable, frozen)
    tokens_N, positions_N = _packed_prompts(prompt_tokens_PT, num_shared)
    attend = attend_prompts(*prompt_tokens_PT.shape, num_shared)
    caches = [None] * spec.config.num_hidden_layers
    hidden_ND, caches = network.hidden(tokens_N, positions_N, attend, caches)
    last_PD = _last_hidden(hidden_ND, prompt_lengths_P, num_shared)
    cache = [(key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)) for key, value in caches]
    return network.logits(last_PD), cache


def empty_own_cache(spec: ModelSpec, num_prompts: int, group_size: int, num_slots: int) -> Cache:
    """A completions' own cache with room for `num_slots` tokens a row."""
    config = spec.config
    K, C = config.num_key_value_heads, config.head_dim
    rows = (num_prompts, group_size, K)
    return constrain_cache(
        [
            (
                jnp.zeros((*rows, C, num_slots), spec.dtype),
                jnp.zeros((*rows, num_slots, C), spec.dtype),
            )
            for _ in range(config.num_hidden_layers)
        ]
    )


def constrain_cache(cache: Cache) -> Cache:
    """A prompt or own cache with its rows and its kv heads spread over the mesh."""

    def lay_out(array):
        middle = (None,) * (array.ndim - 4)  # an own cache has groups, a prompt cache has none
        return constrain(array, "rows", *middle, "kv_heads")

    return jax.tree.map(lay_out, cache)


def decode_logits(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    prompt_cache: Cache,
    prompt_lengths_P: jax.Array,
    own_cache: Cache,
    tokens_PG: jax.Array,
    index: jax.Array | int,
) -> tuple[jax.Array, Cache]:
    """(logits_PGV, own cache) after one more token in each row, at completion position `index`.

    Attends to the prompt and to slots 0 to `index` of the own cache; what later slots hold does
    not matter. Donate `own_cache`: it is written in place.
    """
    network = _network(spec, trainable, frozen)
    P, G = tokens_PG.shape
    positions_N = jnp.broadcast_to((prompt_lengths_P + index)[:, None], (P, G)).reshape(-1)
    hidden_ND, own_cache = network.hidden(
        tokens_PG.reshape(-1),
        positions_N,
        attend_cached(prompt_lengths_P, G, index),
        list(zip(prompt_cache, own_cache, strict=True)),
    )
    return network.logits(hidden_ND).reshape(P, G, -1), constrain_cache(own_cache)
