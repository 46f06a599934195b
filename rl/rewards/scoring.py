"""From rollouts to the table of rewards: every component, its column, and the weighted sum."""

import atexit
import hashlib
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from rl.artifacts import COMPONENT_PREFIX, make_table
from rl.errors import MeshdialError
from rl.rewards.built_in import BUILT_INS
from rl.rewards.child import as_reward, described, wanted_arguments
from rl.rewards.functions import (
    RewardFunction,
    module_file,
    parse_functions,
    parse_models,
    search_path,
)
from rl.rewards.normalising import normalised
from rl.rewards.pool import score_in_processes
from rl.rewards.processes import Call, Mould, Score, Target

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
    models: Sequence[Mapping[str, Any]] = (),
    model_scores: Mapping[str, Sequence[Score]] | None = None,
    memory_limit_bytes: int | None = None,
    num_processes: int = 2,
    check_alive: Callable[[], None] = lambda: None,
) -> pa.Table:
    """The rewards of `rollouts` (kind `rewards`), a row each and in their order.

    `functions` is the config's list of {function, weight, name, options, normalise}; `models` is a
    list of {name, weight, normalise}, and `model_scores` has the scores of each by its name, in the
    order of the rollouts. A sample's reward is the weighted sum of its components, each normalised
    over its group or the batch where that is asked for; it is null unless each has a value, and
    `failure` says which has not and why. The component's own column has the value as it was
    returned. `time_limit_s` and `memory_limit_bytes` bound one call of a function that runs in
    processes of its own. MeshdialError if a function cannot be found, or cannot be called with what
    there is.
    """
    terms = [*parse_functions(functions), *parse_models(models)]
    _check_terms(terms, rollouts.num_rows, model_scores or {})
    rows = _arguments(rollouts, seed)
    components = {name: list(scores) for name, scores in (model_scores or {}).items()}
    for function in parse_functions(functions):
        if function.is_trusted:
            components[function.name] = _built_in_scores(function, rows)
            continue
        target = _target(function, time_limit_s, memory_limit_bytes)
        calls = [Call(row, _call_seed(seed, row["sample_id"])) for row in rows]
        with _mould(function, target, list(rows[0]) if rows else []) as mould:
            components[function.name] = score_in_processes(mould, calls, num_processes, check_alive)
    totals = _totals(terms, components, [row["group_id"] for row in rows])
    columns = {
        "sample_id": [row["sample_id"] for row in rows],
        "reward": [total.value for total in totals],
        "scored_ok": [total.value is not None for total in totals],
        "failure": [total.failure for total in totals],
    }
    for term in terms:
        values = [score.value for score in components[term.name]]
        columns[COMPONENT_PREFIX + term.name] = values
    return make_table("rewards", columns)


def _check_terms(terms: Sequence, num_rows: int, model_scores: Mapping[str, Sequence]) -> None:
    if not terms:
        raise MeshdialError("reward.functions is empty and there is no model; expected one of them")
    names = [term.name for term in terms]
    for name in names:
        if names.count(name) > 1:
            raise MeshdialError(
                f"reward: two components are called {name}; give one of them a name of its own"
            )
    for name, scores in model_scores.items():
        if len(scores) != num_rows:
            raise MeshdialError(f"reward model {name}: {len(scores)} scores of {num_rows} rollouts")
    functions = {term.name for term in terms if isinstance(term, RewardFunction)}
    if functions | {*model_scores} != {*names}:
        raise MeshdialError(
            f"reward models {', '.join(sorted({*names} - functions)) or 'none'} are asked for, "
            f"and there are scores of {', '.join(sorted(model_scores)) or 'none'}"
        )


def _arguments(rollouts: pa.Table, seed: int) -> list[dict[str, Any]]:
    rows = rollouts.select(ROLLOUT_ARGUMENTS).to_pylist()
    return [row | {"info": json.loads(row["info"]), "seed": seed} for row in rows]


def _target(
    function: RewardFunction, time_limit_s: float, memory_limit_bytes: int | None
) -> Target:
    if function.is_built_in:
        # By its bare name, so that the process does not import the whole package.
        module, name = BUILT_INS[function.function].module, function.function
        folders = [*search_path(), str(Path(__file__).parent)]
    else:
        module, name = function.module_and_function
        module_file(module)
        folders = search_path()
    return Target(module, name, folders, function.options, time_limit_s, memory_limit_bytes)


_KEPT: dict[str, Mould] = {}


@contextmanager
def _mould(function: RewardFunction, target: Target, offered: Sequence[str]) -> Iterator[Mould]:
    """Where a function's processes come from.

    Those of built-ins outlive the batch, so that their packages are imported once in a program. A
    user's module is imported again for each batch: it may have been edited.
    """
    if not function.is_built_in:
        mould = Mould(target, offered)
        try:
            yield mould
        finally:
            mould.end()
        return
    key = json.dumps([vars(target), *offered], sort_keys=True)
    mould = _KEPT.get(key)
    if mould is None or mould.is_abandoned:
        mould = _KEPT[key] = Mould(target, offered)
    yield mould


@atexit.register
def _end_kept() -> None:
    while _KEPT:
        _KEPT.popitem()[1].end()


def _built_in_scores(function: RewardFunction, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
    if not rows:
        return []
    module = importlib.import_module(f"rl.rewards.{BUILT_INS[function.function].module}")
    call = getattr(module, function.function)
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


def _totals(
    terms: Sequence, components: Mapping[str, Sequence[Score]], group_ids: Sequence[str]
) -> list[Score]:
    """The weighted sum of each sample's components."""
    keys = {"group": group_ids, "batch": [None] * len(group_ids)}
    columns = [
        components[term.name]
        if term.normalise == "none"
        else normalised(components[term.name], keys[term.normalise])
        for term in terms
    ]
    return [_total(terms, scores) for scores in zip(*columns, strict=True)]


def _total(terms: Sequence, scores: Sequence[Score]) -> Score:
    """The weighted sum of one sample's components."""
    failures = [
        f"{term.name}: {score.failure}"
        for term, score in zip(terms, scores, strict=True)
        if score.value is None
    ]
    if failures:
        return Score(None, "; ".join(failures))
    products = (term.weight * score.value for term, score in zip(terms, scores, strict=True))
    try:
        # Not sum, which rounds differently from one Python version to another.
        total = math.fsum(products)
    except (OverflowError, ValueError):
        total = math.inf
    return Score(total) if math.isfinite(total) else Score(None, "the weighted sum is not finite")


def _call_seed(seed: int, sample_id: str) -> int:
    digest = hashlib.sha256(f"reward call/{seed}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
