"""The tokenizer inside a GGUF file, rebuilt as tokenizer.json and tokenizer_config.json.

A GGUF keeps the vocabulary, the merges (or the scores that imply them) and the name of the
pre-tokenizer, whose rules each reader has to know.
"""

from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from rl.errors import MeshdialError
from rl.models.json_file import to_json

Metadata = Callable[..., object]

CONTROL, USER_DEFINED = 3, 4  # GGUF's token types that a text is searched for before merging
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_files(path: Path, metadata: Metadata) -> dict[str, bytes]:
    """File name -> content; `metadata(key, default=None)` gives a GGUF field."""
    tokens = metadata("tokenizer.ggml.tokens")
    if not tokens:
        raise MeshdialError(f"{path}: tokenizer.ggml.tokens is missing, so it has no tokenizer")
    kind = metadata("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level(path, metadata, tokens)
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens)
    else:
        raise MeshdialError(
            f"{path}: tokenizer.ggml.model is {kind!r}, supported are 'gpt2' and 'llama'"
        )
    _add_tokens(backend, metadata, tokens)
    return {
        "tokenizer.json": backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": to_json(_settings(metadata, tokens)),
    }


def _byte_level(path: Path, metadata: Metadata, tokens: list[str]) -> tokenizers.Tokenizer:
    """Byte-pair encoding over bytes, as GPT-2, Llama 3 and SmolLM use it."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata("tokenizer.ggml.merges", [])]
    pre = metadata("tokenizer.ggml.pre")
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(_pre_tokenizers(path, pre))
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizers(path: Path, name: object) -> list:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    known = {
        "gpt-2": [words],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), words],
        "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA_3), "isolated"), raw_bytes],
    }
    if name not in known:
        raise MeshdialError(
            f"{path}: tokenizer.ggml.pre is {name!r}, supported are {', '.join(known)}"
        )
    return known[name]


def _sentencepiece(metadata: Metadata, tokens: list[str]) -> tokenizers.Tokenizer:
    """Llama 2's: spaces are ▁, one leads the text, and unknown characters fall back to bytes."""
    unknown = metadata("tokenizer.ggml.unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_of_scores(tokens, metadata("tokenizer.ggml.scores", [])),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = metadata("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_of_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, best score of the whole first."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token, i in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[i], i, vocabulary[left], vocabulary[right]))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(merges)]


def _add_tokens(backend: tokenizers.Tokenizer, metadata: Metadata, tokens: list[str]) -> None:
    kinds = metadata("tokenizer.ggml.token_type", [])
    pairs = list(zip(tokens, kinds, strict=False))
    special = [token for token, kind in pairs if kind == CONTROL]
    plain = [token for token, kind in pairs if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])
    begin = metadata("tokenizer.ggml.bos_token_id")
    if metadata("tokenizer.ggml.add_bos_token", False) and begin is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[begin]} $A",
            pair=f"{tokens[begin]} $A {tokens[begin]} $B",
            special_tokens=[(tokens[begin], begin)],
        )


def _settings(metadata: Metadata, tokens: list[str]) -> dict:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata("llama.context_length"),
        "chat_template": metadata("tokenizer.chat_template"),
    }
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = metadata(f"tokenizer.ggml.{key}_token_id")
        settings[f"{kind}_token"] = None if token_id is None else tokens[token_id]
    return {key: value for key, value in settings.items() if value is not None}
