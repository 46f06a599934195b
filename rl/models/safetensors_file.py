"""The safetensors container, read as memory maps and written one tensor at a time.

The `safetensors` package's numpy side holds every tensor in memory when it writes and knows no
bfloat16; a model should need neither twice its size nor torch. The format: eight bytes of
little-endian header length, a JSON header, then the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from rl.errors import MeshdialError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ALIGNMENT = 64  # of the first tensor, so that a memory map of it is aligned for every dtype
CHUNK_BYTES = 64 << 20  # written at once: the most memory that a cast costs


@dataclass(frozen=True)
class LazyTensor:
    """An array that is made when it is asked for, and not kept: `np.asarray(tensor)` makes it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], np.ndarray]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """Makes the array; always a new one, so `copy` has nothing to add."""
        return np.asarray(self.load(), dtype=dtype)


class Entry(NamedTuple):
    """What a header says of a tensor: its bytes are those from `start` to `stop` of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, Entry]:
    """Name -> entry of every tensor of a file.

    Raises MeshdialError for a file that is missing, cut short or a Git LFS pointer, or whose header
    is not one that the format allows.
    """
    if not path.is_file():
        raise MeshdialError(f"{path} is missing")
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        if prefix == b"version ":
            raise MeshdialError(
                f"{path} is a Git LFS pointer, not the weights themselves: run `git lfs pull`"
            )
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= header_bytes <= min(size - 8, MAX_HEADER_BYTES):
            raise MeshdialError(f"{path} is not a whole safetensors file: {size} bytes, no header")
        header = _parse_header(path, file.read(header_bytes))
    return {
        name: _entry(path, name, entry, 8 + header_bytes, size)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Name -> array, each a read-only memory map of the file: bytes are read when touched.

    Raises MeshdialError as `read_header` does.
    """
    header = read_header(path)
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    return {
        name: np.asarray(mapped[entry.start : entry.stop]).view(entry.dtype).reshape(entry.shape)
        for name, entry in header.items()
    }


def _parse_header(path: Path, raw: bytes) -> dict:
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise MeshdialError(f"{path} is not a safetensors file: its header is no JSON") from error
    if not isinstance(header, dict):
        raise MeshdialError(f"{path} is not a safetensors file: its header is no JSON object")
    return header


def _entry(path: Path, name: str, entry: dict, first: int, size: int) -> Entry:
    try:
        tag, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        is_sound = all(isinstance(n, int) and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError) as error:
        raise MeshdialError(f"{path}: the header entry of tensor {name} is damaged") from error
    if tag not in DTYPES:
        raise MeshdialError(f"{path}: tensor {name} has dtype {tag}; known are {', '.join(DTYPES)}")
    if not is_sound or end - start != math.prod(shape) * DTYPES[tag].itemsize:
        raise MeshdialError(f"{path}: the header entry of tensor {name} is damaged")
    if first + end > size:
        raise MeshdialError(
            f"{path} is cut short: tensor {name} ends at byte {end} of the tensors,"
            f" the file holds {size - first}"
        )
    return Entry(DTYPES[tag], shape, first + start, first + end)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> None:
    """Writes `tensors` (arrays, or anything with a shape and `__array__`) cast to `dtype`.

    One tensor is in memory at a time, and cast in pieces. The same arrays give the same bytes,
    whatever the order of the mapping. Raises MeshdialError for a value that is not finite, or
    not in `dtype`.
    """
    names = sorted(tensors)
    with open(path, "wb") as file:
        file.write(header_of({name: tensors[name].shape for name in names}, dtype)[0])
        for name in names:
            array = np.asarray(tensors[name])
            if array.shape != tuple(tensors[name].shape):
                raise ValueError(f"{name}: {array.shape} came, {tensors[name].shape} was told")
            for block in _row_blocks(array):
                file.write(cast_finite(path, name, block, dtype).view(np.uint8).data)


def header_of(
    shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype
) -> tuple[bytes, dict[str, Entry]]:
    """(the header's bytes, name -> entry) of a file of tensors of one dtype, in name order."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0  # "pt": transformers refuses others
    for name in sorted(shapes):
        shape = [int(n) for n in shapes[name]]
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TAGS[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % ALIGNMENT)
    del header["__metadata__"]
    entries = {
        name: Entry(
            dtype, tuple(entry["shape"]), *(8 + len(raw) + n for n in entry["data_offsets"])
        )
        for name, entry in header.items()
    }
    return len(raw).to_bytes(8, "little") + raw, entries


def cast_finite(path: Path, name: str, block: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values in row order as one axis in `dtype`; MeshdialError if any is not finite there."""
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found just below
        cast = np.ascontiguousarray(block, dtype=dtype).reshape(-1)
    bits = f"u{dtype.itemsize}"
    exponent = np.array(np.inf, dtype).view(bits)  # all ones; NumPy is slow with small floats
    if (cast.view(bits) & exponent).max(initial=0) == exponent:
        raise MeshdialError(
            f"{path}: tensor {name} holds a value not finite, or beyond the range of {dtype}"
        )
    return cast


def _row_blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array in pieces of about CHUNK_BYTES along its first axis."""
    if array.ndim == 0 or array.nbytes <= CHUNK_BYTES:
        yield array
        return
    rows = max(1, CHUNK_BYTES * array.shape[0] // array.nbytes)
    for start in range(0, array.shape[0], rows):
        yield array[start : start + rows]
