"""How every figure looks: colours that colour-blind readers tell apart, and bytes that repeat."""

import io
from contextlib import contextmanager

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

# Okabe and Ito (2008), without the yellow that vanishes on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
LINE_STYLES = ("-", "--", ":", "-.")
MUTED = "#8C8C8C"

SETTINGS = {
    "svg.hashsalt": "meshdial",  # element ids that do not change from one drawing to the next
    "svg.fonttype": "path",  # glyphs travel in the file: the same picture on every machine
    "figure.facecolor": "white",  # opaque, so that it reads on a dark page as well
    "savefig.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 3.2,  # long enough to tell dashes from dots
}


@contextmanager
def house_style():
    """Inside, matplotlib ignores the user's own matplotlibrc."""
    with matplotlib.style.context(["default", SETTINGS]):
        yield


def new_figure(num_panels: int = 1, height: float | None = None) -> tuple[Figure, list[Axes]]:
    """Panels one below the other over a shared iteration axis. `height` in inches."""
    figure = Figure(figsize=(5.6, height or 1.3 + 1.9 * num_panels), layout="constrained")
    panels = figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0]
    panels[-1].set_xlabel("Iteration")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    return figure, list(panels)


def percent_axis(panel: Axes) -> None:
    """A share from 0 to 1 shown as 0% to 100%, the whole range always in view."""
    panel.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    panel.set_ylim(-0.03, 1.03)
    panel.set_yticks([0, 0.25, 0.5, 0.75, 1.0])


def say_empty(panel: Axes, sentence: str) -> None:
    """A panel without numbers says why instead of showing an empty frame."""
    panel.text(
        0.5, 0.5, sentence, transform=panel.transAxes, ha="center", va="center", color="#4D4D4D"
    )
    panel.set_yticks([])
    panel.grid(False)


def svg_bytes(figure: Figure, title: str) -> bytes:
    """The figure as SVG: the same bytes for the same numbers and matplotlib version."""
    target = io.BytesIO()
    metadata = {"Date": None, "Creator": None, "Title": title}
    with house_style():
        figure.savefig(target, format="svg", metadata=metadata)
    return target.getvalue()
