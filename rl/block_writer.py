"""Parameters written to a safetensors file by hashed blocks, wherever they lie.

A block is some rows of a tensor as it is stored, one contiguous range of the file, about 4 MiB. A
thread turns and casts it as the file wants it, hashes it, and writes it to its place. Where there
are several processes, all write into the one file, each the blocks that fall to it.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl import group
from rl.artifacts.content import block_bounds, block_hash, exchanged, raw_bytes
from rl.artifacts.shards import Blocked, each_block
from rl.models.safetensors_file import Entry, cast_finite, header_of

_WRITTEN_AT_ONCE = 2**20  # bytes: threads that wait for a file's lock spin, so hold it briefly
_FLUSH_SECONDS = 0.05  # between flushes: an adapter is written before the first
_STRIP = 8  # rows that are turned at once: measured, for four and two bytes


class Stored(NamedTuple):
    """A parameter, and whether the file has it as [out, in] where it is [in, out] in memory."""

    array: Any
    is_transposed: bool


def write_tensors(path: Path, tensors: Mapping[str, Stored], dtype: np.dtype) -> dict[str, dict]:
    """Writes a file of `tensors`, by stored name, and returns each one's {dtype, shape, blocks}.

    All processes of a group call this; each writes its blocks into the one file, which the first
    has made. The same values give the same bytes. MeshdialError for a value that is not finite, or
    not in `dtype`.
    """
    shapes = {name: _stored_shape(tensor) for name, tensor in tensors.items()}
    return write_in_batches(path, shapes, [tensors], dtype)


def write_in_batches(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    batches: Iterable[Mapping[str, Stored]],
    dtype: np.dtype,
) -> dict[str, dict]:
    """As `write_tensors`, of tensors that need not all be in memory at one time.

    `shapes` are those of all tensors as stored; each batch is let go of before the next is asked
    for. ValueError if the batches have other tensors.
    """
    header, entries = header_of(shapes, dtype)
    if group.is_first():
        size = max([len(header), *(entry.stop for entry in entries.values())])
        with open(path, "wb") as file:
            file.write(header)
            _reserve(file.fileno(), size)
    group.barrier(f"{path.name} is there")
    written: dict[str, dict] = {}
    with open(path, "rb+", buffering=0) as file, _flushed_meanwhile(file.fileno()):
        for tensors in batches:
            written |= _write_batch(path, file.fileno(), tensors, entries)
            del tensors
    if written.keys() != entries.keys():
        raise ValueError(f"tensors {sorted(entries.keys() - written.keys())} did not come")
    return {name: written[name] for name in entries}


def _write_batch(
    path: Path, descriptor: int, tensors: Mapping[str, Stored], entries: Mapping[str, Entry]
) -> dict[str, dict]:
    for name, tensor in tensors.items():
        if name not in entries or _stored_shape(tensor) != entries[name].shape:
            raise ValueError(f"tensor {name} came with shape {_stored_shape(tensor)}")
    cut = {name: _blocked(tensor, entries[name]) for name, tensor in tensors.items()}

    def write(name: str, number: int, block: np.ndarray) -> str:
        entry, (start, stop) = entries[name], cut[name].bounds[number]
        rows = _turned_rows(block) if tensors[name].is_transposed else block
        raw = raw_bytes(cast_finite(path, name, rows, entry.dtype))
        _write_at(descriptor, raw, entry.start + start * (raw.size // (stop - start)))
        return block_hash(raw)

    hashes = exchanged(each_block(cut, write))
    return {
        name: {
            "dtype": entries[name].dtype.name,
            "shape": list(entries[name].shape),
            "blocks": [hashes[name][number] for number in range(len(cut[name].bounds))],
        }
        for name in tensors
    }


def _stored_shape(tensor: Stored) -> tuple[int, ...]:
    shape = tuple(tensor.array.shape)
    return shape[::-1] if tensor.is_transposed else shape


def _blocked(tensor: Stored, entry: Entry) -> Blocked:
    axis = len(entry.shape) - 1 if tensor.is_transposed else 0
    return Blocked(tensor.array, axis, block_bounds(entry.shape, entry.dtype.itemsize))


def _reserve(descriptor: int, size: int) -> None:
    """Gives a file its size, and room on the disk: a full one is told now, not halfway."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


@contextmanager
def _flushed_meanwhile(descriptor: int) -> Iterator[None]:
    """The disk takes what is written while the rest is worked on, so that publishing waits less."""
    is_over, errors = threading.Event(), []

    def flush() -> None:
        try:
            while not is_over.wait(_FLUSH_SECONDS):
                os.fsync(descriptor)
        except OSError as error:  # which a later flush of the file would not tell again
            errors.append(error)

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    for error in errors:
        raise error


def _write_at(descriptor: int, raw: np.ndarray, place: int) -> None:
    written = 0
    while written < raw.size:
        piece = raw[written : written + _WRITTEN_AT_ONCE]
        written += os.pwrite(descriptor, piece.data, place + written)


def _turned_rows(block: np.ndarray) -> np.ndarray:
    """The transpose in row order, by strips: several times faster than NumPy's own copy."""
    turned = np.empty(block.shape[::-1], block.dtype)
    bits = np.dtype(f"u{block.dtype.itemsize}")  # NumPy copies its own types the fastest
    source, target = block.view(bits), turned.view(bits)
    for start in range(0, block.shape[0], _STRIP):
        target[:, start : start + _STRIP] = source[start : start + _STRIP].T
    return turned
