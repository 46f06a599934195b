"""From rollouts to the table of rewards: every function, its column, and the weighted sum."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rl.artifacts import COMPONENT_PREFIX, make_table
from rl.errors import MeshdialError
from rl.rewards.built_in import BUILT_INS
from rl.rewards.child import as_reward, described, wanted_arguments
from rl.rewards.functions import RewardFunction, module_file, parse_functions, search_path
from rl.rewards.pool import Call, Score, Target, score_in_processes

# The columns of a rollout that a reward function may name as arguments, besides `seed`.
ROLLOUT_ARGUMENTS = (
    *("completion", "ground_truth", "prompt", "info", "completion_tokens", "finish_reason"),
    *("prompt_id", "sample_id", "group_id", "policy_version"),
)


def score(
    rollouts: pa.Table,
    functions: Sequence[Mapping[str, Any]],
    seed: int,
    time_limit_s: float,
    *,
    memory_limit_bytes: int | None = None,
    num_processes: int = 2,
    check_alive: Callable[[], None] = lambda: None,
) -> pa.Table:
    """The rewards of `rollouts` (kind `rewards`), a row each and in their order.

    `functions` is the config's list of {function, weight, name, options}. A sample's reward is the
    weighted sum of its components, and null unless each of them has a value; `failure` says which
    has not and why. `time_limit_s` and `memory_limit_bytes` bound one call of a user's function.
    MeshdialError if a function cannot be found, or cannot be called with what there is.
    """
    parsed = parse_functions(functions)
    rows = _arguments(rollouts, seed)
    components = {}
    for function in parsed:
        if not function.is_built_in or BUILT_INS[function.function].may_hang:
            target = _target(function, time_limit_s, memory_limit_bytes)
            calls = [Call(row, _call_seed(seed, row["sample_id"])) for row in rows]
            scores = score_in_processes(target, calls, num_processes, check_alive)
        else:
            scores = _built_in_scores(function, rows)
        components[function.name] = scores
    totals = [_total(parsed, terms) for terms in zip(*components.values(), strict=True)]
    columns = {
        "sample_id": [row["sample_id"] for row in rows],
        "reward": [total.value for total in totals],
        "scored_ok": [total.value is not None for total in totals],
        "failure": [total.failure for total in totals],
    }
    for name, scores in components.items():
        columns[COMPONENT_PREFIX + name] = [score.value for score in scores]
    return make_table("rewards", columns)


def _arguments(rollouts: pa.Table, seed: int) -> list[dict[str, Any]]:
    rows = rollouts.select(ROLLOUT_ARGUMENTS).to_pylist()
    return [row | {"info": json.loads(row["info"]), "seed": seed} for row in rows]


def _target(
    function: RewardFunction, time_limit_s: float, memory_limit_bytes: int | None
) -> Target:
    if function.is_built_in:
        # By its bare name, so that the process does not import the whole package.
        module, name = "built_in", function.function
        folders = [str(Path(__file__).parent), *search_path()]
    else:
        module, name = function.module_and_function
        module_file(module)
        folders = search_path()
    return Target(module, name, folders, function.options, time_limit_s, memory_limit_bytes)


def _built_in_scores(function: RewardFunction, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
    if not rows:
        return []
    call = BUILT_INS[function.function].function
    try:
        wanted = wanted_arguments(call, rows[0].keys(), function.options)
    except TypeError as error:
        raise MeshdialError(f"reward function {function.name}: {error}") from None
    scores = []
    for row in rows:
        try:
            value = as_reward(call(**{name: row[name] for name in wanted}, **function.options))
            scores.append(Score(value))
        except ValueError as error:
            scores.append(Score(None, described(error)))
    return scores


def _total(functions: Sequence[RewardFunction], terms: Sequence[Score]) -> Score:
    """The weighted sum of one sample's components."""
    failures = [
        f"{function.name}: {term.failure}"
        for function, term in zip(functions, terms, strict=True)
        if term.value is None
    ]
    if failures:
        return Score(None, "; ".join(failures))
    products = (f.weight * term.value for f, term in zip(functions, terms, strict=True))
    try:
        # Not sum, which rounds differently from one Python version to another.
        total = math.fsum(products)
    except (OverflowError, ValueError):
        total = math.inf
    return Score(total) if math.isfinite(total) else Score(None, "the weighted sum is not finite")


def _call_seed(seed: int, sample_id: str) -> int:
    digest = hashlib.sha256(f"reward call/{seed}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
