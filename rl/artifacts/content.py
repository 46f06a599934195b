"""Content ids: names for what an artifact says, whatever file, shard or device holds it.

1. An array is cut along its leading axis into blocks of 4 MiB, or of one row where that is more.
2. Each block's little-endian bytes are hashed with SHA-256; the blocks are hashed side by side.
3. A content id hashes one line per array, by name order: (name, dtype, shape, block hashes).

So a reader can check any block by itself, the id follows from the block hashes alone, and a NumPy
array, a sharded JAX array and a tensor in a file have the same id. Never a second full copy: an
array that is not plain host memory is fetched a block at a time.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

BLOCK_BYTES = 4 * 2**20


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
    return id_of_blocks({name: described(array) for name, array in arrays.items()})


def described(array: Any) -> dict:
    """What identifies one array: {dtype, shape, blocks}, ready for JSON and for `id_of_blocks`."""
    return {
        "dtype": np.dtype(array.dtype).name,
        "shape": list(array.shape),
        "blocks": block_hashes(array),
    }


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
    read, bounds = _reader(array), block_bounds(array.shape, np.dtype(array.dtype).itemsize)
    if len(bounds) < 2:
        return [_block_hash(read, *bound) for bound in bounds]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda bound: _block_hash(read, *bound), bounds))


def host_array(array: Any) -> np.ndarray:
    """The values of a NumPy or JAX array on the host: a view where they are there."""
    return _reader(array)(0, array.shape[0] if array.ndim else 1)


def block_bounds(shape: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    """(start, stop) of each block along the leading axis; a scalar is one block of one row."""
    num_rows, row_bytes = (shape[0], math.prod(shape[1:]) * itemsize) if shape else (1, itemsize)
    if row_bytes == 0:
        return []
    rows = max(1, BLOCK_BYTES // row_bytes)
    return [(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


def tagged(digest: "hashlib._Hash") -> str:
    return "sha256:" + digest.hexdigest()


def _block_hash(read: Callable[[int, int], np.ndarray], start: int, stop: int) -> str:
    return hashlib.sha256(raw_bytes(read(start, stop))).hexdigest()


def raw_bytes(array: np.ndarray) -> np.ndarray:
    """The values as little-endian bytes in row order: a view where they lie so already."""
    if array.dtype.hasobject:
        raise TypeError("an array of Python objects has no content id")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8)


def _reader(array: Any) -> Callable[[int, int], np.ndarray]:
    """A function from (start, stop) to those rows on the host; a scalar is its only row."""
    if isinstance(array, np.ndarray) or array.ndim == 0:
        host = np.asarray(array)
        return lambda start, stop: host[start:stop] if host.ndim else host
    if not array.is_fully_addressable:
        raise ValueError("an array that lies partly on another host has no content id here")
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    if len(shards) == 1:
        return lambda start, stop: _host_rows(shards[0].data, start, stop)
    return lambda start, stop: _assembled_rows(array, shards, start, stop)


def _assembled_rows(array: Any, shards: list, start: int, stop: int) -> np.ndarray:
    """Rows of a sharded JAX array, put together here: slicing it there would be a collective."""
    block = np.empty((stop - start, *array.shape[1:]), array.dtype)
    for shard in shards:
        first = shard.index[0].start or 0
        low, high = max(start, first), min(stop, first + shard.data.shape[0])
        if low < high:
            place = (slice(low - start, high - start), *shard.index[1:])
            block[place] = _host_rows(shard.data, low - first, high - first)
    return block


def _host_rows(piece: Any, start: int, stop: int) -> np.ndarray:
    """Rows of a JAX array that lies on one device."""
    if next(iter(piece.devices())).platform == "cpu":
        return np.asarray(piece)[start:stop]  # a view of its memory
    return np.asarray(piece[start:stop])  # an array keeps the copy that NumPy took: let it be brief
