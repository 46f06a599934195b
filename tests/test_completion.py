"""A row alone: where its completion ends, and with which text."""

import random

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl.errors import MeshdialError
from rl.rollout.completion import Row
from rl.rollout.sampling import SamplingConfig
from rl.rollout.stop_search import StopSearch

TEXTS = ["he", "ll", "o", " ", "world"]


class Letters:
    """Token i is the i-th of TEXTS."""

    pad_id = 0

    def __init__(self, eos_ids):
        self.eos_ids = eos_ids

    def decode(self, ids):
        return "".join(TEXTS[i] for i in ids)


def new_row(tokenizer_ids=(), max_tokens=100, limit=None, **options):
    return Row(Letters(tokenizer_ids), SamplingConfig(max_tokens, **options), 7, limit)


def ended_row(tokens, chunks, **options):
    row = new_row(**options)
    for size in chunks:
        new, tokens = tokens[:size], tokens[size:]
        row.extend(new, [-float(token) for token in new], [-0.5 - token for token in new])
    return row.completion()


HELLO = [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize("chunks", [[1] * 6, [2, 2, 2], [6], [5, 1]])
@pytest.mark.parametrize(
    ("tokens", "options", "kept", "text", "reason"),
    [
        (HELLO, {"stop": ("lo w",)}, 5, "hel", "stop"),  # spans three tokens
        (HELLO, {"stop": ("ell",)}, 2, "h", "stop"),  # ends within a token
        (HELLO, {"stop": ("o", "ello")}, 3, "h", "stop"),  # the first to begin
        ([3, 0, 1, 2, 3, 4], {"stop": (" ",)}, 1, "", "stop"),
        (HELLO, {"stop": ("zz",), "max_tokens": 3}, 3, "hello", "length"),
        (HELLO, {"stop": ("wor",), "max_tokens": 5}, 5, "hello ", "stop"),
        (HELLO, {"tokenizer_ids": (3, 4), "stop": ("wor",)}, 4, "hello", "stop"),
        (HELLO, {"tokenizer_ids": (4,), "stop": ("o ",)}, 4, "hell", "stop"),
        (HELLO, {"tokenizer_ids": (4,), "max_tokens": 4}, 4, "hello ", "length"),
        (HELLO, {"tokenizer_ids": (4,), "max_tokens": 5}, 5, "hello ", "stop"),
        ([4, 0, 0, 0, 0, 0], {"tokenizer_ids": (4,)}, 1, "", "stop"),
        # The ids that the sampling names, and not the tokenizer's.
        (HELLO, {"tokenizer_ids": (1,), "limit": 4}, 2, "he", "stop"),
        (HELLO, {"tokenizer_ids": (1,), "eos_ids": (4, 3)}, 4, "hello", "stop"),
        # Its own limit.
        (HELLO, {"limit": 2}, 2, "hell", "length"),
        # Stop texts that end within the first tokens do not count, also not later.
        (HELLO, {"stop": ("he",), "min_tokens": 1}, 6, "hello world", "stop"),
        (HELLO, {"stop": ("ll",), "min_tokens": 1}, 2, "he", "stop"),
        (HELLO, {"stop": ("l", "o"), "min_tokens": 3}, 5, "hello w", "stop"),
        (
            HELLO,
            {"stop": ("hell",), "min_tokens": 2, "max_tokens": 6},
            6,
            "hello worldhe",
            "length",
        ),
    ],
)
def test_where_a_completion_is_cut(chunks, tokens, options, kept, text, reason):
    completion = ended_row(tokens, chunks, **options)
    assert completion.tokens.tolist() == tokens[:kept]
    assert completion.logprobs.tolist() == [-float(token) for token in tokens[:kept]]
    assert (completion.text, completion.finish_reason) == (text, reason)


def test_a_row_has_sampling_logprobs_where_something_is_left_out():
    assert ended_row([0, 1], [2], max_tokens=2).sampling_logprobs is None
    for options in ({"top_k": 3}, {"forbidden_ids": (4,)}, {"min_tokens": 1}):
        found = ended_row([0, 1], [2], max_tokens=2, **options).sampling_logprobs
        assert found.tolist() == [-0.5, -1.5]


def test_a_row_whose_time_is_over_ends_with_what_it_has():
    row = new_row(stop=("zz",))
    row.expire()
    assert row.finish_reason is None  # not without a token
    row.extend([0, 1], [-1.0, -2.0], [0.0, 0.0])
    row.expire()
    row.extend([2], [-3.0], [0.0])
    completion = row.completion()
    assert completion.tokens.tolist() == [0, 1] and completion.logprobs.tolist() == [-1.0, -2.0]
    assert (completion.text, completion.finish_reason) == ("hell", "timeout")


def test_a_row_that_has_ended_does_not_expire():
    row = new_row(limit=1)
    row.extend([0], [-1.0], [0.0])
    row.expire()
    assert row.finish_reason == "length"


@pytest.mark.parametrize("limit", [0, 101])
def test_a_limit_beyond_the_samplings_is_refused(limit):
    with pytest.raises(MeshdialError, match=f"prompt 7: .* is {limit} tokens, expected 1 to"):
        new_row(limit=limit)


def test_logits_that_are_not_finite_name_the_prompt():
    with pytest.raises(MeshdialError, match="a completion of prompt 7 are not finite"):
        new_row().extend([0, 1], [-1.0, float("nan")], [0.0, 0.0])


# Stop texts in real tokenizers, whose text of some tokens is not always a part of the text of all

SAMPLE = "Größe 你好世界 🙂🙃 naïve — the  cat\nsat on\tthe mat. 1+2=3 " * 20


def byte_level():
    """As GPT-2 and its many heirs: merges over bytes, across characters too."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    backend.train_from_iterator([SAMPLE], trainer)
    return backend


def byte_fallback():
    """As Llama 2 and Gemma: spaces are ▁, the first is dropped, and bytes that are no text are."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁cat", "at", "s", ".", "\n", "1", "好", "▁▁", "ï", "e", "t"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<s>"])
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def word_pieces():
    """As BERT: ## continues a word, and no space comes before a full stop."""
    pieces = ["<s>", "the", "cat", "##s", "##at", ".", "don", "'", "t", "n't", "好", "##好"]
    model = tokenizers.models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="<s>")
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<s>"])
    backend.decoder = tokenizers.decoders.WordPiece(cleanup=True)
    return backend


