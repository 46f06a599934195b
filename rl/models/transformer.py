"""Pure functions of a flat parameter dict: score completions, prefill prompts, decode a token.

A group's prompt is computed once. Prompt tokens [P, T] and completion tokens [P, G, T] go through
every layer as one list of tokens; a completion's query attends, in a single softmax, to the
prompt's keys, which the group shares, and causally to its own. Prompts are right-padded: their
tokens have positions 0 to length - 1, and completion token t has position length + t.
"""

import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rl.models.layers import Transformer
from rl.models.spec import ModelConfig, ModelSpec, Parameters

Cache = list[tuple[jax.Array, jax.Array]]
"""Keys and values of each layer, channels before slots for keys: the order that decodes fastest.

A prompt cache holds [P, K, C, T] and [P, K, T, C], a completions' own cache [P, G, K, C, S] and
[P, G, K, S, C].
"""

MAX_LOGITS = 2**26
"""Logits held at once in `completion_logprobs`: 256 MiB. More are scored in chunks."""

_MASKED = -1e30


# The parameters


@functools.cache
def _graph(spec: ModelSpec):
    """The network's structure and, by dotted name, the shape and dtype of its parameters."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(spec)))
    flat = {".".join(map(str, path)): leaf for path, leaf in state.flat_state()}
    paths = {".".join(map(str, path)): path for path, _ in state.flat_state()}
    return graph, flat, paths


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, the adapter's included, by name."""
    return {name: leaf.shape for name, leaf in sorted(_graph(spec)[1].items())}


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


def _network(spec: ModelSpec, trainable: Parameters, frozen: Parameters) -> Transformer:
    graph, _, paths = _graph(spec)
    parameters = {**frozen, **trainable}
    state = nnx.State.from_flat_path({paths[name]: nnx.Param(parameters[name]) for name in paths})
    return nnx.merge(graph, state)


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
) -> tuple[jax.Array, jax.Array]:
    """(logprobs_PGT, entropy_PGT), float32, of softmax(logits / temperature); 0 on padding.

    The entropy is that of the whole distribution a token was drawn from, in nats. Temperature 0
    (greedy decoding) scores at temperature 1. Prompts and lengths are at least one token long.
    """
    network = _network(spec, trainable, frozen)
    P, G, T = completion_tokens_PGT.shape
    prompts, inputs = prompt_tokens_PT.shape, (P, G, T - 1)  # the last token predicts nothing
    tokens_N = jnp.concatenate(
        [prompt_tokens_PT.reshape(-1), completion_tokens_PGT[:, :, :-1].reshape(-1)]
    )
    positions_N = jnp.concatenate(
        [
            jnp.broadcast_to(jnp.arange(prompts[1])[None, :], prompts).reshape(-1),
            jnp.broadcast_to(
                prompt_lengths_P[:, None, None] + jnp.arange(T - 1)[None, None, :], inputs
            ).reshape(-1),
        ]
    )
    attend = _attend_groups(prompts, inputs, prompt_lengths_P)
    hidden_ND, _ = network.hidden(tokens_N, positions_N, attend, _no_caches(spec))
    hidden_PGTD = _predicting_hidden(hidden_ND, prompts, inputs, prompt_lengths_P)
    logprobs_PG_T, entropy_PG_T = _score(
        network, hidden_PGTD.reshape(P * G * T, -1), completion_tokens_PGT.reshape(-1), temperature
    )
    mask_PGT = jnp.arange(T)[None, None, :] < completion_lengths_PG[:, :, None]
    return (
        jnp.where(mask_PGT, logprobs_PG_T.reshape(P, G, T), 0.0),
        jnp.where(mask_PGT, entropy_PG_T.reshape(P, G, T), 0.0),
    )


def _no_caches(spec: ModelSpec) -> list[None]:
    return [None] * spec.config.num_hidden_layers


def _predicting_hidden(hidden_ND, prompts, inputs, prompt_lengths_P):
    """hidden_PGTD at the token before each completion token: the prompt's last, then its own."""
    num_prompt_tokens = prompts[0] * prompts[1]
    D = hidden_ND.shape[-1]
    prompt_PTD = hidden_ND[:num_prompt_tokens].reshape(*prompts, D)
    own_PGTD = hidden_ND[num_prompt_tokens:].reshape(*inputs, D)
    last_PD = _last(prompt_PTD, prompt_lengths_P)
    last_PG1D = jnp.broadcast_to(last_PD[:, None, None, :], (*inputs[:2], 1, D))
    return jnp.concatenate([last_PG1D, own_PGTD], axis=2)


def _last(x_PTD: jax.Array, lengths_P: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_PTD, (lengths_P - 1)[:, None, None], axis=1)[:, 0]


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


# Attention


def _softmax(*scores: jax.Array) -> list[jax.Array]:
    """One softmax over the last axes of several score arrays together, in float32."""
    scores = [score.astype(jnp.float32) for score in scores]
    maxima = [score.max(axis=-1, keepdims=True) for score in scores]
    maximum = jax.lax.stop_gradient(functools.reduce(jnp.maximum, maxima))
    weights = [jnp.exp(score - maximum) for score in scores]
    total = sum(weight.sum(axis=-1, keepdims=True) for weight in weights)
    return [weight / total for weight in weights]


