"""Parameters read from a safetensors file by hashed blocks, each part straight to its device.

1. A reader asks which part of a parameter each device of this process holds.
2. It reads the blocks that cover these parts, checks their hashes, and keeps what belongs there.
3. The parts go to their devices: many small ones at a time, a large one by itself.

Parts of one tensor may share all their blocks, as columns do, so they are read together: on a CPU
all, since it takes them over where they lie, else as many as the host should hold at one time.
"""

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rl.artifacts.content import block_bounds, block_hash
from rl.artifacts.shards import BATCH_BYTES, Part, num_threads, part_of
from rl.errors import MeshdialError
from rl.models.safetensors_file import Entry, read_header

MAX_HOST_BYTES = 64 * 2**20  # of parts on their way from file to device, unless one is larger
MAX_SHARED_BYTES = 2**30  # of one tensor's parts on their way to devices with their own memory
_ALIGNMENT = 64  # bytes: a CPU device takes memory so aligned over without a copy


class Wanted(NamedTuple):
    """The tensor of a file that is wanted, whether it is transposed in memory, where, as what."""

    stored_name: str
    is_transposed: bool
    sharding: jax.sharding.Sharding
    dtype: np.dtype


class Loaded(NamedTuple):
    """Parameters on their devices, and how many bytes of files this process read for that."""

    parameters: dict[str, jax.Array]
    bytes_read: int


def read_tensors(file: Path, tensors: Mapping[str, Any], wanted: Mapping[str, Wanted]) -> Loaded:
    """The `wanted` parameters of a file, each block that was read checked against its hash.

    `tensors` is what `write_tensors` said of the file. MeshdialError if the file is missing or cut
    short, or if a wanted tensor is missing, misshapen or damaged.
    """
    header = read_header(file)
    sources = {name: _Source(file, header, tensors, want) for name, want in wanted.items()}
    bytes_read = 0
    with open(file, "rb", buffering=0) as opened, ThreadPoolExecutor(num_threads()) as pool:
        waiting: deque[_Load] = deque()
        for load in _loads(sources.values()):
            while waiting and sum(w.nbytes for w in waiting) + load.nbytes > MAX_HOST_BYTES:
                waiting.popleft().place()
            bytes_read += load.start(pool, opened.fileno())
            waiting.append(load)
        while waiting:
            waiting.popleft().place()
    return Loaded({name: source.assembled() for name, source in sources.items()}, bytes_read)


class _Source:
    """A tensor of a file, and its parts, as stored, on their devices."""

    def __init__(self, file: Path, header: Mapping[str, Entry], tensors: Mapping, want: Wanted):
        self.file, self.want, name = file, want, want.stored_name
        if name not in header:
            raise MeshdialError(f"{file} has no tensor {name}")
        self.entry, told = header[name], tensors[name]
        for key, found in (("dtype", self.entry.dtype.name), ("shape", list(self.entry.shape))):
            if found != told[key]:
                raise MeshdialError(
                    f"{file}: tensor {name} has {key} {found}, its manifest says {told[key]}"
                )
        self.hashes = told["blocks"]
        self.bounds = block_bounds(self.entry.shape, self.entry.dtype.itemsize)
        self.row_bytes = math.prod(self.entry.shape[1:]) * self.entry.dtype.itemsize
        self.shape = _turned(self.entry.shape, want.is_transposed)
        self.devices: dict[Part, list[jax.Device]] = {}
        for device, index in want.sharding.addressable_devices_indices_map(self.shape).items():
            part = _turned(part_of(index, self.shape), want.is_transposed)
            self.devices.setdefault(part, []).append(device)
        self.placed: list[jax.Array] = []

    def part_bytes(self, part: Part) -> int:
        return math.prod(stop - start for start, stop in part) * self.want.dtype.itemsize

    def read_together(self) -> Iterator[list[Part]]:
        """The parts in lists, each of which is on the host at one time."""
        limit = math.inf if _are_on_host(self.want.sharding) else MAX_SHARED_BYTES
        chosen, nbytes = [], 0
        for part in sorted(self.devices):
            if chosen and nbytes + self.part_bytes(part) > limit:
                yield chosen
                chosen, nbytes = [], 0
            chosen.append(part)
            nbytes += self.part_bytes(part)
        if chosen:
            yield chosen

    def fill(self, descriptor: int, number: int, targets: Mapping[Part, np.ndarray]) -> None:
        """Reads a block, verifies it, and copies what belongs to the targets."""
        start, stop = self.bounds[number]
        shape = (stop - start, *self.entry.shape[1:])
        own = self._own_memory(start, shape, targets)
        block = np.empty(shape, self.entry.dtype) if own is None else own
        raw = block.reshape(-1).view(np.uint8)
        _read_at(self.file, descriptor, raw, self.entry.start + start * self.row_bytes)
        if block_hash(raw) != self.hashes[number]:
            raise MeshdialError(
                f"{self.file} is damaged: block {number} of tensor {self.want.stored_name} does "
                "not match its hash"
            )
        if own is None:
            for part, target in targets.items():
                _copy_rows(block, start, part, target)

    def _own_memory(
        self, start: int, shape: tuple[int, ...], targets: Mapping[Part, np.ndarray]
    ) -> np.ndarray | None:
        """Where a block can be read to its last place: it all belongs to one target as it is."""
        part, target = next(iter(targets.items()))
        first, last = part[0]
        is_within = first <= start and start + shape[0] <= last
        if len(targets) > 1 or not is_within or target.dtype != self.entry.dtype:
            return None
        rows = target[start - first : start - first + shape[0]]
        return rows if rows.shape == shape else None

    def assembled(self) -> jax.Array:
        return jax.make_array_from_single_device_arrays(
            self.shape, self.want.sharding, self.placed, dtype=self.want.dtype
        )


