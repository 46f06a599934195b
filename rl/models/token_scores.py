"""Log-probability and entropy of given tokens under an output head, logits never held whole."""

import functools

import jax
import jax.numpy as jnp

MAX_LOGITS = 2**26
"""Logits held at once: 256 MiB. More are computed in chunks of tokens, and once more for the
gradient."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def token_scores(
    width_axis: int,
    is_entropy_fixed: bool,
    soft_cap: float | None,
    hidden_ND: jax.Array,
    kernel: jax.Array,
    targets_N: jax.Array,
    temperature: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(logprob_N, entropy_N), float32, of softmax(logits / temperature), logits = hidden @ kernel.

    kernel: an output head [D, V], `width_axis` 0, or an embedding [V, D], `width_axis` 1.
    `soft_cap` c: logits are c * tanh(hidden @ kernel / c).
    `is_entropy_fixed`: the entropy counts as a constant for differentiation, and so does the
    temperature always.
    """
    head = width_axis, is_entropy_fixed, soft_cap
    return _forward(*head, hidden_ND, kernel, targets_N, temperature)[0]


def _forward(width_axis, is_entropy_fixed, soft_cap, hidden_ND, kernel, targets_N, temperature):
    def score(chunk):
        hidden, targets = chunk
        logits = _logits(width_axis, soft_cap, hidden, kernel, temperature)
        normaliser, mean = _normaliser_and_mean(logits)
        target = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return (target - normaliser, normaliser - mean, normaliser, mean), logits

    N, V = hidden_ND.shape[0], kernel.shape[1 - width_axis]
    size = _chunk_size(N, V)
    if size == N:
        results, logits = score((hidden_ND, targets_N))
    else:
        chunks = _cut(hidden_ND, size), _cut(targets_N, size)
        results = jax.lax.map(lambda chunk: score(chunk)[0], chunks)
        results, logits = [x.reshape(-1)[:N] for x in results], None
    logprobs_N, entropy_N, normaliser_N, mean_N = results
    saved = (hidden_ND, kernel, targets_N, temperature, normaliser_N, mean_N, logits)
    return (logprobs_N, entropy_N), saved


def _backward(width_axis, is_entropy_fixed, soft_cap, saved, gradients):
    hidden_ND, kernel, targets_N, temperature, normaliser_N, mean_N, logits_NV = saved
    N, V = hidden_ND.shape[0], kernel.shape[1 - width_axis]

    def pull(hidden, targets, normaliser, mean, of_logprob, of_entropy, logits=None):
        if logits is None:
            logits = _logits(width_axis, soft_cap, hidden, kernel, temperature)
        probabilities = jnp.exp(logits - normaliser[:, None])
        # d logprob / d logit = [is target] - p; d entropy / d logit = -p (logit - mean logit).
        factor = of_logprob[:, None]
        if not is_entropy_fixed:
            factor = factor + of_entropy[:, None] * (logits - mean[:, None])
        is_target = jnp.arange(V)[None, :] == targets[:, None]
        of_logits = jnp.where(is_target, of_logprob[:, None], 0.0) - probabilities * factor
        of_logits = of_logits / temperature
        if soft_cap is not None:  # d tanh(x) / dx = 1 - tanh(x)^2
            of_logits = of_logits * (1.0 - jnp.square(logits * temperature / soft_cap))
        of_logits = of_logits.astype(hidden.dtype)
        of_hidden = _dot(of_logits, kernel, 1, 1 - width_axis)
        pair = (hidden, of_logits) if width_axis == 0 else (of_logits, hidden)
        return of_hidden.astype(hidden.dtype), _dot(*pair, 0, 0)

    size = _chunk_size(N, V)
    arrays = (hidden_ND, targets_N, normaliser_N, mean_N, *gradients)
    if size == N:
        of_hidden_ND, of_kernel = pull(*arrays, logits_NV)
    else:

        def add(total, chunk):
            of_hidden, of_kernel = pull(*chunk)
            return total + of_kernel, of_hidden

        chunks = [_cut(x, size) for x in arrays]
        of_kernel, of_hidden = jax.lax.scan(add, jnp.zeros(kernel.shape, jnp.float32), chunks)
        of_hidden_ND = of_hidden.reshape(-1, hidden_ND.shape[1])[:N]
    return of_hidden_ND, of_kernel.astype(kernel.dtype), None, None


token_scores.defvjp(_forward, _backward)


def _logits(width_axis, soft_cap, hidden, kernel, temperature):
    logits = _dot(hidden, kernel, 1, width_axis)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    return logits / temperature


def _normaliser_and_mean(logits_NV):
    """log(sum(exp(logits))), and the logits' mean under their softmax."""
    maximum_N1 = logits_NV.max(axis=1, keepdims=True)
    terms_NV = jnp.exp(logits_NV - maximum_N1)
    total_N = terms_NV.sum(axis=1)
    mean_N = (terms_NV * logits_NV).sum(axis=1) / total_N
    return maximum_N1[:, 0] + jnp.log(total_N), mean_N


def _dot(left, right, left_axis: int, right_axis: int):
    dimensions = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)


def _chunk_size(num_tokens: int, vocab_size: int) -> int:
    num_chunks = -(-num_tokens * vocab_size // MAX_LOGITS)
    return -(-num_tokens // num_chunks)


def _cut(x: jax.Array, size: int) -> jax.Array:
    """[N, ...] -> [chunks, size, ...], filled up with zeros."""
    num_chunks = -(-x.shape[0] // size)
    padding = [(0, num_chunks * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding).reshape(num_chunks, size, *x.shape[1:])