def _grouped(query: jax.Array, num_kv: int) -> jax.Array:
    """[..., H, C] -> [..., K, R, C], scaled: R query heads share each key head."""
    *batch, H, C = query.shape
    return (query * C**-0.5).reshape(*batch, num_kv, H // num_kv, C)


def _attend_prompt(query_PTHC, key_PTKC, value_PTKC):
    """Causal attention of right-padded prompts; what padding sees is of no consequence."""
    P, T, H, C = query_PTHC.shape
    query_PTKRC = _grouped(query_PTHC, key_PTKC.shape[2])
    scores = jnp.einsum("ptkrc,pskc->pkrts", query_PTKRC, key_PTKC)
    causal = jnp.tril(jnp.ones((T, T), bool))
    (weights,) = _softmax(jnp.where(causal[None, None, None], scores, _MASKED))
    output = jnp.einsum("pkrts,pskc->ptkrc", weights.astype(value_PTKC.dtype), value_PTKC)
    return output.reshape(P, T, H, C)


def _attend_groups(prompts, inputs, prompt_lengths_P) -> Callable:
    """Attention of packed prompts and completions, for `completion_logprobs`."""
    split = prompts[0] * prompts[1]
    seen_PS = jnp.arange(prompts[1])[None, :] < prompt_lengths_P[:, None]
    causal_TS = jnp.tril(jnp.ones((inputs[2], inputs[2]), bool))

    def attend(query_NHC, key_NKC, value_NKC, cache):
        arrays = (query_NHC, key_NKC, value_NKC)
        query_p, key_p, value_p = (x[:split].reshape(*prompts, *x.shape[1:]) for x in arrays)
        query, key, value = (x[split:].reshape(*inputs, *x.shape[1:]) for x in arrays)
        output_p = _attend_prompt(query_p, key_p, value_p)
        query = _grouped(query, key.shape[3])
        shared = jnp.einsum("pgtkrc,pskc->pkgrts", query, key_p)
        own = jnp.einsum("pgtkrc,pgskc->pkgrts", query, key)
        shared, own = _softmax(
            jnp.where(seen_PS[:, None, None, None, None], shared, _MASKED),
            jnp.where(causal_TS[None, None, None, None], own, _MASKED),
        )
        output = jnp.einsum("pkgrts,pskc->pgtkrc", shared.astype(value.dtype), value_p)
        output += jnp.einsum("pkgrts,pgskc->pgtkrc", own.astype(value.dtype), value)
        flat = (-1, *query_NHC.shape[1:])
        return jnp.concatenate([output_p.reshape(flat), output.reshape(flat)]), cache

    return attend


# Generating


def prefill(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    prompt_tokens_PT: jax.Array,
    prompt_lengths_P: jax.Array,
) -> tuple[jax.Array, Cache]:
    """(logits_PV after each prompt's last token, prompt cache)."""
    network = _network(spec, trainable, frozen)
    P, T = prompt_tokens_PT.shape

    def attend(query_NHC, key_NKC, value_NKC, _):
        arrays = (query_NHC, key_NKC, value_NKC)
        query, key, value = (x.reshape(P, T, *x.shape[1:]) for x in arrays)
        output = _attend_prompt(query, key, value).reshape(query_NHC.shape)
        return output, (key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3))

    positions_N = jnp.broadcast_to(jnp.arange(T)[None, :], (P, T)).reshape(-1)
    tokens_N = prompt_tokens_PT.reshape(-1)
    hidden_ND, cache = network.hidden(tokens_N, positions_N, attend, _no_caches(spec))
    return network.logits(_last(hidden_ND.reshape(P, T, -1), prompt_lengths_P)), cache


def empty_own_cache(spec: ModelSpec, num_prompts: int, group_size: int, num_slots: int) -> Cache:
    """A completions' own cache with room for `num_slots` tokens a row."""
    config = spec.config
    K, C = config.num_key_value_heads, config.head_dim
    rows = (num_prompts, group_size, K)
    return [
        (
            jnp.zeros((*rows, C, num_slots), spec.dtype),
            jnp.zeros((*rows, num_slots, C), spec.dtype),
        )
        for _ in range(config.num_hidden_layers)
    ]


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
    num_slots = own_cache[0][0].shape[-1]
    prompt_slots = prompt_cache[0][0].shape[-1]
    seen_PS = jnp.arange(prompt_slots)[None, :] < prompt_lengths_P[:, None]
    seen_S = jnp.arange(num_slots) <= index

    def attend(query_NHC, key_NKC, value_NKC, cache):
        (key_p, value_p), (key_own, value_own) = cache
        arrays = (query_NHC, key_NKC, value_NKC)
        query, key, value = (x.reshape(P, G, *x.shape[1:]) for x in arrays)
        query = _grouped(query, key.shape[2])
        key_own = jax.lax.dynamic_update_slice_in_dim(key_own, key[..., None], index, 4)
        value_own = jax.lax.dynamic_update_slice_in_dim(value_own, value[..., None, :], index, 3)
        shared = jnp.einsum("pgkrc,pkcs->pkgrs", query, key_p)
        own = jnp.einsum("pgkrc,pgkcs->pkgrs", query, key_own)
        shared, own = _softmax(
            jnp.where(seen_PS[:, None, None, None], shared, _MASKED),
            jnp.where(seen_S[None, None, None, None], own, _MASKED),
        )
        output = jnp.einsum("pkgrs,pksc->pgkrc", shared.astype(value.dtype), value_p)
        output += jnp.einsum("pkgrs,pgksc->pgkrc", own.astype(value.dtype), value_own)
        return output.reshape(query_NHC.shape), (key_own, value_own)

    positions_N = jnp.broadcast_to((prompt_lengths_P + index)[:, None], (P, G)).reshape(-1)
    caches = list(zip(prompt_cache, own_cache, strict=True))
    hidden_ND, own_cache = network.hidden(tokens_PG.reshape(-1), positions_N, attend, caches)
    return network.logits(hidden_ND).reshape(P, G, -1), own_cache
