"""The ways to attend over pages, behind one interface.

`begin` turns the pools of all layers into what the steps of a dispatch work on, `attend` is given
to the network at each step, and `end` turns it back into pools. All see one replica's rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import jax

from rl.models.attention import Attend
from rl.rollout.attention import pool as pages
from rl.rollout.attention import xla
from rl.rollout.attention.pool import LayerPool


class Places(NamedTuple):
    """Where the rows of a dispatch read and write."""

    table_BN: jax.Array  # every page of each row in order, TRASH beyond
    position_B: jax.Array  # of the first token that each row feeds
    prompts: xla.SharedPrompts | None = None  # for backends that gather


@dataclass(frozen=True)
class InPlace:
    """A kernel that follows the table itself: append_and_attend(query_BHC, key_BKC, value_BKC,
    pool, table_BN, position_B, kind) -> (output_BHC, pool)."""

    name: str
    append_and_attend: Callable
    pool: ModuleType = pages
    gathers: bool = False

    def begin(self, pools: list[LayerPool], places: Places, num_steps: int) -> list[LayerPool]:
        return pools

    def attend(self, places: Places, number: jax.Array, num_steps: int) -> Attend:
        def attend(query_BHC, key_BKC, value_BKC, pool, kind):
            packed = (query_BHC, key_BKC, value_BKC, pool)
            position_B = places.position_B + number
            return self.append_and_attend(*packed, places.table_BN, position_B, kind)

        return attend

    def end(self, pools, caches, places: Places, num_steps: int) -> list[LayerPool]:
        return caches


@dataclass(frozen=True)
class Gathering:
    """Plain XLA, on what it gathers at the beginning of a dispatch."""

    name: str = "xla"
    pool: ModuleType = pages
    gathers: bool = True

    def begin(self, pools: list[LayerPool], places: Places, num_steps: int) -> list[xla.Gathered]:
        return [xla.gather(pool, places.prompts, num_steps) for pool in pools]

    def attend(self, places: Places, number: jax.Array, num_steps: int) -> Attend:
        def attend(query_BHC, key_BKC, value_BKC, gathered, kind):
            packed = (query_BHC, key_BKC, value_BKC, gathered)
            rows = (places.prompts, places.position_B)
            return xla.append_and_attend(*packed, *rows, number, num_steps, kind)

        return attend

    def end(self, pools, caches, places: Places, num_steps: int) -> list[LayerPool]:
        rows = (places.table_BN, places.position_B)
        return [
            xla.scatter(pool, gathered, *rows, num_steps)
            for pool, gathered in zip(pools, caches, strict=True)
        ]


Backend = InPlace | Gathering
