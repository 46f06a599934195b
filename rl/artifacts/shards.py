"""The values of an array a block at a time, wherever they lie, and work done on each block.

A block is some rows along one axis. Where one process holds all of it, on the host or on several
devices, that process puts it together; where several do, their devices add it up, each giving what
it has and zeros for the rest. So no process ever holds more of an array than its devices do, and a
few blocks. Each block is worked on by one process, and by threads within it.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any, NamedTuple

import numpy as np

from rl import group

BATCH_BYTES = 4 * 2**20  # of small blocks, that one thread takes at once
MAX_THREADS = 8

Bounds = list[tuple[int, int]]
Part = tuple[tuple[int, int], ...]
"""The (start, stop) of a part of an array along each of its axes."""


class Blocked(NamedTuple):
    """An array (NumPy or JAX), the axis that it is cut along, and the (start, stop) of each block;
    a scalar is one block."""

    array: Any
    axis: int
    bounds: Bounds


def num_threads() -> int:
    """How many threads copy and hash side by side."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return min(MAX_THREADS, len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)


def each_block(
    arrays: Mapping[str, Blocked], work: Callable[[str, int, np.ndarray], Any]
) -> dict[str, dict[int, Any]]:
    """{name: {block's number: work(name, number, block)}} of the blocks that fall to this process.

    `block` has the array's axes and lies in host memory, perhaps the array's own. All processes of
    the group call this for the same arrays. The first error of any work is raised in the end, when
    the blocks that need several processes have been through.
    """
    results: dict[str, dict[int, Any]] = {name: {} for name in arrays}

    def run(batch: list) -> None:
        for name, number, read in batch:
            results[name][number] = work(name, number, read())

    batches = _batches(arrays)
    first, second = next(batches, None), next(batches, None)
    if second is None:
        run(first or [])
        return results
    with ThreadPoolExecutor(num_threads()) as pool:
        _run_all(pool, run, [first, second], batches)
    return results


def _run_all(pool: ThreadPoolExecutor, run: Callable, head: list, rest: Iterator[list]) -> None:
    """Runs every batch, with few waiting, since one may hold the memory of its block."""
    ahead, futures = BoundedSemaphore(2 * num_threads()), []

    def done(future: Future) -> None:
        ahead.release()

    for batches in (head, rest):
        for batch in batches:
            ahead.acquire()
            futures.append(pool.submit(run, batch))
            futures[-1].add_done_callback(done)
    for future in futures:
        future.result()


def _batches(arrays: Mapping[str, Blocked]) -> Iterator[list]:
    """The blocks of this process as lists of (name, number, how to read it)."""
    batch, waiting = [], 0
    for name, blocked in arrays.items():
        for number, nbytes, read in _own_blocks(blocked):
            batch.append((name, number, read))
            waiting += nbytes
            if waiting >= BATCH_BYTES:
                yield batch
                batch, waiting = [], 0
    if batch:
        yield batch


def _own_blocks(blocked: Blocked) -> Iterator[tuple[int, int, Callable[[], np.ndarray]]]:
    array, axis, bounds = blocked
    length = array.shape[axis] if array.ndim else 1
    row_bytes = array.size // max(length, 1) * np.dtype(array.dtype).itemsize
    source = _source(array, axis)
    for number, (start, stop) in enumerate(bounds):
        owner, is_split = source.owner(number, start, stop)
        nbytes = (stop - start) * row_bytes
        if is_split:
            block = source.gathered(start, stop)
            if owner == group.rank():
                yield number, nbytes, functools.partial(np.asarray, block)
        elif owner == group.rank():
            yield number, nbytes, functools.partial(source.rows, start, stop)


def _source(array: Any, axis: int) -> "_Whole | _Sharded":
    return _Sharded(array, axis) if _is_sharded(array) else _Whole(array, axis)


