"""What a model is: its sizes, its adapter and its dtype, as hashable records."""

from dataclasses import dataclass
from typing import Literal

import jax

from rl.errors import MeshdialError

Parameters = dict[str, jax.Array]
"""Flat parameters by dotted name, kernels as [in, out]: `layers.0.mlp.up_proj.kernel` is [D, F]."""

Head = Literal["lm", "value"]
"""What a network says of each place: the next token's distribution, or one number."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class AttentionKind:
    """What a layer's queries see, and how: of `window` tokens up to their own (None: all), by
    scores that `soft_cap` * tanh(score / soft_cap) bounds (None: as they are)."""

    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a decoder and what its family does, named as in Hugging Face's config.json.

    `sliding_window` holds for the layers whose `layer_types` say sliding_attention, or for all;
    `rope_local_base_freq` is the base of their rotary positions, where it is another one.
    has_output_bias: whether the bias of attention is on its output projection too.
    has_qk_norm: queries and keys are normalised, each head by itself.
    has_post_norms: what attention and feed-forward add is normalised as well.
    is_norm_offset: norms multiply by 1 + their scale.
    is_embedding_scaled: embeddings are multiplied by the root of the width.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    query_pre_attn_scalar: float | None = None
    rope_local_base_freq: float | None = None
    hidden_act: str = "silu"
    has_output_bias: bool = True
    has_qk_norm: bool = False
    has_post_norms: bool = False
    is_norm_offset: bool = False
    is_embedding_scaled: bool = False
    family: str = "llama"

    def __post_init__(self):
        for name in (*SIZES, "num_key_value_heads", "head_dim"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise MeshdialError(
                    f"model config: {name} is {size!r}, expected a whole number of at least 1"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise MeshdialError(
                f"model config: num_attention_heads is {self.num_attention_heads}, which is not a "
                f"multiple of num_key_value_heads, {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise MeshdialError(f"model config: head_dim is {self.head_dim}, expected an even size")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise MeshdialError(
                f"model config: sliding_window is {self.sliding_window}, expected at least 1"
            )
        self._check_layer_types()

    def _check_layer_types(self) -> None:
        kinds = self.layer_types
        if kinds is None:
            return
        if len(kinds) != self.num_hidden_layers:
            raise MeshdialError(
                f"model config: layer_types has {len(kinds)} entries, expected one for each of the "
                f"{self.num_hidden_layers} layers (num_hidden_layers)"
            )
        for kind in kinds:
            if kind not in LAYER_TYPES:
                raise MeshdialError(
                    f"model config: layer_types has {kind!r}, expected some of {LAYER_TYPES}"
                )

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer has the sliding window, if there is one."""
        return self.layer_types is None or self.layer_types[layer] == "sliding_attention"

    def attention_kind(self, layer: int) -> AttentionKind:
        window = self.sliding_window if self.is_sliding(layer) else None
        return AttentionKind(window, self.attn_logit_softcapping)

    def rope_base(self, layer: int) -> float:
        """The base of a layer's rotary positions."""
        local = self.rope_local_base_freq
        return local if local is not None and self.is_sliding(layer) else self.rope_theta


@dataclass(frozen=True)
class LoraConfig:
    """A low-rank adapter (Hu et al. 2021): kernel + lora_a @ lora_b * alpha / rank."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self):
        unknown = [name for name in self.targets if name not in PROJECTIONS]
        if not self.targets:
            raise MeshdialError(f"lora targets: none given, expected some of {PROJECTIONS}")
        if unknown:
            raise MeshdialError(
                f"lora targets: {unknown[0]!r} is no projection, expected some of {PROJECTIONS}"
            )
        if self.rank < 1:
            raise MeshdialError(f"lora rank: {self.rank}, expected at least 1")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class ModelSpec:
    """Everything that shapes a compiled program: hashable, a static argument of jit.

    `dtype` is that of parameters, activations and KV caches; norms, softmax and
    log-probabilities are float32 whatever it is. With a value head there is no LM head.
    """

    config: ModelConfig
    lora: LoraConfig | None = None
    dtype: str = "float32"
    head: Head = "lm"
