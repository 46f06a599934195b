"""Text to tokens and back, chat templates, and the end-of-text ids, from a model's folder.

Tokens are the truth everywhere downstream: a prompt is tokenized once, and what is sampled is
never tokenized again.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import tokenizers

from rl.errors import MeshdialError
from rl.models.chat_template import read_template, render
from rl.models.json_file import read_json_object, to_json

# Every file of a folder that says how text becomes tokens; they travel with the weights.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A folder's tokenizer. `Tokenizer.load(folder)` makes it."""

    backend: tokenizers.Tokenizer = field(repr=False)
    named_tokens: dict[str, str]  # bos_token, eos_token, ...: the text of each that is set
    eos_ids: tuple[int, ...]  # a completion ends with any of these
    pad_id: int
    template: str | None = field(repr=False)
    folder: str = ""
    model_pad_id: int | None = None  # by config.json: what a classifier takes for padding

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer":
        """Reads tokenizer.json and what stands beside it.

        Raises MeshdialError where tokenizer.json is missing or unreadable.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise MeshdialError(
                f"{folder} has no tokenizer.json; a folder saved with a fast tokenizer has one"
            )
        backend = _parse(path.read_bytes(), str(path))
        backend.no_truncation()  # some files were saved with a training run's settings
        backend.no_padding()
        settings = _read_optional(folder / "tokenizer_config.json")
        named = {key: _text(settings[key]) for key in NAMED_TOKENS if settings.get(key)}
        kinds = ("generation_config", "config")
        model_configs = [_read_optional(folder / f"{kind}.json") for kind in kinds]
        eos_ids = _eos_ids(backend, named, model_configs)
        pad_id = _pad_id(backend, named, model_configs, eos_ids)
        template, model_pad_id = (
            read_template(folder, settings),
            model_configs[1].get("pad_token_id"),
        )
        return cls(backend, named, eos_ids, pad_id, template, str(folder), model_pad_id)

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        `special_tokens` lets the tokenizer's own post-processor add what it adds (for many
        models a leading <bos>); a rendered chat has its special tokens already.
        """
        try:
            return self.backend.encode(text, add_special_tokens=special_tokens).ids
        except Exception as error:  # the package raises plain Exception
            strange = [c for c in text if self.backend.token_to_id(c) is None]
            reason = f"it has no token for {strange[0]!r}" if strange else error
            raise MeshdialError(
                f"the tokenizer of {self.folder} cannot encode {text[:80]!r}: {reason}"
            ) from error

    def encode_chat(self, messages: Sequence[dict]) -> list[int]:
        """Token ids of the rendered chat, with no special token added to those it names."""
        return self.encode(self.render_chat(messages), special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def render_chat(self, messages: Sequence[dict], is_open: bool = True) -> str:
        """The text of a chat, [{"role": ..., "content": ...}], up to the assistant's turn; a chat
        that is not open ends with its last message."""
        if self.template is None:
            raise MeshdialError(
                f"{self.folder} has no chat template (chat_template in tokenizer_config.json, or"
                " chat_template.jinja), so its prompts must be plain text"
            )
        return render(self.template, messages, self.named_tokens, self.folder, is_open)

    @cached_property
    def num_ids(self) -> int:
        """One more than the largest token id."""
        return _num_ids(self.backend)

    @cached_property
    def content_hash(self) -> str:
        """Equal for tokenizers that map text to tokens, and end a completion, in the same way."""
        canonical = json.dumps(json.loads(self.backend.to_str()), sort_keys=True)
        return _sha256(json.dumps([canonical, sorted(self.eos_ids)]))

    @cached_property
    def template_hash(self) -> str | None:
        return None if self.template is None else _sha256(self.template)


def check_tokenizer(files: Mapping[str, bytes], vocab_size: int, where: str) -> None:
    """Refuses tokenizer files that can give a token for which the model has no embedding."""
    if "tokenizer.json" not in files:
        raise MeshdialError(
            f"{where} has no tokenizer.json; a folder saved with a fast tokenizer has one"
        )
    num_ids = count_ids(files, where)
    if num_ids > vocab_size:
        raise MeshdialError(
            f"{where}: tokenizer.json has token ids up to {num_ids - 1}, the model's vocab_size"
            f" is only {vocab_size}"
        )


def count_ids(files: Mapping[str, bytes], where: str) -> int:
    """One more than the largest token id of the files' tokenizer.json."""
    return _num_ids(_parse(files["tokenizer.json"], f"{where}: tokenizer.json"))


def _parse(content: bytes, where: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises plain Exception
        raise MeshdialError(f"{where} is not a readable tokenizer: {error}") from error


def _num_ids(backend: tokenizers.Tokenizer) -> int:
    return 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)


def _read_optional(path: Path) -> dict:
    return read_json_object(path) if path.is_file() else {}


def _text(token: str | dict) -> str:
    """A special token is its text, or an object that has it as `content`."""
    return token["content"] if isinstance(token, dict) else token


def _eos_ids(backend, named: dict[str, str], model_configs: list[dict]) -> tuple[int, ...]:
    found = set()
    for config in model_configs:
        ids = config.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if "eos_token" in named:
        found.add(backend.token_to_id(named["eos_token"]))
    return tuple(sorted(found - {None}))


def _pad_id(backend, named: dict[str, str], model_configs: list[dict], eos_ids) -> int:
    """Padding is masked wherever it is used, so any id serves a model that names none."""
    candidates = [backend.token_to_id(named["pad_token"])] if "pad_token" in named else []
    candidates += [config.get("pad_token_id") for config in model_configs]
    candidates += [*eos_ids[:1], 0]
    return next(i for i in candidates if isinstance(i, int) and i >= 0)


def _sha256(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def byte_tokenizer_files() -> dict[str, bytes]:
    """File name -> content of a tokenizer whose token b is byte b, then <pad>, <bos>, <eos>.

    Any text round-trips; a character outside ASCII is several tokens.
    """
    symbols = _byte_symbols()
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    return _files_of(backend)


def character_tokenizer_files(alphabet: str) -> dict[str, bytes]:
    """File name -> content of a tokenizer with one token for each character of `alphabet`, in its
    order, then <pad>, <bos>, <eos>. A text with another character is refused when encoded."""
    repeated = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if repeated or not alphabet:
        raise MeshdialError(
            f"alphabet: found {'a repeated ' + repr(repeated[0]) if repeated else 'no character'};"
            " expected each character of the task's text once"
        )
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(r"[\s\S]"), behavior="isolated"
    )
    backend.decoder = tokenizers.decoders.Fuse()
    return _files_of(backend)


def _files_of(backend: tokenizers.Tokenizer) -> dict[str, bytes]:
    specials = ["<pad>", "<bos>", "<eos>"]
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in specials])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }
    ids = {f"{t[1:-1]}_token_id": backend.token_to_id(t) for t in specials}
    return {
        "tokenizer.json": backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": to_json(settings),
        "generation_config.json": to_json(ids),
    }


def _byte_symbols() -> list[str]:
    """The printable stand-in of each byte in the ByteLevel alphabet (GPT-2's): a byte that is
    printable in Latin-1 stands for itself, the others take the characters from 256 on in turn."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [stand_in.get(byte, chr(byte)) for byte in range(256)]