BACKENDS = {make.__name__: make() for make in (byte_level, byte_fallback, word_pieces)}
UNDECODED = "\N{REPLACEMENT CHARACTER}"


def by_decoding_everything(decode, tokens, stop, min_tokens):
    """(number of tokens, text) at the first stop text, by the definition."""
    ignored = len(decode(tokens[:min_tokens]).rstrip(UNDECODED))
    for num in range(min_tokens + 1, len(tokens) + 1):
        text = decode(tokens[:num])
        ends = [
            (at, at + len(s)) for s in stop for at in range(len(text)) if text.startswith(s, at)
        ]
        if found := [at for at, end in ends if end > ignored]:
            return num, text[: min(found)]
    return None


def by_search(decode, tokens, stop, min_tokens):
    search = StopSearch(decode, stop, min_tokens)
    for num in range(1, len(tokens) + 1):
        if (text := search.text_before_stop(tokens[:num])) is not None:
            return num, text
    return None


def some_tokens(backend, rng, num):
    """Stretches of real text, of random tokens, and of the bytes of characters."""
    tokens = []
    while len(tokens) < num:
        kind = rng.randrange(4)
        if kind == 0:
            start = rng.randrange(len(SAMPLE) - 60)
            tokens += backend.encode(SAMPLE[start : start + rng.randrange(60)]).ids
        elif kind == 1:
            tokens += [rng.randrange(backend.get_vocab_size()) for _ in range(rng.randrange(1, 9))]
        elif kind == 2:
            tokens += [0] * rng.randrange(30)  # without a text
        else:
            text = "".join(rng.choice("aé好🙂") for _ in range(rng.randrange(12)))
            names = [f"<0x{byte:02X}>" for byte in text.encode()]
            tokens += [i for i in map(backend.token_to_id, names) if i is not None]
    return tokens[:num]


def some_stop(text, rng):
    """A part of the text."""
    start = rng.randrange(len(text) + 1)
    return text[start : start + rng.randrange(1, 16)].strip(UNDECODED)


@pytest.mark.parametrize("name", BACKENDS)
@given(
    seed=st.integers(0, 2**32), num_stops=st.integers(1, 2), min_tokens=st.sampled_from([0, 0, 40])
)
@settings(max_examples=300, deadline=None)
def test_a_stop_text_is_found_as_by_decoding_everything(name, seed, num_stops, min_tokens):
    backend, rng = BACKENDS[name], random.Random(seed)
    tokens = some_tokens(backend, rng, 150)
    stop = [some_stop(backend.decode(tokens), rng) for _ in range(num_stops)]
    assume(all(stop) and not any(UNDECODED in text for text in stop))
    wanted = by_decoding_everything(backend.decode, tokens, stop, min_tokens)
    assert by_search(backend.decode, tokens, stop, min_tokens) == wanted


@pytest.mark.parametrize("filler", range(40))
def test_a_tail_never_begins_within_the_bytes_of_a_character(filler):
    """Wherever it is shortened, before and after the stop text's run of bytes is complete."""
    backend = BACKENDS["byte_fallback"]
    names = ["t"] * filler + [f"<0x{byte:02X}>" for byte in ("好" * 9).encode()] + list("tstets")
    tokens = [backend.token_to_id(name) for name in names]
    stop = ["好好tste"]
    wanted = by_decoding_everything(backend.decode, tokens, stop, 0)
    assert wanted == (filler + 31, "t" * filler + "好" * 7)
    assert by_search(backend.decode, tokens, stop, 0) == wanted


@pytest.mark.parametrize("name", BACKENDS)
def test_the_search_decodes_a_few_tokens_for_each(name):
    backend, num_decoded = BACKENDS[name], []

    def decode(tokens):
        num_decoded.append(len(tokens))
        return backend.decode(tokens)

    tokens = some_tokens(backend, random.Random(0), 3000)
    assert by_search(decode, tokens, ["never this"], 0) is None
    assert sum(num_decoded) < 100 * len(tokens)  # a fifteenth of decoding everything
