"""Host memory that writing and reading one large tensor takes, in a process or group of its own.

    python -c "from tests.peak_memory import main; main()" FILE

`main` prints, for each way of sharding and storing it, the largest part that a device holds and
the bytes that an export and a load needed beside what they were given and what they left.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl import group
from rl.block_reader import Wanted, read_tensors
from rl.block_writer import Stored, write_tensors

SHAPE = (8192, 8192)


def status(key: str) -> int:
    """A figure of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def measured(action: Callable[[], Any]) -> tuple[Any, int]:
    """(what the action gives, the most memory that was in use at a time beside that of before)."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = status("VmRSS")
    result = jax.block_until_ready(action())
    return result, status("VmHWM") - before


def rows() -> jax.Array:
    return jax.lax.broadcasted_iota("float32", SHAPE, 0)


def measure(file: Path, sharding: NamedSharding, is_transposed: bool) -> dict[str, int]:
    array = jax.block_until_ready(jax.jit(rows, out_shardings=sharding)())
    parts = [shard.data.nbytes for shard in array.addressable_shards]
    dtype, stored = array.dtype, {"w": Stored(array, is_transposed)}
    tensors, export = measured(lambda: write_tensors(file, stored, dtype))
    stored.clear()
    del array
    wanted = {"w": Wanted("w", is_transposed, sharding, np.dtype("float32"))}
    loaded, load = measured(lambda: read_tensors(file, tensors, wanted))
    assert jax.jit(lambda x: (x == rows()).all())(loaded.parameters["w"])
    return {"part": max(parts), "export": export, "load": load - sum(parts)}


def main() -> None:
    group.join()
    mesh = Mesh(np.array(jax.devices()), ("x",))
    found = [
        measure(Path(sys.argv[1]), NamedSharding(mesh, PartitionSpec(*axes)), is_transposed)
        for axes in (("x",), (None, "x"))
        for is_transposed in (False, True)
    ]
    print(json.dumps(found))