def _is_sharded(array: Any) -> bool:
    """Whether its values lie elsewhere than in one piece of host memory; JAX is not imported."""
    if not hasattr(array, "addressable_shards") or array.ndim == 0:
        return False
    return len(array.sharding.device_set) > 1 or not _is_on_host(array)


class _Whole:
    """An array that every process of the group has as a whole."""

    def __init__(self, array: Any, axis: int):
        self.host, self.axis = np.asarray(array), axis

    def owner(self, number: int, start: int, stop: int) -> tuple[int, bool]:
        return number % group.size(), False

    def rows(self, start: int, stop: int) -> np.ndarray:
        host = self.host
        return host[_rows(host.ndim, self.axis, start, stop)] if host.ndim else host


class _Sharded:
    """A JAX array on several devices, perhaps those of several processes, or on an accelerator."""

    def __init__(self, array: Any, axis: int):
        self.array, self.axis = array, axis
        local = {}
        for shard in array.addressable_shards:
            local.setdefault(part_of(shard.index, array.shape), shard.data)
        self.pieces = [(part, _hosted(piece)) for part, piece in local.items()]
        self.holdings = _holdings(array.sharding, array.shape)

    def owner(self, number: int, start: int, stop: int) -> tuple[int, bool]:
        """(the process that works on a block, whether it must be gathered first)."""
        if self.array.is_fully_addressable and group.size() == 1:
            return 0, False
        wanted = (stop - start) * (self.array.size // self.array.shape[self.axis])
        whole = [
            process
            for process, parts in self.holdings.items()
            if sum(_overlap(part, self.axis, start, stop) for part in parts) == wanted
        ]
        chosen = whole or list(self.holdings)
        return chosen[number % len(chosen)], not whole

    def rows(self, start: int, stop: int) -> np.ndarray:
        """A block of which this process has every value."""
        block = None
        for part, piece in self.pieces:
            first, last = part[self.axis]
            low, high = max(start, first), min(stop, last)
            if low >= high:
                continue
            rows = np.asarray(piece[_rows(len(part), self.axis, low - first, high - first)])
            if block is None:
                shape = list(self.array.shape)
                shape[self.axis] = stop - start
                if rows.shape == tuple(shape):
                    return rows
                block = np.empty(shape, self.array.dtype)
            place = [slice(*bounds) for bounds in part]
            place[self.axis] = slice(low - start, high - start)
            block[tuple(place)] = rows
        return block

    def gathered(self, start: int, stop: int) -> Any:
        """A block that several processes hold, on a device of each of them; None for others."""
        if not self.pieces:
            return None
        from rl.artifacts.gathering import summed  # imports JAX, which readers of tables do without

        sum_up = summed(self.array.sharding, self.array.ndim, self.axis, stop - start)
        return sum_up(self.array, np.int32(start)).addressable_data(0).block_until_ready()


@functools.lru_cache(maxsize=4096)
def _holdings(sharding: Any, shape: tuple[int, ...]) -> dict[int, list[Part]]:
    """{process: the parts of such an array that its devices hold, each once}."""
    found: dict[int, dict[Part, None]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(device.process_index, {})[part_of(index, shape)] = None
    return {process: list(found[process]) for process in sorted(found)}


def part_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Part:
    """A device's index into an array of this shape, with its bounds filled in."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _overlap(part: Part, axis: int, start: int, stop: int) -> int:
    """How many values of the rows [start, stop) a part of an array has."""
    cut = (*part[:axis], (max(start, part[axis][0]), min(stop, part[axis][1])), *part[axis + 1 :])
    return math.prod(max(0, last - first) for first, last in cut)


def _rows(num_axes: int, axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return tuple(slice(start, stop) if a == axis else slice(None) for a in range(num_axes))


def _is_on_host(piece: Any) -> bool:
    return next(iter(piece.devices())).platform == "cpu"


def _hosted(piece: Any) -> Any:
    """A view of its memory where that is the host's; else itself, since an array that NumPy has
    copied keeps the copy."""
    return np.asarray(piece) if _is_on_host(piece) else piece
