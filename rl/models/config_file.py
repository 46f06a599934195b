"""config.json of the families that the network computes, in and out.

A family is a table entry: what its checkpoints leave to its transformers class, and the defaults
that this class has. What a model does beyond that is refused by name.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rl.errors import MeshdialError
from rl.models.spec import SIZES, ModelConfig


class Family(NamedTuple):
    """`name` is that of the transformers classes; `traits` are fields of ModelConfig that hold for
    all of the family; `defaults` are of keys that a config.json may leave out."""

    name: str
    traits: Mapping[str, Any]
    defaults: Mapping[str, Any]

    @property
    def activation(self) -> str:
        return self.traits.get("hidden_act", "silu")


_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 2048,
}
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
_GEMMA = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "head_dim": 256,
}
_GEMMA_2 = _GEMMA | {
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA_3 = _GEMMA_2 | {
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_QWEN_2_TRAITS = {"attention_bias": True, "has_output_bias": False}
_GEMMA_TRAITS = {
    "is_norm_offset": True,
    "is_embedding_scaled": True,
    "hidden_act": "gelu_pytorch_tanh",
}
_GEMMA_2_TRAITS = _GEMMA_TRAITS | {"has_post_norms": True}

FAMILIES = {
    "llama": Family("Llama", {}, {}),
    "mistral": Family("Mistral", {}, {"sliding_window": 4096}),
    "qwen2": Family("Qwen2", _QWEN_2_TRAITS, _QWEN),
    "qwen3": Family("Qwen3", {"has_qk_norm": True}, _QWEN | {"head_dim": 128}),
    "gemma": Family("Gemma", _GEMMA_TRAITS, _GEMMA),
    "gemma2": Family("Gemma2", _GEMMA_2_TRAITS, _GEMMA_2),
    "gemma3_text": Family("Gemma3", _GEMMA_2_TRAITS | {"has_qk_norm": True}, _GEMMA_3),
}
_PERIODS = {"gemma2": 2, "gemma3_text": 6}
"""Of how many layers the last sees everything, where a config.json does not list them."""
_OPTIONAL = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
)
CLASSIFIER = "ForSequenceClassification"


def read_model_config(values: Mapping[str, Any]) -> ModelConfig:
    """A config.json; MeshdialError, naming the key, for what this network does not compute."""
    kind = values.get("model_type", "llama")
    _refuse_unknown(kind, values)
    family = FAMILIES[kind]
    known = {**_DEFAULTS, **family.defaults, **_rope(values), **_given(values)}
    sizes = {name: values.get(name) for name in SIZES}
    window, layer_types = _windows(kind, values, known)
    fields = {name: known[name] for name in _DEFAULTS} | {
        name: known.get(name) for name in _OPTIONAL if kind in _PERIODS
    }
    return ModelConfig(
        **sizes,
        **(fields | family.traits),
        family=kind,
        sliding_window=window,
        layer_types=layer_types,
        num_key_value_heads=values.get("num_key_value_heads") or sizes["num_attention_heads"],
        head_dim=known.get("head_dim") or _default_head_dim(sizes),
    )


def write_model_config(config: ModelConfig, head: str = "lm") -> dict[str, Any]:
    """The config.json of a model, readable by transformers."""
    family = FAMILIES[config.family]
    values = {
        "architectures": [family.name + (CLASSIFIER if head == "value" else "ForCausalLM")],
        "model_type": config.family,
        "hidden_act": family.activation,
        **{name: getattr(config, name) for name in (*SIZES, *_DEFAULTS)},
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }
    if config.family == "gemma3_text" and head == "value":
        values["architectures"] = ["Gemma3TextForSequenceClassification"]
    if family.activation != "silu":
        values["hidden_activation"] = family.activation
    if config.layer_types is not None:
        values |= {"layer_types": list(config.layer_types), "use_sliding_window": True}
    optional = {name: getattr(config, name) for name in (*_OPTIONAL, "sliding_window")}
    values |= {
        name: value  # a null says that a family's default does not hold
        for name, value in optional.items()
        if value is not None or name in family.defaults
    }
    if head == "value":
        values |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return values


def head_of(values: Mapping[str, Any]) -> str:
    """What the network says of each token: `value` of a sequence classifier, else `lm`.

    MeshdialError for a classifier of several labels.
    """
    names = values.get("architectures") or [""]
    if not str(names[0]).endswith(CLASSIFIER):
        return "lm"
    labels = values.get("num_labels") or len(values.get("id2label") or "ab")
    if labels != 1:
        raise MeshdialError(
            f"model config: the classifier has {labels} labels (id2label), expected 1"
        )
    return "value"


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    keys = (*_DEFAULTS, *_OPTIONAL, "head_dim", "sliding_window")
    return {key: values[key] for key in keys if key in values}


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """The bases of rotary positions, where a config.json nests them."""
    rope = values.get("rope_parameters") or {}
    if "full_attention" in rope:
        local = rope.get("sliding_attention", {})
        found = {
            "rope_theta": rope["full_attention"].get("rope_theta"),
            "rope_local_base_freq": local.get("rope_theta"),
        }
    else:
        found = {"rope_theta": rope.get("rope_theta")}
    return {key: value for key, value in found.items() if value is not None}


def _windows(kind: str, values: Mapping[str, Any], known: Mapping[str, Any]):
    """(sliding window, which layers have it; None where all have it, or none)."""
    window, layers = known.get("sliding_window"), values.get("num_hidden_layers") or 0
    if kind == "mistral":
        return window, None
    if kind in _PERIODS:
        period = values.get("sliding_window_pattern", _PERIODS[kind])
        is_full = [number % period == 0 for number in range(1, layers + 1)]
    elif kind in ("qwen2", "qwen3") and values.get("use_sliding_window"):
        is_full = [number < values.get("max_window_layers", 28) for number in range(layers)]
    else:
        return None, None
    default = ["full_attention" if full else "sliding_attention" for full in is_full]
    return window, tuple(values.get("layer_types") or default)


def _default_head_dim(sizes: Mapping[str, Any]) -> int | None:
    """What config.json means by leaving head_dim out; None where it cannot be told."""
    hidden_size, num_heads = sizes["hidden_size"], sizes["num_attention_heads"]
    is_known = isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0
    return hidden_size // num_heads if is_known else None


def _refuse_unknown(kind: str, values: Mapping[str, Any]) -> None:
    """Raise MeshdialError, naming the key, for what is no plain member of a known family."""
    if kind not in FAMILIES:
        names = ", ".join(FAMILIES)
        raise MeshdialError(f"model config: model_type is {kind!r}, supported are {names}")
    _refuse_activation(kind, values)
    if values.get("use_bidirectional_attention"):
        raise MeshdialError("model config: use_bidirectional_attention is not supported")
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key) or {}
        for part in rope.values() if "full_attention" in rope else [rope]:
            form = (part or {}).get("rope_type", (part or {}).get("type", "default"))
            if form != "default":
                raise MeshdialError(
                    f"model config: {key} is of type {form!r}, supported is 'default'"
                )


def _refuse_activation(kind: str, values: Mapping[str, Any]) -> None:
    """Gemma's first checkpoints say gelu and mean its approximation."""
    key = "hidden_activation" if kind in _PERIODS else "hidden_act"
    found, wanted = values.get(key), FAMILIES[kind].activation
    if found not in (None, wanted) and (kind, found) != ("gemma", "gelu"):
        raise MeshdialError(f"model config: {key} is {found!r}, supported is {wanted!r}")
