"""A run's numbers in one tidy table: run, iteration, stage, name, value.

Each measure reads only the columns that it needs, one iteration at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rl.artifacts import COMPONENT_PREFIX, SCHEMAS, read_json
from rl.errors import MeshdialError
from rl.report.columns import finish_fractions, floats, read_columns, token_counts
from rl.report.held_out import evaluation_figures, sample_figures

Figures = dict[str, float]
Row = tuple[int, str, str, float]


def collect_metrics(
    run: str, iterations: Mapping[int, Mapping[str, Path]], pass_at: Sequence[int] = ()
) -> pa.Table:
    """All figures of a run, by iteration, stage and name; nothing in them depends on the clock.

    `iterations[n]` maps an artifact's name (rollouts, rewards, advantages, update, critic_update,
    evaluation) to its file; what an iteration does not have is left out (iteration 0 has its
    evaluation only). `pass_at` are the k of pass@k, where an evaluation has samples for it.

    Raises MeshdialError for an unknown artifact name, or a file that cannot be read.
    """
    rows = []
    for iteration in sorted(iterations):
        paths = iterations[iteration]
        _check_names(paths)
        for name, (stage, measure) in MEASURES.items():
            if name in paths:
                figures = measure(paths)
                if name == "evaluation":
                    figures |= sample_figures(paths[name], pass_at)
                rows += [(iteration, stage, key, float(figures[key])) for key in sorted(figures)]
    return _tidy(run, rows)


def collect_timings(run: str, iterations: Mapping[int, Mapping[str, Path]]) -> pa.Table:
    """The numbers in each stage's timings file, in the same columns as the metrics.

    `iterations[n]` maps a stage to its file. A file that does not exist is left out: timings are a
    record beside the run, not a part of it. Nested numbers get dotted names.
    """
    rows = []
    for iteration in sorted(iterations):
        for stage, path in sorted(iterations[iteration].items()):
            if Path(path).exists():
                numbers = sorted(_numbers(read_json(path)))
                rows += [(iteration, stage, name, value) for name, value in numbers]
    return _tidy(run, rows)


def series(table: pa.Table, stage: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """One figure over a run: its iterations (int32, ascending) and its values (float64)."""
    chosen = table.filter((pc.field("stage") == stage) & (pc.field("name") == name))
    chosen = chosen.sort_by("iteration")
    return chosen["iteration"].to_numpy(), chosen["value"].to_numpy()


def run_name(table: pa.Table) -> str:
    """The run that a metrics table belongs to; MeshdialError where it is not exactly one."""
    names = pc.unique(table["run"]).to_pylist()
    if len(names) != 1:
        raise MeshdialError(f"A metrics table must hold exactly one run, but this has {names}.")
    return names[0]


def _tidy(run: str, rows: list[Row]) -> pa.Table:
    iterations, stages, names, values = zip(*rows, strict=True) if rows else ((), (), (), ())
    columns = [[run] * len(rows), iterations, stages, names, values]
    schema = SCHEMAS["metrics"]
    return pa.table(
        [pa.array(c, field.type) for c, field in zip(columns, schema, strict=True)], schema=schema
    )


def _check_names(paths: Mapping[str, Path]) -> None:
    unknown = sorted(set(paths) - set(MEASURES))
    if unknown:
        raise MeshdialError(
            f"There are no metrics of an artifact named {unknown[0]!r}; known: "
            f"{', '.join(MEASURES)}."
        )


def _numbers(value: Mapping, prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            yield from _numbers(entry, f"{prefix}{key}.")
        elif isinstance(entry, int | float) and not isinstance(entry, bool):
            yield f"{prefix}{key}", float(entry)


def _rollout_figures(paths: Mapping[str, Path]) -> Figures:
    table = read_columns(
        paths["rollouts"], "rollouts", ["completion_mask", "finish_reason", "policy_version"]
    )
    lengths = token_counts(table["completion_mask"])
    p10, p90 = np.percentile(lengths, [10, 90])
    versions = table["policy_version"].to_numpy()
    return {
        "num_samples": len(lengths),
        "num_tokens": lengths.sum(),
        "completion_length_mean": lengths.mean(),
        "completion_length_p10": p10,
        "completion_length_p90": p90,
        "policy_version": versions.max(),
        **finish_fractions(table["finish_reason"]),
    }


def _reward_figures(paths: Mapping[str, Path]) -> Figures:
    table = read_columns(paths["rewards"], "rewards", ["reward", "scored_ok"], COMPONENT_PREFIX)
    scored = table.filter(pc.field("scored_ok"))
    figures = {"num_samples": table.num_rows, "num_unscored": table.num_rows - scored.num_rows}
    if scored.num_rows == 0:
        return figures
    for name in table.column_names:
        if name.startswith(COMPONENT_PREFIX):
            figures[f"{name}_mean"] = floats(scored[name]).mean()
    rewards = floats(scored["reward"])
    return figures | {
        "reward_mean": rewards.mean(),
        "reward_std": rewards.std(),
        "reward_min": rewards.min(),
        "reward_max": rewards.max(),
    }


def _advantage_figures(paths: Mapping[str, Path]) -> Figures:
    """Spread within groups is what a group-relative advantage learns from."""
    names = ["group_id", "reward", "shaped_reward", "is_degenerate", "is_used"]
    table = read_columns(paths["advantages"], "advantages", names)
    encoded = pc.dictionary_encode(table["group_id"].combine_chunks())
    group_numbers, num_groups = encoded.indices.to_numpy(), len(encoded.dictionary)
    is_degenerate = np.zeros(num_groups, bool)
    is_degenerate[group_numbers] = table["is_degenerate"].to_numpy()
    is_scored = table["reward"].is_valid().to_numpy()
    rewards = floats(table["reward"].drop_null())
    deviations = _group_deviations(rewards, group_numbers[is_scored], num_groups)
    figures = {
        "num_groups": num_groups,
        "num_degenerate_groups": is_degenerate.sum(),
        "degenerate_group_fraction": is_degenerate.mean(),
        "num_groups_left_out": num_groups - _num_groups(table, table["is_used"]),
        "num_degenerate_groups_used": _num_groups(
            table, pc.and_(table["is_used"], table["is_degenerate"])
        ),
    }
    if is_scored.any():
        figures["shaped_reward_mean"] = floats(table["shaped_reward"].drop_null()).mean()
    return figures | ({"group_reward_std_mean": deviations.mean()} if len(deviations) else {})


def _num_groups(table: pa.Table, is_chosen: pa.ChunkedArray) -> int:
    return len(pc.unique(table["group_id"].filter(is_chosen)))


def _group_deviations(
    rewards: np.ndarray, group_numbers: np.ndarray, num_groups: int
) -> np.ndarray:
    """The population standard deviation of the rewards of each group that has any."""
    counts = np.bincount(group_numbers, minlength=num_groups)
    means = np.bincount(group_numbers, rewards, num_groups) / np.maximum(counts, 1)
    squares = np.bincount(group_numbers, (rewards - means[group_numbers]) ** 2, num_groups)
    return np.sqrt(squares[counts > 0] / counts[counts > 0])


def _update_figures(paths: Mapping[str, Path]) -> Figures:
    return dict(_numbers(read_json(paths["update"])))


def _critic_figures(paths: Mapping[str, Path]) -> Figures:
    return dict(_numbers(read_json(paths["critic_update"])))


MEASURES = {
    "rollouts": ("generate_rollouts", _rollout_figures),
    "rewards": ("score_rewards", _reward_figures),
    "advantages": ("estimate_advantages", _advantage_figures),
    "update": ("update_actor", _update_figures),
    "critic_update": ("update_critic", _critic_figures),
    "evaluation": ("evaluate_policy", lambda paths: evaluation_figures(paths["evaluation"])),
}
