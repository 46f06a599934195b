"""A model made here: fresh weights of a given architecture, with a tokenizer of its own."""

import json
from collections.abc import Mapping

from rl.errors import MeshdialError
from rl.models.families import TOKEN_ID_KEYS
from rl.models.spec import ModelConfig, Parameters
from rl.models.tokenizer import byte_tokenizer_files, character_tokenizer_files, count_ids
from rl.models.transformer import init_parameters

_SIZES = ("layers", "width", "heads", "kv_heads", "ffn", "max_positions")
_OPTIONS = {"head_size": None, "rope_theta": 10000.0, "norm_epsilon": 1e-5, "tie_embeddings": True}


def scratch_model(
    architecture: Mapping[str, object], seed: int
) -> tuple[ModelConfig, Parameters, dict[str, bytes], dict[str, object]]:
    """(config, parameters, tokenizer files, special token ids).

    `architecture`: layers, width, heads, kv_heads, ffn, max_positions (whole numbers); tokenizer
    (`bytes`, or `characters` with an `alphabet`); and optionally head_size (width / heads),
    rope_theta, norm_epsilon, tie_embeddings. The vocabulary is the tokenizer's.
    """
    files = _tokenizer_files(architecture)
    config = _config(architecture, count_ids(files, "scratch"))
    ids = json.loads(files["generation_config.json"])
    return config, init_parameters(config, seed), files, {key: ids[key] for key in TOKEN_ID_KEYS}


def scratch_config(architecture: Mapping[str, object]) -> ModelConfig:
    """The sizes of such a model, without its parameters."""
    return _config(architecture, count_ids(_tokenizer_files(architecture), "scratch"))


def _tokenizer_files(architecture: Mapping[str, object]) -> dict[str, bytes]:
    kind, alphabet = architecture.get("tokenizer"), architecture.get("alphabet")
    if kind == "bytes" and alphabet is None:
        return byte_tokenizer_files()
    if kind == "characters" and isinstance(alphabet, str):
        return character_tokenizer_files(alphabet)
    raise MeshdialError(
        f"architecture: tokenizer is {kind!r} with alphabet {alphabet!r};"
        " expected bytes alone, or characters with an alphabet"
    )


def _config(architecture: Mapping[str, object], num_ids: int) -> ModelConfig:
    known = {*_SIZES, *_OPTIONS, "tokenizer", "alphabet"}
    unknown = sorted(set(architecture) - known)
    if unknown:
        raise MeshdialError(
            f"architecture: key {unknown[0]!r} is unknown; known are {_listed(known)}"
        )
    for key in _SIZES:
        value = architecture.get(key)
        if not isinstance(value, int) or value < 1:
            raise MeshdialError(
                f"architecture: {key} is {value!r}, expected a whole number above 0"
            )
    options = {key: architecture.get(key, default) for key, default in _OPTIONS.items()}
    width, heads = architecture["width"], architecture["heads"]
    if options["head_size"] is None and width % heads:
        raise MeshdialError(f"architecture: width {width} is no multiple of heads {heads}")
    return ModelConfig(
        vocab_size=num_ids,
        hidden_size=width,
        intermediate_size=architecture["ffn"],
        num_hidden_layers=architecture["layers"],
        num_attention_heads=heads,
        num_key_value_heads=architecture["kv_heads"],
        head_dim=options["head_size"] or width // heads,
        rms_norm_eps=options["norm_epsilon"],
        rope_theta=options["rope_theta"],
        tie_word_embeddings=options["tie_embeddings"],
        max_position_embeddings=architecture["max_positions"],
    )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
