"""What a process holds of weights: a cache of files, under a byte budget."""

import os
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import jax

from rl.context import Context
from rl.sharding import shard_bytes


@dataclass
class Memory:
    """Arrays, or trees and records of them, by kind, content id and place (a mesh's name).

    The entry that was used longest ago goes first. `budget_bytes` is half of the memory of this
    process's devices, on a CPU of the machine's, unless $MESHDIAL_CACHE_BYTES says otherwise.
    """

    budget_bytes: int = field(default_factory=lambda: _default_budget())
    entries: OrderedDict[tuple, Any] = field(default_factory=OrderedDict)

    def get(self, *key: str) -> Any:
        """The entry of this key, or None."""
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def elsewhere(self, *key: str) -> Any:
        """The entry of a key that goes on with another place, or None."""
        found = next((known for known in self.entries if known[: len(key)] == key), None)
        return None if found is None else self.get(*found)

    def put(self, value: Any, *key: str) -> None:
        self.entries[key] = value
        self.entries.move_to_end(key)
        while len(self.entries) > 1 and self._bytes() > self.budget_bytes:
            self.entries.popitem(last=False)

    def forget(self, tree: Any) -> None:
        """Let go of every entry that holds an array of `tree`: they are about to be overwritten."""
        doomed = {id(leaf) for leaf in jax.tree.leaves(tree)}
        for key, entry in list(self.entries.items()):
            if any(id(leaf) in doomed for leaf in jax.tree.leaves(entry)):
                del self.entries[key]

    def _bytes(self) -> int:
        # Aliases share their arrays, so that each array counts once, and each of its replicas.
        leaves = jax.tree.leaves(list(self.entries.values()))
        return sum({id(leaf): _held_bytes(leaf) for leaf in leaves}.values())


def _held_bytes(leaf: Any) -> int:
    """What a leaf takes on the devices of this process."""
    if not isinstance(leaf, jax.Array):
        return 0
    return shard_bytes(leaf) * len(leaf.sharding.addressable_devices)


def memory_of(context: Context) -> Memory:
    """The memory of the process that runs a stage."""
    return context.memory.setdefault("weights", Memory())


def _default_budget() -> int:
    given = os.environ.get("MESHDIAL_CACHE_BYTES")
    if given:
        return int(given)
    facts = [device.memory_stats() or {} for device in jax.local_devices()]
    on_devices = sum(fact.get("bytes_limit", 0) for fact in facts)
    return (on_devices or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2
