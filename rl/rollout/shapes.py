"""The few sizes that programs are compiled for."""

CHUNK_LENGTHS = (16, 64)
"""Tokens of one prefill chunk: short prompts waste little, long ones read their context less."""

MAX_PREFILL_TOKENS = 1024
"""Tokens of one prefill dispatch, ..."""

MAX_PREFILL_PAIRS = 2**21
"""... and pairs of a token and a slot of its context: these bound what its scores take."""


def power_of_two(count: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, 1 << max(count - 1, 0).bit_length())


def num_rows_for(num_samples: int) -> int:
    """Decode rows for so many samples: a multiple of 8, then of ever more, so that few exist."""
    size = max(8, power_of_two(num_samples) // 4)
    return -(-num_samples // size) * size


def num_first_rows_for(num_samples: int) -> int:
    """Rows of so many first tokens: a power of 8, for they cost little and come in any number."""
    size = 8
    while size < num_samples:
        size *= 8
    return size


def padded_length(length: int) -> int:
    """At least `length`: a multiple of 16, then two sizes an octave."""
    size = max(16, power_of_two(length) // 4)
    return -(-length // size) * size


def chunk_length(run_lengths: list[int]) -> int:
    """How long the chunks are into which these runs of tokens are cut."""
    short, long = CHUNK_LENGTHS
    return long if run_lengths and sum(run_lengths) / len(run_lengths) >= 4 * long else short


def max_chunks(length: int, num_slots: int) -> int:
    """Most chunks of `length` tokens in a dispatch whose contexts have `num_slots`."""
    num_tokens = min(MAX_PREFILL_TOKENS, MAX_PREFILL_PAIRS // num_slots)
    return max(power_of_two(num_tokens // length + 1) // 2, 1)
