"""The safetensors container, read as memory maps and written one tensor at a time.

The `safetensors` package's numpy side holds every tensor in memory when it writes and knows no
bfloat16; a model should need neither twice its size nor torch. The format: eight bytes of
little-endian header length, a JSON header, then the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Name -> array, each a read-only memory map of the file: bytes are read when touched.

    Raises MeshdialError for a file that is cut short, is a Git LFS pointer, or whose header is
    not one that the format allows.
    """
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
    mapped = np.memmap(path, dtype=np.uint8, mode="r")[8 + header_bytes :]
    return {
        name: _view(path, name, entry, mapped)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _parse_header(path: Path, raw: bytes) -> dict:
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise MeshdialError(f"{path} is not a safetensors file: its header is no JSON") from error
    if not isinstance(header, dict):
        raise MeshdialError(f"{path} is not a safetensors file: its header is no JSON object")
    return header


def _view(path: Path, name: str, entry: dict, mapped: np.ndarray) -> np.ndarray:
    try:
        tag, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        is_sound = all(isinstance(n, int) and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError) as error:
        raise MeshdialError(f"{path}: the header entry of tensor {name} is damaged") from error
    if tag not in DTYPES:
        raise MeshdialError(f"{path}: tensor {name} has dtype {tag}; known are {', '.join(DTYPES)}")
    if not is_sound or end - start != int(np.prod(shape, dtype=object)) * DTYPES[tag].itemsize:
        raise MeshdialError(f"{path}: the header entry of tensor {name} is damaged")
    if end > mapped.size:
        raise MeshdialError(
            f"{path} is cut short: tensor {name} ends at byte {end} of the tensors,"
            f" the file holds {mapped.size}"
        )
    return np.asarray(mapped[start:end]).view(DTYPES[tag]).reshape(shape)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> None:
    """Writes `tensors` (arrays, or anything with a shape and `__array__`) cast to `dtype`.

    One tensor is in memory at a time, and cast in pieces. The same arrays give the same bytes,
    whatever the order of the mapping. Raises MeshdialError for a value that is not finite, or
    not in `dtype`.
    """
    names = sorted(tensors)
    with open(path, "wb") as file:
        file.write(_header(names, tensors, dtype))
        for name in names:
            array = np.asarray(tensors[name])
            if array.shape != tuple(tensors[name].shape):
                raise ValueError(f"{name}: {array.shape} came, {tensors[name].shape} was told")
            for block in _row_blocks(array):
                file.write(_cast(path, name, block, dtype).view(np.uint8).data)


def _header(names: list[str], tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> bytes:
    header, offset = {"__metadata__": {"format": "pt"}}, 0  # "pt": transformers refuses others
    for name in names:
        shape = [int(n) for n in tensors[name].shape]
        end = offset + int(np.prod(shape, dtype=object)) * dtype.itemsize
        header[name] = {"dtype": TAGS[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % ALIGNMENT)
    return len(raw).to_bytes(8, "little") + raw


def _cast(path: Path, name: str, block: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found just below
        cast = np.ascontiguousarray(block, dtype=dtype).reshape(-1)
    if not np.isfinite(cast).all():
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
