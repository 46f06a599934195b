"""When each stage ran on which mesh: the Gantt chart of a run, as a figure and as text."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl.artifacts import read_json
from rl.report.style import COLORS, MUTED, new_figure, say_empty

PAUSE_S = 60.0  # a longer time in which nothing ran is cut out: the run was not running
NUM_ITERATIONS_SHOWN = 8  # the last ones; more bars than that nobody can tell apart
MIN_LABEL_SHARE = 0.03  # of the width, for a bar that can hold its iteration's number


class Span(NamedTuple):
    """One run of a stage: `started` in seconds since a start that all spans share."""

    mesh: str
    stage: str
    iteration: int
    started: float
    seconds: float

    @property
    def ended(self) -> float:
        return self.started + self.seconds


def collect_spans(iterations: Mapping[int, Mapping[str, Path]]) -> list[Span]:
    """The spans in the timings files `iterations[n][stage]` that exist, in the order they began."""
    spans = []
    for iteration, paths in iterations.items():
        for stage, path in paths.items():
            found = read_json(path) if Path(path).exists() else {}
            if "started" in found:
                when = (float(found["started"]), float(found["seconds"]))
                spans.append(Span(found.get("mesh") or "all", stage, iteration, *when))
    return sorted(spans, key=lambda span: (span.started, span.mesh, span.stage))


def without_pauses(spans: Sequence[Span]) -> list[Span]:
    """The spans from 0 on, what is longer than `PAUSE_S` between two of them cut out."""
    placed, ended, cut = [], None, 0.0
    for span in sorted(spans, key=lambda span: span.started):
        if ended is None:
            cut = span.started
        elif span.started - ended > PAUSE_S:
            cut += span.started - ended
        placed.append(span._replace(started=span.started - cut))
        ended = span.ended if ended is None else max(ended, span.ended)
    return placed


def last_iterations(spans: Iterable[Span]) -> list[Span]:
    spans = list(spans)
    last = max((span.iteration for span in spans), default=0)
    return [span for span in spans if span.iteration > last - NUM_ITERATIONS_SHOWN]


def stage_colors(spans: Iterable[Span]) -> dict[str, str]:
    """A colour for each of the stages that took longest; the others share one."""
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.stage] = totals.get(span.stage, 0.0) + span.seconds
    stages = sorted(totals, key=lambda stage: (-totals[stage], stage))
    return dict(zip(stages, COLORS, strict=False))


def draw_timeline(spans: Sequence[Span]) -> Figure:
    """A lane for each mesh, a bar for each stage, numbered by its iteration where there is room."""
    shown = without_pauses(last_iterations(spans))
    lanes = list(dict.fromkeys(span.mesh for span in shown))
    figure, (panel,) = new_figure(1, height=2.0 + 0.5 * len(lanes))
    panel.set_title("What ran when on which mesh")
    if not shown:
        say_empty(panel, "No timings were kept for this run.")
        return figure
    _draw_bars(panel, shown, lanes)
    _draw_numbers(panel, shown, lanes)
    panel.set_yticks(range(len(lanes)), lanes)
    panel.invert_yaxis()
    panel.set_xlabel("Seconds")
    panel.grid(axis="y", visible=False)
    figure.legend(loc="outside right upper")
    figure.set_figwidth(7.2)
    return figure


def _draw_bars(panel: Axes, spans: Sequence[Span], lanes: Sequence[str]) -> None:
    colors = stage_colors(spans)
    for stage in [*colors, None]:
        bars = [span for span in spans if (span.stage if span.stage in colors else None) == stage]
        if bars:
            panel.barh(
                [lanes.index(span.mesh) for span in bars],
                [span.seconds for span in bars],
                0.7,
                [span.started for span in bars],
                color=colors.get(stage, MUTED),
                label=stage or "all others",
                linewidth=0,
            )


def _draw_numbers(panel: Axes, spans: Sequence[Span], lanes: Sequence[str]) -> None:
    width, look = max(span.ended for span in spans), {"color": "white", "fontsize": 8}
    for span in spans:
        if span.seconds > MIN_LABEL_SHARE * width:
            place = (span.started + span.seconds / 2, lanes.index(span.mesh))
            panel.text(*place, str(span.iteration), ha="center", va="center", **look)


def timeline_lines(spans: Sequence[Span], width: int = 100) -> list[str]:
    """The same as text: a line for each mesh, a letter for each stage, `.` where a mesh waits."""
    shown = without_pauses(spans)
    if not shown:
        return []
    per_column = max(span.ended for span in shown) / width
    stages = sorted({span.stage for span in shown})
    letters = dict(zip(stages, _letters(stages), strict=True))
    lanes: dict[str, list[str]] = {}
    for span in sorted(shown, key=lambda span: span.seconds):  # the long ones over the short ones
        lane = lanes.setdefault(span.mesh, ["."] * width)
        first = min(int(span.started / per_column), width - 1)
        last = min(max(math.ceil(span.ended / per_column), first + 1), width)
        lane[first:last] = letters[span.stage] * (last - first)
    margin = max(map(len, lanes))
    lines = [f"{mesh:<{margin}} |{''.join(lanes[mesh])}|" for mesh in sorted(lanes)]
    legend = ", ".join(f"{letter} {stage}" for stage, letter in letters.items())
    return [*lines, f"{'':<{margin}}  one column is {per_column:.2f} s; {legend}"]


def _letters(stages: Sequence[str]) -> list[str]:
    """The first letter of each name that none before it took."""
    taken: list[str] = []
    for stage in stages:
        choices = [*stage.replace("_", ""), *stage.upper(), "#"]
        taken.append(next(letter for letter in choices if letter not in taken or letter == "#"))
    return taken
