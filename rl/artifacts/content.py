"""Content ids: names for what an artifact says, whatever file, shard or device holds it.

1. An array is cut along its leading axis into blocks of 4 MiB, or of one row where that is more.
2. Each block's little-endian bytes are hashed with SHA-256; the blocks are hashed side by side.
3. A content id hashes one line per array, by name order: (name, dtype, shape, block hashes).

So a reader can check any block by itself, the id follows from the block hashes alone, and a NumPy
array, a JAX array sharded over several processes and a tensor in a file have the same id. Never a
second full copy: an array that is not plain host memory is fetched a block at a time.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl import group
from rl.artifacts.shards import Blocked, each_block

BLOCK_BYTES = 4 * 2**20
_EXCHANGED_AT_ONCE = 10_000  # hashes in one word to the other processes: about 1 MB


def canonical_json(value: Any) -> str:
    """JSON with one spelling: sorted keys, no spaces, NumPy scalars as numbers; NaN: ValueError."""
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
        default=plain_number,
    )


def plain_number(value: Any) -> Any:
    """The `default` of every `json.dumps` here: a NumPy scalar as the Python number it holds."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def json_content_id(value: Any) -> str:
    """The content id of a JSON value, whatever its layout in the file."""
    return tagged(hashlib.sha256(canonical_json(value).encode()))


def content_id(arrays: Mapping[str, Any]) -> str:
    """The content id of named arrays, each NumPy or JAX, `sha256:` and 64 hex digits."""
    return id_of_blocks(described(arrays))


def described(arrays: Mapping[str, Any]) -> dict[str, dict]:
    """What identifies each array: {dtype, shape, blocks}, ready for JSON and for `id_of_blocks`.

    Each process of a group hashes the blocks that fall to it, and all return the same.
    """
    cut = {name: _blocked(array) for name, array in arrays.items()}
    hashes = exchanged(each_block(cut, lambda name, number, block: block_hash(block)))
    return {
        name: {
            "dtype": np.dtype(array.dtype).name,
            "shape": list(array.shape),
            "blocks": [hashes[name][number] for number in range(len(cut[name].bounds))],
        }
        for name, array in arrays.items()
    }


def exchanged(hashes: Mapping[str, Mapping[int, str]]) -> dict[str, dict[int, str]]:
    """The block hashes of all processes of the group, from those of each."""
    if group.size() == 1:
        return dict(hashes)
    own = [[name, *pair] for name, found in hashes.items() for pair in found.items()]
    num_rounds = max(group.gather(-(-len(own) // _EXCHANGED_AT_ONCE)))
    merged: dict[str, dict[int, str]] = {name: {} for name in hashes}
    for start in range(0, num_rounds * _EXCHANGED_AT_ONCE, _EXCHANGED_AT_ONCE):
        for told in group.gather(own[start : start + _EXCHANGED_AT_ONCE]):
            for name, number, value in told:
                merged[name][number] = value
    return merged


def _blocked(array: Any) -> Blocked:
    return Blocked(array, 0, block_bounds(array.shape, np.dtype(array.dtype).itemsize))


def id_of_blocks(tensors: Mapping[str, Mapping]) -> str:
    """The content id of arrays that are known by their `described` form only."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        line = [name, tensor["dtype"], list(tensor["shape"]), list(tensor["blocks"])]
        digest.update(canonical_json(line).encode() + b"\n")
    return tagged(digest)


def block_hashes(array: Any) -> list[str]:
    """SHA-256, in hex, of each block of an array, in order; none for an array without values."""
    return described({"": array})[""]["blocks"]


def block_bounds(shape: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    """(start, stop) of each block along the leading axis; a scalar is one block of one row."""
    num_rows, row_bytes = (shape[0], math.prod(shape[1:]) * itemsize) if shape else (1, itemsize)
    if row_bytes == 0:
        return []
    rows = max(1, BLOCK_BYTES // row_bytes)
    return [(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


def tagged(digest: "hashlib._Hash") -> str:
    return "sha256:" + digest.hexdigest()


def block_hash(block: np.ndarray) -> str:
    return hashlib.sha256(raw_bytes(block)).hexdigest()


def raw_bytes(array: np.ndarray) -> np.ndarray:
    """The values as little-endian bytes in row order: a view where they lie so already."""
    if array.dtype.hasobject:
        raise TypeError("an array of Python objects has no content id")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8)
