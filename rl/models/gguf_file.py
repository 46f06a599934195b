"""A GGUF file (llama.cpp's container) as a Hugging Face model: config, tensors, tokenizer.

Tensors are dequantised one at a time, when they are asked for. llama.cpp rotates neighbouring
channels (0, 1), Hugging Face the halves (0, C/2), so a GGUF stores the rows of the query and key
projections interleaved: `_split_halves` undoes that.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize

from rl.errors import MeshdialError
from rl.models.families import named_parameters
from rl.models.gguf_tokenizer import tokenizer_files
from rl.models.safetensors_file import LazyTensor
from rl.models.spec import ModelConfig

Metadata = Callable[..., object]
"""metadata(key, default=None): the value of a GGUF field; `{arch}.` stands for llama's."""

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def read_gguf(
    path: Path | str,
) -> tuple[ModelConfig, dict[str, LazyTensor], dict[str, bytes], dict[str, object]]:
    """(config, float32 parameters by our names, tokenizer files, special token ids).

    Raises MeshdialError for a damaged file, an architecture other than llama, a rope scaling or
    mixture of experts, and a tokenizer that is not known.
    """
    path = Path(path)
    reader = _open(path)
    metadata = partial(_value, reader.fields)
    config = _config(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    tensors = {_hf_name(path, t.name): _lazy(path, config, t) for t in reader.tensors}
    parameters = named_parameters(config, tensors, path)
    return config, parameters, tokenizer_files(path, metadata), _token_ids(metadata)


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
        raise MeshdialError(f"{path} is not a whole GGUF file: {error}") from error


def _value(fields: dict, key: str, default=None):
    return fields[key].contents() if key in fields else default


def _config(path: Path, metadata: Metadata, tensors: dict) -> ModelConfig:
    _refuse_unsupported(path, metadata, tensors)
    width, heads = (_whole(path, metadata, k) for k in ("embedding_length", "attention.head_count"))
    head_size = metadata("llama.attention.key_length", width // heads)
    if metadata("llama.rope.dimension_count", head_size) != head_size:
        raise MeshdialError(f"{path}: llama.rope.dimension_count differs from the head size")
    return ModelConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=width,
        intermediate_size=_whole(path, metadata, "feed_forward_length"),
        num_hidden_layers=_whole(path, metadata, "block_count"),
        num_attention_heads=heads,
        num_key_value_heads=metadata("llama.attention.head_count_kv", heads),
        head_dim=head_size,
        rms_norm_eps=_shortest(metadata("llama.attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=_shortest(metadata("llama.rope.freq_base", 10000.0)),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        max_position_embeddings=_whole(path, metadata, "context_length"),
    )


def _refuse_unsupported(path: Path, metadata: Metadata, tensors: dict) -> None:
    architecture = metadata("general.architecture")
    if architecture != "llama":
        raise MeshdialError(
            f"{path}: general.architecture is {architecture!r}, supported is 'llama'"
        )
    scaling = metadata("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        kind = "rope_freqs.weight" if scaling == "none" else repr(scaling)
        raise MeshdialError(f"{path}: rope scaling by {kind} is not supported")
    if metadata("split.count", 1) > 1:
        raise MeshdialError(f"{path} is one of several split files; join them with gguf-split")
    if "token_embd.weight" not in tensors:
        raise MeshdialError(f"{path}: tensor token_embd.weight is missing")
    if metadata("llama.expert_count", 0):
        raise MeshdialError(f"{path}: a mixture of experts is not supported")


def _whole(path: Path, metadata: Metadata, key: str) -> int:
    value = metadata(f"llama.{key}")
    if not isinstance(value, int):
        raise MeshdialError(f"{path}: llama.{key} is {value!r}, expected a whole number")
    return value


def _shortest(value: float) -> float:
    """The decimal that was meant: GGUF stores float32, where 1e-5 reads as 9.99999975e-06."""
    return float(str(np.float32(value)))


def _hf_name(path: Path, name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    stem, _, suffix = name.rpartition(".")
    if stem in _OUTER_NAMES:
        return f"{_OUTER_NAMES[stem]}.{suffix}"
    block, _, inner = stem.removeprefix("blk.").partition(".")
    if not stem.startswith("blk.") or inner not in _NAMES:
        raise MeshdialError(f"{path}: tensor {name} has no place in a llama model")
    return f"model.layers.{block}.{_NAMES[inner]}.{suffix}"


def _lazy(path: Path, config: ModelConfig, tensor) -> LazyTensor:
    shape = tuple(int(n) for n in reversed(tensor.shape))
    num_heads = None
    if ".attn_q." in tensor.name:
        num_heads = config.num_attention_heads
    if ".attn_k." in tensor.name:
        num_heads = config.num_key_value_heads
    return LazyTensor(shape, np.dtype(np.float32), partial(_load, path, tensor, shape, num_heads))


def _load(path: Path, tensor, shape: tuple[int, ...], num_heads: int | None) -> np.ndarray:
    try:
        weights = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise MeshdialError(f"{path}: tensor {tensor.name} is of unknown type {kind}") from error
    weights = np.asarray(weights, np.float32).reshape(shape)
    return weights if num_heads is None else _split_halves(weights, num_heads)


def _split_halves(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (0, C/2, 1, C/2 + 1, ...) to (0, 1, ..., C - 1)."""
    by_pair = weights.reshape(num_heads, -1, 2, *weights.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(weights.shape)


def _token_ids(metadata: Metadata) -> dict[str, object]:
    """Ids for config.json; an end-of-turn token ends a completion as much as an end of text."""
    eos, turn = (metadata(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    return {
        "bos_token_id": metadata("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos if turn in (None, eos) else [eos, turn],
        "pad_token_id": metadata("tokenizer.ggml.padding_token_id"),
    }
