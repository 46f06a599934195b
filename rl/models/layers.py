"""The network: a decoder of the Llama kind as Flax NNX modules over packed tokens.

Every layer sees a flat list of tokens, N of them, whatever they are (prompt tokens, completion
tokens, one token a row); only attention knows how they belong together, and that is a function
which the caller passes in. Attribute names are those of Hugging Face's checkpoints.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rl.models.attention import Attend
from rl.models.spec import AttentionKind, LoraConfig, ModelSpec

Rope = tuple[jax.Array, jax.Array]


class Linear(nnx.Module):
    """x @ kernel (+ bias) (+ (x @ lora_a) @ lora_b * alpha / rank)."""

    def __init__(self, num_in: int, num_out: int, bias: bool, lora: LoraConfig | None, dtype: str):
        self.kernel = nnx.Param(jnp.zeros((num_in, num_out), dtype))
        self.bias = nnx.Param(jnp.zeros(num_out, dtype)) if bias else None
        self.lora_scale = lora.scale if lora else 0.0
        self.lora_a = nnx.Param(jnp.zeros((num_in, lora.rank), dtype)) if lora else None
        self.lora_b = nnx.Param(jnp.zeros((lora.rank, num_out), dtype)) if lora else None

    def __call__(self, x_ND: jax.Array) -> jax.Array:
        y_ND = x_ND @ self.kernel[...]
        if self.lora_a is not None:
            y_ND += (x_ND @ self.lora_a[...]) * self.lora_scale @ self.lora_b[...]
        return y_ND if self.bias is None else y_ND + self.bias[...][None, :]


class RMSNorm(nnx.Module):
    """Root-mean-square layer norm (Zhang & Sennrich 2019), in float32."""

    def __init__(self, size: int, spec: ModelSpec):
        self.scale = nnx.Param(jnp.ones(size, spec.dtype))
        self.epsilon = spec.config.rms_norm_eps
        self.is_offset = spec.config.is_norm_offset

    def __call__(self, x_ND: jax.Array) -> jax.Array:
        if not self.is_offset:
            return _norm(self.epsilon, x_ND, self.scale[...])
        scale_D = 1.0 + self.scale[...].astype(jnp.float32)
        return _norm(self.epsilon, x_ND, scale_D).astype(x_ND.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(epsilon: float, x_ND: jax.Array, scale_D: jax.Array) -> jax.Array:
    """Keeps its input and one number a token for the backward pass."""
    return _norm_forward(epsilon, x_ND, scale_D)[0]


def _norm_forward(epsilon, x_ND, scale_D):
    x = x_ND.astype(jnp.float32)
    inverse_N1 = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
    output_ND = (x * inverse_N1).astype(scale_D.dtype) * scale_D[None, :]
    return output_ND, (x_ND, inverse_N1, scale_D)


def _norm_backward(epsilon, saved, gradient_ND):
    x_ND, inverse_N1, scale_D = saved
    normed = x_ND.astype(jnp.float32) * inverse_N1
    of_output = gradient_ND.astype(jnp.float32)
    of_normed = of_output * scale_D[None, :].astype(jnp.float32)
    radial_N1 = jnp.mean(of_normed * normed, axis=-1, keepdims=True)
    of_x = inverse_N1 * (of_normed - normed * radial_N1)
    of_scale = jnp.sum(of_output * normed, axis=0)
    return of_x.astype(x_ND.dtype), of_scale.astype(scale_D.dtype)


_norm.defvjp(_norm_forward, _norm_backward)


class Embedding(nnx.Module):
    def __init__(self, num_rows: int, size: int, dtype: str):
        self.embedding = nnx.Param(jnp.zeros((num_rows, size), dtype))

    def __call__(self, tokens_N: jax.Array) -> jax.Array:
        return self.embedding[...][tokens_N]


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; who attends to whom is the caller's."""

    def __init__(self, spec: ModelSpec, kind: AttentionKind):
        config = spec.config
        self.kind = kind
        self.head_dim = config.head_dim
        num_query = config.num_attention_heads * config.head_dim
        num_kv = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        # Attention itself divides by the root of the head size.
        scalar = config.query_pre_attn_scalar
        self.query_scale = None if scalar is None else (config.head_dim / scalar) ** 0.5
        self.q_proj = _projection(spec, "q_proj", config.hidden_size, num_query, bias)
        self.k_proj = _projection(spec, "k_proj", config.hidden_size, num_kv, bias)
        self.v_proj = _projection(spec, "v_proj", config.hidden_size, num_kv, bias)
        has_output_bias = bias and config.has_output_bias
        self.o_proj = _projection(spec, "o_proj", num_query, config.hidden_size, has_output_bias)
        self.q_norm = RMSNorm(config.head_dim, spec) if config.has_qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, spec) if config.has_qk_norm else None

    def __call__(self, x_ND: jax.Array, rope: Rope, attend: Attend, cache: Any, num_context: int):
        query_NHC = self._heads(self.q_proj(x_ND[num_context:]), self.q_norm)
        query_NHC = rotate(query_NHC, _after(num_context, rope))
        if self.query_scale is not None:
            query_NHC = query_NHC * self.query_scale
        key_NKC = rotate(self._heads(self.k_proj(x_ND), self.k_norm), rope)
        value_NKC = self._heads(self.v_proj(x_ND))
        output_NHC, cache = attend(query_NHC, key_NKC, value_NKC, cache, self.kind)
        return self.o_proj(output_NHC.reshape(output_NHC.shape[0], -1)), cache

    def _heads(self, x_ND: jax.Array, norm: RMSNorm | None = None) -> jax.Array:
        if norm is not None:
            x_ND = norm(x_ND.reshape(-1, self.head_dim)).reshape(x_ND.shape)
        return x_ND.reshape(x_ND.shape[0], -1, self.head_dim)


