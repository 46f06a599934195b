"""What the figures show, that they repeat byte for byte, and that every caption renders."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import jinja2
import matplotlib
import numpy as np
import pytest
from docutils.core import publish_parts

from rl.artifacts import SCHEMAS, Publisher, make_table
from rl.report.figures import FIGURES, figure_svg, write_figures
from rl.report.style import COLORS, house_style
from rl.report.timeline import Span, collect_spans, last_iterations, timeline_lines, without_pauses

CAPTIONS = Path(__file__).parents[1] / "workflow" / "report"


def tidy(rows):
    columns = zip(*[("r", *row) for row in rows], strict=True)
    return make_table("metrics", dict(zip(SCHEMAS["metrics"].names, columns, strict=True)))


def draw(name, table):
    with house_style():
        return FIGURES[name].draw(table)


EMPTY = make_table("metrics", {name: [] for name in SCHEMAS["metrics"].names})
METRICS = tidy(
    [
        (0, "evaluate_policy", "accuracy", 0.25),
        (0, "evaluate_policy", "accuracy_low", 0.125),
        (0, "evaluate_policy", "accuracy_high", 0.5),
        (4, "evaluate_policy", "accuracy", 0.75),
        (4, "evaluate_policy", "accuracy_low", 0.5),
        (4, "evaluate_policy", "accuracy_high", 0.875),
        (1, "score_rewards", "reward_mean", -2.0),
        (2, "score_rewards", "reward_mean", 3.0),
        (1, "update_actor", "logprob_drift_mean", 0.0),
        (1, "update_actor", "logprob_drift_max", 1e-5),
        (1, "update_actor", "kl", 0.25),
        (1, "update_actor", "entropy", 1.5),
    ]
)
TIMINGS = tidy(
    [
        (1, "update_actor", "seconds", 3.0),
        (1, "generate_rollouts", "seconds", 5.0),
        (2, "update_actor", "seconds", 4.0),
        (2, "update_actor", "cpu_seconds", 100.0),
    ]
)


SPANS = [
    Span("decode", "generate_rollouts", 1, 1000.0, 6.0),
    Span("train", "update_actor", 1, 1006.5, 8.0),
    Span("decode", "generate_rollouts", 2, 1007.0, 6.0),
    Span("host", "check_iteration", 1, 1014.5, 0.1),
    Span("train", "update_actor", 2, 1500.0, 8.0),  # the run was resumed
]
SOURCES = {"metrics": METRICS, "timings": TIMINGS, "spans": SPANS}


def source_for(name):
    return SOURCES[FIGURES[name].source]


def test_pass_at_k_is_drawn_beside_accuracy_with_its_interval():
    rows = [
        (4, "evaluate_policy", f"pass_at_{k}{of}", value + change)
        for k, value in ((10, 0.75), (2, 0.5))
        for of, change in (("", 0.0), ("_low", -0.25), ("_high", 0.125))
    ]
    accuracy = [row for row in METRICS.to_pylist() if row["stage"] == "evaluate_policy"]
    rows += [tuple(row.values())[1:] for row in accuracy]
    panel = draw("learning_curve", tidy(rows)).axes[0]
    lines = {line.get_label(): line.get_ydata().tolist() for line in panel.lines}
    assert [lines[name] for name in ("pass@2", "pass@10")] == [[0.5], [0.75]]
    assert list(lines).index("pass@2") < list(lines).index("pass@10")
    bands = [band.get_paths()[0].vertices[:, 1] for band in panel.collections[-2:]]
    assert [(band.min(), band.max()) for band in bands] == [(0.25, 0.625), (0.5, 0.875)]


def test_groups_that_are_trained_on_have_a_line_where_others_are_left_out():
    stage = "estimate_advantages"
    rows = [(1, stage, "group_reward_std_mean", 0.5), (1, stage, "degenerate_group_fraction", 0.5)]
    rows += [(1, stage, "num_groups", 8.0), (1, stage, "num_degenerate_groups_used", 1.0)]
    shares = draw("reward_spread", tidy([*rows, (1, stage, "num_groups_left_out", 0.0)])).axes[1]
    assert [line.get_ydata().tolist() for line in shares.lines] == [[0.5]]
    shares = draw("reward_spread", tidy([*rows, (1, stage, "num_groups_left_out", 4.0)])).axes[1]
    assert [line.get_ydata().tolist() for line in shares.lines] == [[0.5], [0.25]]


def test_learning_curve_shows_accuracy_with_its_interval_and_reward():
    accuracy, reward = draw("learning_curve", METRICS).axes
    assert accuracy.lines[0].get_xydata().tolist() == [[0, 0.25], [4, 0.75]]
    corners = accuracy.collections[0].get_paths()[0].vertices.tolist()
    assert all(c in corners for c in ([0, 0.125], [0, 0.5], [4, 0.5], [4, 0.875]))
    assert accuracy.get_ylim() == (-0.03, 1.03)
    assert reward.lines[0].get_xydata().tolist() == [[1, -2], [2, 3]]
    assert (accuracy.get_ylabel(), reward.get_ylabel()) == ("Accuracy", "Mean reward")
    assert reward.get_xlabel() == "Iteration"


def test_iterations_are_whole_numbers_on_the_axis():
    ticks = draw("learning_curve", METRICS).axes[1].get_xticks()
    assert np.array_equal(ticks, np.rint(ticks))


def test_drift_of_zero_can_be_shown():
    (panel,) = draw("logprob_drift", METRICS).axes
    lines = {line.get_label(): line.get_ydata().tolist() for line in panel.lines}
    assert lines == {"largest": [1e-5], "mean": [0.0]}
    assert panel.get_yscale() == "symlog"
    assert panel.get_ylim()[0] == 0


def test_stage_seconds_stack_the_costliest_stage_lowest():
    figure = draw("stage_seconds", TIMINGS)
    bars = {
        c.get_label(): [(b.get_y(), b.get_height()) for b in c] for c in figure.axes[0].containers
    }
    # update_actor has 7 seconds in all, generate_rollouts 5; cpu_seconds play no part.
    assert bars == {"update_actor": [(0, 3), (0, 4)], "generate_rollouts": [(3, 5), (4, 0)]}


def test_stages_beyond_the_colours_are_one_bar():
    rows = [(1, f"stage_{i}", "seconds", 10.0 - i) for i in range(9)]
    containers = draw("stage_seconds", tidy(rows)).axes[0].containers
    labels = [c.get_label() for c in containers]
    assert labels == [*(f"stage_{i}" for i in range(len(COLORS))), "all others"]
    assert containers[-1][0].get_height() == 3.0 + 2.0


@pytest.mark.parametrize("name", FIGURES)
def test_a_run_without_the_numbers_gets_a_figure_that_says_so(name):
    for panel in draw(name, [] if FIGURES[name].source == "spans" else EMPTY).axes:
        assert [text.get_text()[-1] for text in panel.texts] == ["."]
        assert not panel.lines


def test_kl_says_that_there_is_no_term():
    (panel,) = draw("kl", EMPTY).axes
    assert panel.texts[0].get_text() == "This run has no KL term."


@pytest.mark.parametrize("name", FIGURES)
def test_figures_repeat_byte_for_byte_whatever_the_reader_configured(name):
    first = figure_svg(name, source_for(name))
    with matplotlib.rc_context({"font.size": 31, "axes.grid": False, "svg.fonttype": "none"}):
        assert figure_svg(name, source_for(name)) == first


@pytest.mark.parametrize("name", FIGURES)
def test_figures_carry_a_title_and_nothing_of_the_machine(name):
    svg = figure_svg(name, source_for(name))
    root = ElementTree.fromstring(svg)
    assert root.find("{http://www.w3.org/2000/svg}title").text == FIGURES[name].title
    assert b"<dc:date>" not in svg
    assert b"Matplotlib" not in svg
    assert b"http-equiv" not in svg
    assert len(svg) < 100_000


def test_write_figures_picks_the_right_source(tmp_path):
    sources = {"kl": METRICS, "stage_seconds": TIMINGS, "stage_timeline": SPANS}
    paths = {name: tmp_path / f"{name}.svg" for name in sources}
    write_figures(Publisher(), paths, SOURCES)
    for name, source in sources.items():
        assert paths[name].read_bytes() == figure_svg(name, source)


def test_drift_and_staleness_are_told_apart():
    rows = [(1, "update_actor", "logprob_drift_mean", 1e-6)]
    rows += [(2, "update_actor", "logprob_staleness_mean", 0.02)]
    (panel,) = draw("logprob_drift", tidy(rows)).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in panel.lines}
    assert lines == {"mean": [[1, 1e-6]], "mean, of an older policy": [[2, 0.02]]}


def test_the_timeline_has_a_lane_for_each_mesh_and_cuts_pauses_out():
    (panel,) = draw("stage_timeline", SPANS).axes
    assert [label.get_text() for label in panel.get_yticklabels()] == ["decode", "train", "host"]
    bars = {
        container.get_label(): [
            (round(bar.get_x(), 6), round(bar.get_width(), 6), round(bar.get_y() + 0.35))
            for bar in container
        ]
        for container in panel.containers
    }
    assert bars == {
        "update_actor": [(6.5, 8.0, 1), (14.6, 8.0, 1)],
        "generate_rollouts": [(0.0, 6.0, 0), (7.0, 6.0, 0)],
        "check_iteration": [(14.5, 0.1, 2)],
    }
    assert sorted(text.get_text() for text in panel.texts) == ["1", "1", "2", "2"]


def test_a_wait_of_less_than_a_minute_stays_and_a_stage_that_runs_is_no_pause():
    spans = [Span("a", "x", 1, 5.0, 100.0), Span("a", "y", 1, 150.0, 1.0)]
    assert [span.started for span in without_pauses(spans)] == [0.0, 145.0]
    spans = [Span("a", "x", 1, 5.0, 100.0), Span("b", "z", 1, 10.0, 1.0)]
    spans += [Span("a", "y", 1, 105.0, 1.0), Span("a", "y", 2, 206.0, 1.0)]
    assert [span.started for span in without_pauses(spans)] == [0.0, 5.0, 100.0, 101.0]


def test_the_timeline_shows_the_last_iterations():
    spans = [Span("a", "x", n, float(n), 1.0) for n in range(20)]
    assert [span.iteration for span in last_iterations(spans)] == list(range(12, 20))


def test_a_timeline_as_text():
    assert timeline_lines(SPANS[:4], width=20) == [
        "decode |gggggggggggggggggg..|",
        "host   |...................c|",
        "train  |........uuuuuuuuuuuu|",
        "        one column is 0.73 s; c check_iteration, g generate_rollouts, u update_actor",
    ]
    assert timeline_lines([]) == []


def test_spans_come_from_the_timings_that_say_when_they_began(tmp_path):
    timings = {
        "update_actor": {"started": 7.5, "seconds": 2, "mesh": "train"},
        "generate_rollouts": {"started": 3, "seconds": 4.5, "mesh": ""},
        "score_rewards": {"seconds": 1.0},
    }
    for stage, found in timings.items():
        (tmp_path / f"{stage}.json").write_text(json.dumps(found))
    stages = (*timings, "policy_logprobs")
    paths = {stage: tmp_path / f"{stage}.json" for stage in stages}
    assert collect_spans({3: paths}) == [
        Span("all", "generate_rollouts", 3, 3.0, 4.5),
        Span("train", "update_actor", 3, 7.5, 2.0),
    ]


def test_every_figure_has_a_caption():
    assert {path.stem for path in CAPTIONS.glob("*.rst")} >= {*FIGURES, "comparison", "workflow"}


# Stands in for the object that captions are rendered with.
JOB = SimpleNamespace(
    config={
        "run": "addition",
        "seed": 0,
        "lora": {},
        "rollout": {"stop": ["\n", ""], "group_size": 8},
        "algorithm": {"kl": {"coefficient": 0.5}},
    },
    wildcards={"run": "addition"},
)


# Snakemake names the writer in the way that newer docutils warn of.
@pytest.mark.filterwarnings("ignore:Argument:PendingDeprecationWarning")
@pytest.mark.parametrize("path", sorted(CAPTIONS.glob("*.rst")), ids=lambda path: path.stem)
@pytest.mark.parametrize("trim", [False, True])
def test_captions_render_without_a_complaint(path, trim):
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=trim, lstrip_blocks=trim
    )
    text = environment.from_string(path.read_text()).render(snakemake=JOB)
    strict = {"halt_level": 1, "report_level": 1}
    body = publish_parts(text, writer_name="html", settings_overrides=strict)["body"]
    if path.stem in FIGURES:
        assert "of run addition." in body
    if path.stem == "workflow":
        assert body.count("<li>") == 4  # run, seed, rollout, algorithm
