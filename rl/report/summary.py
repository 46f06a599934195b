"""What a run did, in a few lines for the terminal."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rl.report.metrics import series

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40  # characters
LABEL_WIDTH = 19
MOST_TASKS = 12  # that have a line each


def summary_lines(
    metrics: pa.Table, timings: pa.Table | None = None, curve: Path | None = None
) -> list[str]:
    """Accuracy before and after, the curves, where the time went, and where the figure lies.

    `metrics` and `timings` are tables of `rl.report.metrics`; `curve` is the learning curve's file.
    """
    lines = [*_accuracy_lines(metrics), *_task_lines(metrics), *_pass_at_lines(metrics)]
    lines += [*_reward_lines(metrics), *_off_policy_lines(metrics)]
    lines += _time_lines(timings)
    return lines + ([_line("Learning curve", str(curve))] if curve else [])


def sparkline(values: np.ndarray, low: float, high: float, width: int = CURVE_WIDTH) -> str:
    """The values as a row of bars, `low` the shortest and `high` the tallest; neighbours are
    averaged where there are more than `width`."""
    if len(values) > width:
        values = np.array([part.mean() for part in np.array_split(values, width)])
    span = high - low if high > low else 1.0
    levels = np.clip((values - low) / span, 0.0, 1.0) * (len(BARS) - 1)
    return "".join(BARS[level] for level in np.rint(levels).astype(int))


def _accuracy_lines(metrics: pa.Table) -> list[str]:
    iterations, accuracy = series(metrics, "evaluate_policy", "accuracy")
    if len(iterations) == 0:
        return [_line("Held-out accuracy", "never evaluated")]
    first, last = int(iterations[0]), int(iterations[-1])
    if first == last:
        return [_line("Held-out accuracy", f"{_accuracy(metrics, last)} at iteration {last}")]
    change = f"{_accuracy(metrics, first)} -> {_accuracy(metrics, last)}"
    curve = sparkline(accuracy, 0.0, 1.0)
    return [
        _line("Held-out accuracy", change),
        _line("", f"iterations {first} -> {last}, intervals are 95% Wilson"),
        _line("", f"{curve}  (0% to 100%, {len(iterations)} evaluations)"),
    ]


def _accuracy(metrics: pa.Table, iteration: int) -> str:
    figures = _figures_at(metrics, "evaluate_policy", iteration)
    text = (
        f"{figures['accuracy']:.1%} ({figures['num_correct']:.0f} of {figures['num_samples']:.0f}, "
        f"{figures['accuracy_low']:.1%} to {figures['accuracy_high']:.1%}"
    )
    unscored = figures["num_unscored"]
    return text + (f"; {unscored:.0f} more could not be scored)" if unscored else ")")


def _task_lines(metrics: pa.Table) -> list[str]:
    """First and last accuracy of each task, where the held-out prompts are of several."""
    names = sorted({n for n in metrics["name"].to_pylist() if n.startswith("accuracy:")})
    lines = []
    for name in names[:MOST_TASKS]:
        task = name.removeprefix("accuracy:")
        iterations, _ = series(metrics, "evaluate_policy", name)
        ends = dict.fromkeys(int(n) for n in (iterations[0], iterations[-1]))
        told = [_task_accuracy(metrics, n, task) for n in ends]
        lines.append(_line(f"  {task} ", " -> ".join(told)))
    if len(names) > MOST_TASKS:
        lines.append(_line("", f"and {len(names) - MOST_TASKS} tasks more in the metrics table"))
    return lines


def _task_accuracy(metrics: pa.Table, iteration: int, task: str) -> str:
    figures = _figures_at(metrics, "evaluate_policy", iteration)
    names = ("num_correct", "num_samples", "accuracy_low", "accuracy_high")
    correct, samples, low, high = (figures[f"{name}:{task}"] for name in names)
    return f"{correct:.0f} of {samples:.0f} ({low:.0%} to {high:.0%})"


def _pass_at_lines(metrics: pa.Table) -> list[str]:
    names = {n for n in metrics["name"].to_pylist() if re.fullmatch(r"pass_at_\d+", n)}
    lines = []
    for name in sorted(names, key=lambda name: int(name.rpartition("_")[2])):
        iterations, values = series(metrics, "evaluate_policy", name)
        _, low = series(metrics, "evaluate_policy", f"{name}_low")
        _, high = series(metrics, "evaluate_policy", f"{name}_high")
        ends = dict.fromkeys((0, len(iterations) - 1))
        _, prompts = series(metrics, "evaluate_policy", f"{name}_prompts")
        told = " -> ".join(
            f"{values[n]:.1%} ({low[n]:.1%} to {high[n]:.1%}, {prompts[n]:.0f} prompts)"
            for n in ends
        )
        lines.append(_line(f"pass@{name.rpartition('_')[2]}", told))
    return lines


def _reward_lines(metrics: pa.Table) -> list[str]:
    iterations, rewards = series(metrics, "score_rewards", "reward_mean")
    if len(iterations) == 0:
        return []
    low, high = float(rewards.min()), float(rewards.max())
    count = f"{len(iterations)} iteration{'s' if len(iterations) > 1 else ''}"
    return [
        _line("Training reward", f"{rewards[0]:.3f} -> {rewards[-1]:.3f} over {count}"),
        _line("", f"{sparkline(rewards, low, high)}  ({low:.3f} to {high:.3f})"),
    ]


def _off_policy_lines(metrics: pa.Table) -> list[str]:
    """How much of stale rollouts counts; nothing for a run that is on-policy."""
    iterations, effective = series(metrics, "update_actor", "off_policy_ess")
    if len(iterations) == 0:
        return []
    _, truncated = series(metrics, "update_actor", "off_policy_truncated")
    size = f"{effective.mean():.1%} of the batch (least {effective.min():.1%})"
    text = f"effective sample size {size}, {truncated.mean():.2%} truncated"
    return [_line("Off-policy weights", text)]


def _time_lines(timings: pa.Table | None) -> list[str]:
    if timings is None:
        return []
    seconds = timings.filter(pc.field("name") == "seconds")
    if seconds.num_rows == 0:
        return []
    totals = seconds.group_by("stage", use_threads=False).aggregate([("value", "sum")])
    totals = totals.sort_by([("value_sum", "descending"), ("stage", "ascending")])
    parts = [f"{row['stage']} {row['value_sum']:.1f}" for row in totals.to_pylist()]
    total = pc.sum(totals["value_sum"]).as_py()
    return [
        _line("Seconds by stage" if index == 0 else "", text)
        for index, text in enumerate(_wrapped([*parts, f"total {total:.1f}"]))
    ]


def _wrapped(parts: list[str], width: int = 78) -> list[str]:
    """The parts joined by commas, broken into lines between parts."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 2 <= width:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return [f"{line}," for line in lines[:-1]] + lines[-1:]


def _figures_at(metrics: pa.Table, stage: str, iteration: int) -> dict[str, float]:
    chosen = metrics.filter((pc.field("stage") == stage) & (pc.field("iteration") == iteration))
    return dict(zip(chosen["name"].to_pylist(), chosen["value"].to_pylist(), strict=True))


def _line(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}}{text}"