@jax.custom_vjp
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up. Nothing else is kept for the backward pass, which is one loop."""
    return jax.nn.silu(gate) * up


def _gated_backward(saved, gradient):
    gate, up = saved
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    return gradient * up * (sigmoid + silu * (1.0 - sigmoid)), gradient * silu


gated.defvjp(lambda gate, up: (gated(gate, up), (gate, up)), _gated_backward)


class MLP(nnx.Module):
    """SwiGLU feed-forward, or GeGLU (Shazeer 2020)."""

    def __init__(self, spec: ModelSpec):
        config = spec.config
        sizes = (config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.gate_proj = _projection(spec, "gate_proj", *sizes)
        self.up_proj = _projection(spec, "up_proj", *sizes)
        self.down_proj = _projection(spec, "down_proj", sizes[1], sizes[0], sizes[2])
        self.is_silu = config.hidden_act == "silu"

    def __call__(self, x_ND: jax.Array) -> jax.Array:
        gate, up = self.gate_proj(x_ND), self.up_proj(x_ND)
        if self.is_silu:
            return self.down_proj(gated(gate, up))
        return self.down_proj(jax.nn.gelu(gate, approximate=True) * up)


class Block(nnx.Module):
    """Attention and feed-forward, each of a normalised input, added to what came in.

    The norm in front of the feed-forward is called post_attention_layernorm in checkpoints, and
    pre_feedforward_layernorm where what attention adds has one of its own under that name.
    """

    def __init__(self, spec: ModelSpec, layer: int):
        config = spec.config
        self.input_layernorm = RMSNorm(config.hidden_size, spec)
        self.self_attn = Attention(spec, config.attention_kind(layer))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, spec)
        self.has_post_norms = config.has_post_norms
        if self.has_post_norms:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, spec)
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, spec)
        self.mlp = MLP(spec)

    def __call__(
        self, x_ND: jax.Array, rope: Rope, attend: Attend, cache: Any, num_context: int = 0
    ):
        """Of the first `num_context` tokens only keys and values are computed, no output."""
        normed_ND = self.input_layernorm(x_ND)
        attended_ND, cache = self.self_attn(normed_ND, rope, attend, cache, num_context)
        if self.has_post_norms:
            x_ND = x_ND[num_context:] + self.post_attention_layernorm(attended_ND)
            fed_ND = self.mlp(self.pre_feedforward_layernorm(x_ND))
            return x_ND + self.post_feedforward_layernorm(fed_ND), cache
        x_ND = x_ND[num_context:] + attended_ND
        return x_ND + self.mlp(self.post_attention_layernorm(x_ND)), cache


class Transformer(nnx.Module):
    def __init__(self, spec: ModelSpec):
        config = spec.config
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, spec.dtype)
        self.layers = nnx.List([Block(spec, layer) for layer in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, spec)
        if spec.head == "value":
            self.score = Linear(config.hidden_size, 1, False, None, spec.dtype)
        elif not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, False, None, spec.dtype)

    def hidden(
        self,
        tokens_N: jax.Array,
        positions_N: jax.Array,
        attend: Attend,
        caches: list[Any],
        num_context: int = 0,
        is_rematerialised: bool = False,
    ):
        """Tokens at their positions -> (normalised last hidden state hidden_ND, caches).

        The first `num_context` tokens are there to be attended to: none of N. `is_rematerialised`:
        each layer keeps its input alone for the backward pass, which computes the rest once more.
        """
        config = self.config
        x_ND = self.embed_tokens(tokens_N)
        if config.is_embedding_scaled:
            x_ND = x_ND * jnp.asarray(config.hidden_size**0.5, x_ND.dtype)
        bases = [config.rope_base(layer) for layer in range(len(self.layers))]
        ropes = {base: rotary_angles(config.head_dim, base, positions_N) for base in set(bases)}
        new_caches = []
        for layer, (block, cache) in enumerate(zip(self.layers, caches, strict=True)):
            is_last = layer == len(self.layers) - 1
            run = functools.partial(_run_block, block, attend, num_context if is_last else 0)
            run = jax.checkpoint(run) if is_rematerialised else run
            x_ND, cache = run(x_ND, ropes[bases[layer]], cache)
            new_caches.append(cache)
        return self.norm(x_ND), new_caches

    def head(self) -> tuple[jax.Array, int]:
        """(matrix of the output head, which of its axes is the model's width)."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.embedding[...], 1
        return self.lm_head.kernel[...], 0

    def values(self, hidden_ND: jax.Array) -> jax.Array:
        """values_N of normalised hidden states, of a value head; float32 throughout."""
        kernel_D1 = self.score.kernel[...].astype(jnp.float32)
        return (hidden_ND.astype(jnp.float32) @ kernel_D1)[:, 0]

    def logits(self, hidden_ND: jax.Array) -> jax.Array:
        """Float32 logits_NV of normalised hidden states."""
        if self.config.tie_word_embeddings:
            embedding_VD = self.embed_tokens.embedding[...]
            logits_NV = jnp.einsum("nd,vd->nv", hidden_ND, embedding_VD).astype(jnp.float32)
        else:
            logits_NV = self.lm_head(hidden_ND).astype(jnp.float32)
        return capped(logits_NV, self.config.final_logit_softcapping)


def capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """soft_cap * tanh(logits / soft_cap); the logits themselves without one."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _run_block(block: Block, attend: Attend, num_context: int, x_ND, rope: Rope, cache):
    return block(x_ND, rope, attend, cache, num_context)


def _after(start: int, rope: Rope) -> Rope:
    cosine, sine = rope
    return cosine[start:], sine[start:]


def _projection(spec: ModelSpec, name: str, num_in: int, num_out: int, bias: bool) -> Linear:
    lora = spec.lora if spec.lora and name in spec.lora.targets else None
    return Linear(num_in, num_out, bias, lora, spec.dtype)


def rotary_angles(head_dim: int, base: float, positions_N: jax.Array) -> Rope:
    """Cosine and sine, each [N, C/2], of rotary position embedding (Su et al. 2021, eq. 34)."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = 1.0 / base**exponents
    angles = positions_N.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_NHC: jax.Array, rope: Rope) -> jax.Array:
    """Rotate channel pairs (c, c + C/2), the layout of Llama's Hugging Face checkpoints."""
    cosine, sine = (angle[:, None, :].astype(x_NHC.dtype) for angle in rope)
    first, second = jnp.split(x_NHC, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
