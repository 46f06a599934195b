"""The figures of one run, drawn from its metrics table."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl.artifacts import Publisher
from rl.report.metrics import series
from rl.report.style import (
    COLORS,
    LINE_STYLES,
    MUTED,
    house_style,
    new_figure,
    percent_axis,
    say_empty,
    svg_bytes,
)
from rl.report.timeline import draw_timeline

MAX_MARKERS = 40  # above this many points, markers hide the line
NUM_STAGES_SHOWN = len(COLORS)


@dataclass(frozen=True)
class Drawing:
    """A figure: its title, and the function from `source` to a picture.

    The source is the metrics table, or the timings table or the spans of a timeline, whose content
    is not repeatable.
    """

    title: str
    draw: Callable[[Any], Figure]
    source: str = "metrics"


def figure_svg(name: str, source: Any) -> bytes:
    """One figure of `FIGURES` as SVG. A run without the numbers for it gets a figure saying so."""
    drawing = FIGURES[name]
    with house_style():
        figure = drawing.draw(source)
    return svg_bytes(figure, drawing.title)


def write_figures(
    publisher: Publisher, paths: Mapping[str, Path], sources: Mapping[str, Any]
) -> None:
    """Write each figure that `paths` names (a key of `FIGURES`) to its file; `sources` holds what
    they draw, by the name of the source."""
    for name, path in paths.items():
        with publisher.file(path) as draft:
            draft.write_bytes(figure_svg(name, sources[FIGURES[name].source]))


def draw_line(panel: Axes, iterations: np.ndarray, values: np.ndarray, index: int, **kwargs):
    """A line in colour `index`, whose points are marked as well where they are few."""
    marker = "o" if len(iterations) <= MAX_MARKERS else None
    panel.plot(
        iterations, values, **{"color": COLORS[index % len(COLORS)], "marker": marker} | kwargs
    )


def start_at_zero(panel: Axes) -> None:
    """A quantity that 0 is the natural start of is drawn from there, unless it goes below."""
    panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))


def _learning_curve(metrics: pa.Table) -> Figure:
    figure, (accuracy_panel, reward_panel) = new_figure(2)
    _draw_accuracy(accuracy_panel, metrics)
    reward_panel.set_title("Training reward")
    reward_panel.set_ylabel("Mean reward")
    _draw_or_say(reward_panel, metrics, "score_rewards", ["reward_mean"], "No rewards yet.", 1)
    figure.align_ylabels()
    return figure


def _draw_accuracy(panel: Axes, metrics: pa.Table) -> None:
    panel.set_title("Held-out accuracy, with 95% intervals")
    iterations, accuracy = series(metrics, "evaluate_policy", "accuracy")
    if len(iterations) == 0:
        say_empty(panel, "This run has no evaluations.")
        return
    _, low = series(metrics, "evaluate_policy", "accuracy_low")
    _, high = series(metrics, "evaluate_policy", "accuracy_high")
    panel.fill_between(iterations, low, high, color=COLORS[0], alpha=0.18, linewidth=0)
    # Bars as well, because a band between two distant evaluations looks surer than it is.
    if len(iterations) <= MAX_MARKERS:
        margins = np.maximum([accuracy - low, high - accuracy], 0.0)
        panel.errorbar(iterations, accuracy, margins, fmt="none", ecolor=COLORS[0], elinewidth=1)
    draw_line(panel, iterations, accuracy, 0, label="accuracy")
    names = {n for n in metrics["name"].to_pylist() if re.fullmatch(r"pass_at_\d+", n)}
    for index, name in enumerate(sorted(names, key=lambda name: int(name[8:])), start=2):
        look = {"label": f"pass@{name[8:]}", "linestyle": LINE_STYLES[index % len(LINE_STYLES)]}
        iterations, values = series(metrics, "evaluate_policy", name)
        low, high = (
            series(metrics, "evaluate_policy", f"{name}_{of}")[1] for of in ("low", "high")
        )
        color = COLORS[index % len(COLORS)]
        panel.fill_between(iterations, low, high, color=color, alpha=0.1, linewidth=0)
        draw_line(panel, iterations, values, index, **look)
    if names:
        panel.legend()
    percent_axis(panel)
    panel.set_ylabel("Accuracy")


def _reward_spread(metrics: pa.Table) -> Figure:
    figure, (spread_panel, share_panel) = new_figure(2)
    spread_panel.set_title("Reward spread within a group, averaged over groups")
    spread_panel.set_ylabel("Standard deviation\nof reward")
    stage, empty = "estimate_advantages", "No groups yet."
    if _draw_or_say(spread_panel, metrics, stage, ["group_reward_std_mean"], empty, 0):
        start_at_zero(spread_panel)
    share_panel.set_title("Groups without spread: all rewards are equal")
    share_panel.set_ylabel("Share of groups")
    if _draw_or_say(share_panel, metrics, stage, ["degenerate_group_fraction"], empty, 1):
        _draw_used(share_panel, metrics)
        percent_axis(share_panel)
    figure.align_ylabels()
    return figure


def _draw_used(panel: Axes, metrics: pa.Table) -> None:
    """Of the groups that are trained on as well, where some are left out."""
    stage = "estimate_advantages"
    iterations, left_out = series(metrics, stage, "num_groups_left_out")
    if not left_out.any():
        return
    panel.get_lines()[0].set_label("of all")
    names = ("num_degenerate_groups_used", "num_groups")
    degenerate, groups = (series(metrics, stage, name)[1] for name in names)
    shares, look = degenerate / (groups - left_out), {"linestyle": LINE_STYLES[1]}
    draw_line(panel, iterations, shares, 0, label="of those trained on", **look)
    panel.legend()


def _kl(metrics: pa.Table) -> Figure:
    figure, (panel,) = new_figure(1, height=2.9)
    panel.set_title("KL divergence of the policy from its reference")
    panel.set_ylabel("Nats per token")
    if _draw_or_say(panel, metrics, "update_actor", ["kl"], "This run has no KL term.", 0):
        start_at_zero(panel)
    return figure


def _entropy(metrics: pa.Table) -> Figure:
    figure, (panel,) = new_figure(1, height=2.9)
    panel.set_title("Entropy of the policy at the sampled tokens")
    panel.set_ylabel("Nats per token")
    if _draw_or_say(panel, metrics, "update_actor", ["entropy"], "No updates yet.", 0):
        start_at_zero(panel)
    return figure


def _critic(metrics: pa.Table) -> Figure:
    figure, (loss_panel, explained_panel) = new_figure(2)
    stage, empty = "update_critic", "This run has no critic."
    loss_panel.set_title("Loss of the critic")
    loss_panel.set_ylabel("Half the squared\nerror of a value")
    if _draw_or_say(loss_panel, metrics, stage, ["value_loss"], empty, 0):
        start_at_zero(loss_panel)
    explained_panel.set_title("Variance of the returns that its values explain")
    explained_panel.set_ylabel("Share")
    _draw_or_say(explained_panel, metrics, stage, ["explained_variance"], empty, 1)
    figure.align_ylabels()
    return figure


def _completion_length(metrics: pa.Table) -> Figure:
    figure, (length_panel, cut_panel) = new_figure(2)
    length_panel.set_title("Completion length: mean, and the 10th to 90th percentile")
    length_panel.set_ylabel("Tokens")
    stage, empty = "generate_rollouts", "No rollouts yet."
    if _draw_or_say(length_panel, metrics, stage, ["completion_length_mean"], empty, 0):
        iterations, low = series(metrics, stage, "completion_length_p10")
        _, high = series(metrics, stage, "completion_length_p90")
        length_panel.fill_between(iterations, low, high, color=COLORS[0], alpha=0.18, linewidth=0)
        start_at_zero(length_panel)
    cut_panel.set_title("Completions cut off at the token limit")
    cut_panel.set_ylabel("Share of\ncompletions")
    if _draw_or_say(cut_panel, metrics, stage, ["finish_length_fraction"], empty, 1):
        percent_axis(cut_panel)
    figure.align_ylabels()
    return figure


def _logprob_drift(metrics: pa.Table) -> Figure:
    figure, (panel,) = new_figure(1, height=2.9)
    panel.set_title("Rollout against trainer: difference in log-probability")
    panel.set_ylabel("Nats per token")
    lines = {
        "logprob_drift_max": "largest",
        "logprob_drift_mean": "mean",
        "logprob_staleness_max": "largest, of an older policy",
        "logprob_staleness_mean": "mean, of an older policy",
    }
    known = set(pc.unique(metrics["name"]).to_pylist())
    names = [name for name in lines if name in known]
    labels = [lines[name] for name in names]
    if not _draw_or_say(panel, metrics, "update_actor", names, "No updates yet.", 1, labels):
        return figure
    # Down to zero, which a logarithmic axis cannot show: linear below float32's own rounding.
    panel.set_yscale("symlog", linthresh=1e-7)
    panel.set_ylim(bottom=0)
    panel.legend()
    return figure


def _draw_or_say(
    panel: Axes,
    metrics: pa.Table,
    stage: str,
    names: list[str],
    empty: str,
    index: int,
    labels: list[str] | None = None,
) -> bool:
    """Draw the named figures, the first in colour `index`; False where there is none to draw."""
    lines = [series(metrics, stage, name) for name in names]
    if all(len(iterations) == 0 for iterations, _ in lines):
        say_empty(panel, empty)
        return False
    for offset, (iterations, values) in enumerate(lines):
        look = {"label": labels[offset] if labels else None, "linestyle": LINE_STYLES[offset]}
        draw_line(panel, iterations, values, index + offset, **look)
    return True


def _stage_seconds(timings: pa.Table) -> Figure:
    figure, (panel,) = new_figure(1, height=3.4)
    panel.set_title("Where the time went")
    panel.set_ylabel("Seconds")
    seconds = timings.filter(pc.field("name") == "seconds")
    if seconds.num_rows == 0:
        say_empty(panel, "No timings were kept for this run.")
        return figure
    iterations = np.unique(seconds["iteration"].to_numpy())
    bottom = np.zeros(len(iterations))
    for label, color, stages in _stage_bars(seconds):
        chosen = seconds.filter(pc.field("stage").isin(stages))
        heights = np.zeros(len(iterations))
        places = np.searchsorted(iterations, chosen["iteration"].to_numpy())
        np.add.at(heights, places, chosen["value"].to_numpy())
        panel.bar(iterations, heights, 0.85, bottom, color=color, label=label, linewidth=0)
        bottom += heights
    handles, labels = panel.get_legend_handles_labels()
    # In the order of the stack, top first.
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
    figure.set_figwidth(7.2)
    panel.grid(axis="x", visible=False)
    return figure


def _stage_bars(seconds: pa.Table) -> list[tuple[str, str, list[str]]]:
    """Label, colour and stages of each bar: the costliest stages, then the rest as one."""
    totals = seconds.group_by("stage", use_threads=False).aggregate([("value", "sum")])
    stages = totals.sort_by([("value_sum", "descending"), ("stage", "ascending")])
    names = stages["stage"].to_pylist()
    shown, rest = names[:NUM_STAGES_SHOWN], names[NUM_STAGES_SHOWN:]
    bars = [(name, color, [name]) for name, color in zip(shown, COLORS, strict=False)]
    return bars + ([("all others", MUTED, rest)] if rest else [])


FIGURES = {
    "learning_curve": Drawing("Learning curve", _learning_curve),
    "reward_spread": Drawing("Reward spread", _reward_spread),
    "kl": Drawing("KL divergence from the reference", _kl),
    "entropy": Drawing("Policy entropy", _entropy),
    "critic": Drawing("The critic", _critic),
    "completion_length": Drawing("Completion length", _completion_length),
    "logprob_drift": Drawing("Log-probability drift", _logprob_drift),
    "stage_seconds": Drawing("Seconds by stage", _stage_seconds, source="timings"),
    "stage_timeline": Drawing("Timeline of the stages", draw_timeline, source="spans"),
}
