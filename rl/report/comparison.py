"""The runs of a sweep side by side: runs that differ only in their seed are one group.

1. `group_runs` puts the runs into groups and names each by the settings in which groups differ.
2. `comparison_rows` has one row a group: its settings, and its held-out accuracy pooled over seeds.
3. `comparison_svg` draws a mean curve for each group, in a band from its worst to its best seed.
4. `comparison_csv` and `comparison_html` write the rows down.
"""

import csv
import io
import itertools
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes

from rl.config import leaves
from rl.errors import MeshdialError
from rl.report.figures import draw_line
from rl.report.intervals import wilson_interval
from rl.report.metrics import run_name, series
from rl.report.style import (
    COLORS,
    LINE_STYLES,
    house_style,
    new_figure,
    percent_axis,
    say_empty,
    svg_bytes,
)

IGNORED_KEYS = ("run",)  # a name, not a setting
UNSET = "unset"
LEGEND_WIDTH = 70  # characters


@dataclass(frozen=True)
class Run:
    """One run of a sweep: its complete config (nested) and its metrics table."""

    config: Mapping[str, Any]
    metrics: pa.Table

    @property
    def name(self) -> str:
        return run_name(self.metrics)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, by ascending seed, and the settings that name them."""

    settings: dict[str, str]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """`key=value` for each setting in which the groups differ; the run's name if in none."""
        parts = [f"{_short(key)}={value}" for key, value in self.settings.items()]
        return ", ".join(parts) or (self.runs[0].name if len(self.runs) == 1 else "all seeds")

    def curves(self, stage: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The iterations that every run has a figure for, and its values [run, iteration]."""
        lines = [series(run.metrics, stage, name) for run in self.runs]
        common = lines[0][0]
        for iterations, _ in lines[1:]:
            common = np.intersect1d(common, iterations)
        values = [values[np.isin(iterations, common)] for iterations, values in lines]
        return common, np.stack(values)


def group_runs(runs: Sequence[Run], seed_key: str = "seed") -> list[Group]:
    """The runs in groups that differ in `seed_key` (a dotted key) alone, in order of appearance.

    Raises MeshdialError if there is no run, or if two runs have the same config, seed included.
    """
    if not runs:
        raise MeshdialError("There are no runs to compare.")
    members: dict[str, list[Run]] = {}
    settings = {}
    for run in runs:
        leaves = _settings(run.config, seed_key)
        key = json.dumps(leaves, sort_keys=True)
        members.setdefault(key, []).append(run)
        settings[key] = leaves
    varying = _varying_keys(list(settings.values()))
    return [_group(found, settings[key], varying, seed_key) for key, found in members.items()]


def comparison_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One row a group, for the last iteration that all of its runs have been evaluated at.

    `accuracy` pools the held-out samples of all seeds, and `accuracy_low` to `accuracy_high` is its
    95% Wilson interval; `worst_seed` and `best_seed` are the accuracies of single runs. Seeds share
    their held-out prompts, so the interval speaks for these prompts rather than for the whole task.
    """
    return [_row(group) for group in groups]


def comparison_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV, numbers in full; a number that does not exist is an empty cell."""
    target = io.StringIO()
    writer = csv.DictWriter(target, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return target.getvalue()


def comparison_svg(groups: Sequence[Group]) -> bytes:
    """Held-out accuracy and training reward of each group: mean over seeds, from worst to best."""
    with house_style():
        num_lines = sum(_legend_label(group).count("\n") + 1 for group in groups)
        figure, (accuracy_panel, reward_panel) = new_figure(2, height=5.1 + 0.2 * num_lines)
        accuracy_panel.set_title("Held-out accuracy: mean over seeds, worst to best")
        accuracy_panel.set_ylabel("Accuracy")
        if _draw_groups(accuracy_panel, groups, "evaluate_policy", "accuracy"):
            percent_axis(accuracy_panel)
        reward_panel.set_title("Training reward: mean over seeds, worst to best")
        reward_panel.set_ylabel("Mean reward")
        _draw_groups(reward_panel, groups, "score_rewards", "reward_mean")
        handles, labels = reward_panel.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower left", ncols=1)
        figure.align_ylabels()
    return svg_bytes(figure, "Comparison of runs")


def _draw_groups(panel: Axes, groups: Sequence[Group], stage: str, name: str) -> bool:
    """One curve a group; False where no group has any."""
    is_empty = True
    for index, group in enumerate(groups):
        iterations, values = group.curves(stage, name)
        # An empty line as well, so that every panel's legend has the same entries.
        mean = values.mean(axis=0)
        style = LINE_STYLES[index % len(LINE_STYLES)]
        draw_line(panel, iterations, mean, index, label=_legend_label(group), linestyle=style)
        low, high, color = values.min(axis=0), values.max(axis=0), COLORS[index % len(COLORS)]
        panel.fill_between(iterations, low, high, color=color, alpha=0.15, linewidth=0)
        is_empty = is_empty and len(iterations) == 0
    if is_empty:
        say_empty(panel, "No run has these numbers.")
    return not is_empty


def _group(runs: list[Run], settings: dict, varying: list[str], seed_key: str) -> Group:
    runs = sorted(runs, key=lambda run: _seed(run, seed_key))
    seeds = tuple(_seed(run, seed_key) for run in runs)
    for first, second in itertools.pairwise(runs):
        if _seed(first, seed_key) == _seed(second, seed_key):
            raise MeshdialError(
                f"The runs {first.name} and {second.name} have the same config, seed included, so "
                "comparing them would count one run twice."
            )
    shown = {key: settings.get(key, UNSET) for key in varying}
    return Group(shown, seeds, tuple(runs))


def _row(group: Group) -> dict[str, Any]:
    row: dict[str, Any] = dict(group.settings) or {"runs": group.label}
    row |= {"seeds": " ".join(map(str, group.seeds)), "num_runs": len(group.runs)}
    iterations, accuracies = group.curves("evaluate_policy", "accuracy")
    if len(iterations) == 0:
        return row | dict.fromkeys((*ACCURACY_COLUMNS, "training_reward"), None)
    _, num_correct = group.curves("evaluate_policy", "num_correct")
    _, num_samples = group.curves("evaluate_policy", "num_samples")
    correct, samples = num_correct.sum(axis=0), num_samples.sum(axis=0)
    pooled = correct / samples
    low, high = wilson_interval(int(correct[-1]), int(samples[-1]))
    figures = (
        int(iterations[-1]),
        *(float(pooled[0]), float(pooled[-1]), low, high, int(correct[-1]), int(samples[-1])),
        *(float(accuracies[:, -1].min()), float(accuracies[:, -1].max())),
    )
    row |= dict(zip(ACCURACY_COLUMNS, figures, strict=True))
    _, rewards = group.curves("score_rewards", "reward_mean")
    return row | {"training_reward": float(rewards[:, -1].mean()) if rewards.size else None}


def _settings(config: Mapping, seed_key: str) -> dict[str, str]:
    """Each setting in words, by dotted key."""
    ignored = {*IGNORED_KEYS, seed_key}
    return {key: _word(value) for key, value in leaves(config) if key not in ignored}


def _varying_keys(all_settings: list[dict[str, str]]) -> list[str]:
    """The keys that do not have the same value everywhere, in order of appearance."""
    keys = dict.fromkeys(key for settings in all_settings for key in settings)
    return [key for key in keys if len({settings.get(key) for settings in all_settings}) > 1]


def _word(value: Any) -> str:
    """A setting as shown; equal numbers give equal words, however they were written."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _seed(run: Run, seed_key: str) -> int:
    value: Any = run.config
    for key in seed_key.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise MeshdialError(f"The config of run {run.name} has no key {seed_key}.")
        value = value[key]
    return value


def _short(key: str) -> str:
    return ".".join(key.split(".")[-2:])


def _legend_label(group: Group) -> str:
    seeds = f"{len(group.seeds)} seeds" if len(group.seeds) > 1 else f"seed {group.seeds[0]}"
    return textwrap.fill(f"{group.label} ({seeds})", LEGEND_WIDTH)


ACCURACY_COLUMNS = (
    "iteration",
    "accuracy_before",
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "num_correct",
    "num_samples",
    "worst_seed",
    "best_seed",
)
