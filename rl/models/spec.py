"""What a model is: its sizes, its adapter and its dtype, as hashable records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from rl.errors import MeshdialError

Parameters = dict[str, jax.Array]
"""Flat parameters by dotted name, kernels as [in, out]: `layers.0.mlp.up_proj.kernel` is [D, F]."""

Head = Literal["lm", "value"]
"""What a network says of each place: the next token's distribution, or one number."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# LlamaConfig's own defaults: a config.json may leave these keys out.
_OPTIONAL = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 2048,
}
# model_type -> the sliding window of a config.json that names none.
_FAMILIES = {"llama": None, "mistral": 4096}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@dataclass(frozen=True)
class AttentionKind:
    """What a layer's queries see, and how: of `window` tokens up to their own (None: all), by
    scores that `soft_cap` * tanh(score / soft_cap) bounds (None: as they are)."""

    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a Llama-family decoder, named as in Hugging Face's config.json.

    `sliding_window` holds for the layers whose `layer_types` say sliding_attention, or for all.
    Checkpoints are read of Llama and Mistral, whose layers are all alike and cap no scores.
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

    def __post_init__(self):
        for name in (*_SIZES, "num_key_value_heads", "head_dim"):
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

    def attention_kind(self, layer: int) -> AttentionKind:
        is_sliding = self.layer_types is None or self.layer_types[layer] == "sliding_attention"
        window = self.sliding_window if is_sliding else None
        return AttentionKind(window, self.attn_logit_softcapping)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Read a config.json; raises MeshdialError for what this transformer does not compute."""
        _refuse_unknown(values)
        rope = values.get("rope_parameters") or {}
        sizes = {name: values.get(name) for name in _SIZES}
        heads = sizes["num_attention_heads"]
        options = {name: values.get(name, rope.get(name, _OPTIONAL[name])) for name in _OPTIONAL}
        family = values.get("model_type", "llama")
        window = values.get("sliding_window", _FAMILIES[family]) if family == "mistral" else None
        return cls(
            **sizes,
            **options,
            sliding_window=window,
            num_key_value_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or _default_head_dim(sizes["hidden_size"], heads),
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model, readable by transformers: a Llama's, or, where there is a
        sliding window, a Mistral's."""
        family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        if self.sliding_window is not None:
            family = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
            family["sliding_window"] = self.sliding_window
        return {
            **family,
            "hidden_act": "silu",
            **{name: getattr(self, name) for name in (*_SIZES, *_OPTIONAL)},
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
        }


def _default_head_dim(hidden_size: Any, num_heads: Any) -> int | None:
    """What config.json means by leaving head_dim out; None where it cannot be told."""
    is_known = isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0
    return hidden_size // num_heads if is_known else None


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    """Raise MeshdialError, naming the key, for a model that is no plain Llama."""
    family = values.get("model_type", "llama")
    if family not in _FAMILIES:
        known = " and ".join(map(repr, _FAMILIES))
        raise MeshdialError(f"model config: model_type is {family!r}, supported are {known}")
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise MeshdialError(f"model config: hidden_act is {activation!r}, supported is 'silu'")
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise MeshdialError(f"model config: {key} is of type {kind!r}, supported is 'default'")


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
