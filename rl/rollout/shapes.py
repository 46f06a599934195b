"""The few sizes that programs are compiled for."""

CHUNK_LENGTHS = (16, 64)
"""Tokens of one prefill chunk: short prompts waste little, long ones read their context less."""

MAX_PREFILL_TOKENS = 1024
"""Tokens of one prefill dispatch, ..."""

MAX_PREFILL_PAIRS = 2**21
"""... and pairs of a token and a slot of its context: these bound what its scores take."""


MOST_FIRST_ROWS = 64
"""Samples whose first tokens are drawn together."""


def power_of_two(count: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, 1 << max(count - 1, 0).bit_length())


def rounded_up(count: int, least: int, num_parts: int) -> int:
    """To a multiple of `least`, then of a `num_parts`-th of the next power of two: few sizes."""
    size = max(least, power_of_two(count) // num_parts)
    return -(-count // size) * size


def num_rows_for(num_samples: int) -> int:
    """Decode rows for so many samples: a multiple of 8, then of ever more, so that few exist."""
    return rounded_up(num_samples, 8, 4)


def num_first_rows_for(num_samples: int) -> int:
    """Rows of so many first tokens, which come in any number up to MOST_FIRST_ROWS."""
    return 8 if num_samples <= 8 else MOST_FIRST_ROWS


def padded_length(length: int) -> int:
    """At least `length`: a multiple of 16, then two sizes an octave."""
    return rounded_up(length, 16, 4)


def chunk_length(run_lengths: list[int]) -> int:
    """How long the chunks are into which these runs of tokens are cut: by the length of the run
    that an average token is in."""
    short, long = CHUNK_LENGTHS
    total, weighted = sum(run_lengths), sum(length**2 for length in run_lengths)
    return long if weighted >= 4 * long * total > 0 else short


def max_chunks(length: int, num_slots: int) -> int:
    """Most chunks of `length` tokens in a dispatch whose contexts have `num_slots`."""
    num_tokens = min(MAX_PREFILL_TOKENS, MAX_PREFILL_PAIRS // num_slots)
    return max(power_of_two(num_tokens // length + 1) // 2, 1)
