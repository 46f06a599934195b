"""What a run cost, from the timings that its stages left, as medians over its iterations.

The first iteration is left out where there are others, since its stages compile.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from rl.artifacts import read_json
from rl.errors import MeshdialError
from rl.report.columns import read_columns

STAGES = {
    "rollouts": "generate_rollouts",
    "reference": "reference_logprobs",
    "policy": "policy_logprobs",
    "values": "critic_values",
    "models": "score_with_models",
    "update": "update_actor",
    "critic": "update_critic",
}
"""Our stages that run programs of the model, and the rules that they are."""


@dataclass(frozen=True)
class Measured:
    """Medians. `meshes`: the names of those that it ran on, of the host too; `stages`: seconds in
    the model's programs and the loops that drive them, by stage; `whole`: seconds of every stage by
    its rule, files included; `sync`: its figures by name, those of the export and of the rollout's
    side together."""

    num_iterations: int
    meshes: frozenset[str]
    stages: dict[str, float]
    whole: dict[str, float]
    sync: dict[str, Any]
    tokens_per_second: float | None
    iteration_seconds: float | None
    peak_memory: float | None
    mean_completion: float | None
    mean_prompt: float | None


def measured_run(folder: Path) -> Measured:
    """Of a run's folder; MeshdialError where it holds no timings of an iteration."""
    numbers = sorted(path.parent for path in folder.glob("[0-9]*/timings") if path.is_dir())
    iterations = [(path, _timings(path)) for path in numbers if int(path.name) > 0]
    iterations = [(path, found) for path, found in iterations if "update_actor" in found]
    if not iterations:
        raise MeshdialError(f"--measured is {str(folder)!r}, which holds no timings of an update")
    steady = iterations[1:] or iterations
    costs = [found for _, found in steady]
    rollouts = [found["generate_rollouts"] for found in costs if "generate_rollouts" in found]
    return Measured(
        num_iterations=len(steady),
        meshes=frozenset(c["mesh"] for found in costs for c in found.values() if c.get("mesh")),
        stages=_medians(costs, "compute_seconds", STAGES),
        whole=_medians(costs, "seconds"),
        sync=_sync(costs),
        tokens_per_second=_median(
            r["rollout"]["num_tokens"] / r["rollout"]["seconds"] for r in rollouts if "rollout" in r
        ),
        iteration_seconds=_iteration_seconds([found for _, found in iterations]),
        peak_memory=max(cost.get("peak_memory_bytes", 0) for c in costs for cost in c.values()),
        **_lengths([path for path, _ in steady]),
    )


def _timings(folder: Path) -> dict[str, dict]:
    return {path.stem: read_json(path) for path in sorted((folder / "timings").glob("*.json"))}


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None


def _medians(costs: list[dict], key: str, stages: Mapping[str, str] | None = None) -> dict:
    rules = stages or {rule: rule for found in costs for rule in sorted(found)}
    medians = {
        stage: _median(found[rule][key] for found in costs if key in found.get(rule, {}))
        for stage, rule in rules.items()
    }
    return {stage: median for stage, median in medians.items() if median is not None}


def _sync(costs: list[dict]) -> dict[str, Any]:
    """The export tells what it wrote, the rollout's stage the rest: what it read, what moved to
    it."""
    found = {}
    for rule in ("sync_weights", "generate_rollouts"):
        syncs = [cost[rule]["sync"] for cost in costs if "sync" in cost.get(rule, {})]
        for key in sorted({key for sync in syncs for key in sync}):
            values = [sync[key] for sync in syncs if key in sync]
            is_number = all(isinstance(value, int | float) for value in values)
            if rule == "sync_weights" or key != "bytes_written":
                found[key] = _median(values) if is_number else statistics.mode(values)
    return found


def _iteration_seconds(costs: list[dict]) -> float | None:
    """From one update's end to the next; where the timings do not say when a stage began, or there
    is one iteration only, None."""
    updates = [found["update_actor"] for found in costs]
    ends = [update["started"] + update["seconds"] for update in updates if "started" in update]
    return _median(later - earlier for earlier, later in pairwise(ends))


def _lengths(folders: list[Path]) -> dict[str, float | None]:
    tables = [folder / "rollouts.parquet" for folder in folders]
    means = {"mean_completion": [], "mean_prompt": []}
    for path in tables:
        if path.is_file():
            table = read_columns(path, "rollouts", ["prompt_tokens", "completion_tokens"])
            for name, values in means.items():
                column = table[name.replace("mean_", "") + "_tokens"]
                values.append(pc.mean(pc.list_value_length(column)).as_py())
    return {name: _median(values) for name, values in means.items()}
