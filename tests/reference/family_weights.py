"""The sequence and the weights of the tiny models behind family_numbers.json."""

import zlib

import numpy as np

TOKENS = [3, 17, 9, 21, 5, 5, 30, 2, 11, 7, 1, 26, 14, 8, 19, 4, 0, 12, 29, 6]
LENGTHS = [20, 7, 1]
PROMPT = 5
PLACES = [4, 9, 12, 19]


def weights(family: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    generator = np.random.default_rng(zlib.crc32(f"{family}/{name}".encode()))
    values = generator.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        is_offset = family.startswith("gemma")
        return values * np.float32(0.3) + np.float32(0 if is_offset or "bias" in name else 1)
    return values * np.float32(0.3)


def probe(family: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The direction in which the gradient of a tensor is looked at."""
    generator = np.random.default_rng(zlib.crc32(f"probe/{family}/{name}".encode()))
    return generator.standard_normal(shape).astype(np.float32)