class _Load:
    """Parts of tensors that are on the host at one time and go to their devices together."""

    def __init__(self, sources: Mapping[_Source, list[Part]]):
        self.sources = sources
        self.nbytes = sum(source.part_bytes(p) for source, parts in sources.items() for p in parts)
        self.targets: dict[_Source, dict[Part, np.ndarray]] = {}
        self.futures: list[Future] = []

    def start(self, pool: ThreadPoolExecutor, descriptor: int) -> int:
        """Has the pool's threads fill the parts; returns the bytes that they will read."""
        batch, waiting, total = [], 0, 0
        for source, parts in self.sources.items():
            self.targets[source] = {part: _aligned(part, source.want.dtype) for part in parts}
            for number, (start, stop) in enumerate(source.bounds):
                covered = {
                    part: target
                    for part, target in self.targets[source].items()
                    if max(start, part[0][0]) < min(stop, part[0][1])
                }
                if not covered:
                    continue
                batch.append((source, number, covered))
                waiting += (stop - start) * source.row_bytes
                if waiting >= BATCH_BYTES:
                    self.futures.append(pool.submit(_fill_all, descriptor, batch))
                    batch, waiting, total = [], 0, total + waiting
        if batch:
            self.futures.append(pool.submit(_fill_all, descriptor, batch))
        return total + waiting

    def place(self) -> None:
        """Moves the parts to their devices once they are filled, and lets go of them."""
        for future in self.futures:
            future.result()
        self.futures = []
        moves, nbytes = [], 0
        for source, targets in self.targets.items():
            for part in list(targets):
                if moves and nbytes + source.part_bytes(part) > MAX_HOST_BYTES // 2:
                    _move(moves)
                    moves, nbytes = [], 0
                target = targets.pop(part)
                turned = target.T if source.want.is_transposed else target
                moves += [(source, turned, device) for device in source.devices[part]]
                nbytes += source.part_bytes(part)
        _move(moves)


def _move(moves: list[tuple[_Source, np.ndarray, jax.Device]]) -> None:
    """A device may take a part over or copy it: of large ones, one copy at a time."""
    arrays = jax.device_put([move[1] for move in moves], [move[2] for move in moves])
    for (source, _, _), array in zip(moves, jax.block_until_ready(arrays), strict=True):
        source.placed.append(array)


def _loads(sources: Iterable[_Source]) -> Iterator[_Load]:
    """All parts of all tensors: small ones together, as many as fit."""
    chosen: dict[_Source, list[Part]] = {}
    nbytes = 0
    for source in sources:
        for parts in source.read_together():
            size = sum(map(source.part_bytes, parts))
            if chosen and nbytes + size > MAX_HOST_BYTES // 2:
                yield _Load(chosen)
                chosen, nbytes = {}, 0
            chosen.setdefault(source, []).extend(parts)
            nbytes += size
    if chosen:
        yield _Load(chosen)


def _are_on_host(sharding: jax.sharding.Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def _fill_all(descriptor: int, batch: list[tuple[_Source, int, Mapping]]) -> None:
    for source, number, targets in batch:
        source.fill(descriptor, number, targets)


def _copy_rows(block: np.ndarray, start: int, part: Part, target: np.ndarray) -> None:
    """What a block, whose first row is `start`, has of a part."""
    (first, last), *others = part
    low, high = max(start, first), min(start + block.shape[0], last)
    columns = tuple(slice(*bounds) for bounds in others)
    with np.errstate(over="ignore"):  # a narrower dtype may not hold every value
        target[low - first : high - first] = block[(slice(low - start, high - start), *columns)]


def _turned(axes: tuple, is_transposed: bool) -> tuple:
    return axes[::-1] if is_transposed else axes


def _aligned(part: Part, dtype: np.dtype) -> np.ndarray:
    """Memory for a part, such that a CPU device can take it over."""
    shape = tuple(stop - start for start, stop in part)
    raw = np.empty(math.prod(shape) * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + raw.size - _ALIGNMENT].view(dtype).reshape(shape)


def _read_at(file: Path, descriptor: int, raw: np.ndarray, place: int) -> None:
    done = 0
    while done < raw.size:
        count = os.preadv(descriptor, [raw[done:].data], place + done)
        if count == 0:
            raise MeshdialError(f"{file} is cut short: it ends at byte {place + done}")
        done += count
