"""Runs grouped by all but their seed, pooled, drawn and written down."""

import csv
from html.parser import HTMLParser

import numpy as np
import pytest

from rl.artifacts import SCHEMAS, make_table
from rl.errors import MeshdialError
from rl.report.comparison import (
    Run,
    comparison_csv,
    comparison_rows,
    comparison_svg,
    group_runs,
)
from rl.report.intervals import wilson_interval
from rl.report.page import comparison_html


def run(name, seed, rate, evaluations, rewards=(), **more):
    """`evaluations`: {iteration: (num_correct, num_samples)}; `rewards`: means from iteration 1."""
    rows = [(n, "score_rewards", "reward_mean", r) for n, r in enumerate(rewards, start=1)]
    for n, (correct, samples) in evaluations.items():
        values = {"accuracy": correct / samples, "num_correct": correct, "num_samples": samples}
        rows += [(n, "evaluate_policy", key, float(value)) for key, value in values.items()]
    columns = zip(*[(name, *row) for row in rows], strict=True)
    metrics = make_table("metrics", dict(zip(SCHEMAS["metrics"].names, columns, strict=True)))
    config = {"run": name, "seed": seed, "optimizer": {"learning_rate": rate}, **more}
    return Run(config, metrics)


def sweep():
    return [
        run("slow-1", 1, 1e-4, {0: (0, 10), 4: (2, 10)}, [0.0, 0.25]),
        run("fast-0", 0, 1e-3, {0: (1, 10), 4: (9, 10)}, [0.5, 0.75]),
        run("slow-0", 0, 1e-4, {0: (2, 20), 4: (10, 20)}, [0.5, 0.75]),
    ]


def test_runs_that_differ_in_seed_alone_are_one_group():
    slow, fast = group_runs(sweep())
    assert slow.settings == {"optimizer.learning_rate": "0.0001"}
    assert (slow.seeds, [r.name for r in slow.runs]) == ((0, 1), ["slow-0", "slow-1"])
    assert (slow.label, fast.label) == (
        "optimizer.learning_rate=0.0001",
        "optimizer.learning_rate=0.001",
    )


def test_equal_numbers_are_equal_settings_and_a_missing_one_is_unset():
    runs = [
        run("a", 0, 1, {}, [0.5]),
        run("b", 1, 1.0, {}, [0.5]),
        run("c", 0, 1, {}, [0.5], lora={"targets": ["q_proj"]}),
    ]
    first, second = group_runs(runs)
    assert first.seeds == (0, 1)
    assert first.settings == {"lora.targets": "unset"}
    assert second.settings == {"lora.targets": '["q_proj"]'}


def test_the_same_run_twice_is_refused():
    runs = [run("a", 0, 1, {}, [0.5]), run("b", 0, 1, {}, [0.5])]
    with pytest.raises(MeshdialError, match="runs a and b have the same config, seed included"):
        group_runs(runs)


def test_no_run_and_no_seed_are_refused():
    with pytest.raises(MeshdialError, match="no runs"):
        group_runs([])
    with pytest.raises(MeshdialError, match=r"config of run a has no key task\.seed"):
        group_runs([run("a", 0, 1, {}, [0.5])], seed_key="task.seed")


def test_rows_pool_the_samples_of_all_seeds():
    slow, fast = comparison_rows(group_runs(sweep()))
    low, high = wilson_interval(12, 30)
    assert slow == {
        "optimizer.learning_rate": "0.0001",
        "seeds": "0 1",
        "num_runs": 2,
        "iteration": 4,
        "accuracy_before": pytest.approx(2 / 30),
        "accuracy": pytest.approx(12 / 30),
        "accuracy_low": low,
        "accuracy_high": high,
        "num_correct": 12,
        "num_samples": 30,
        "worst_seed": 0.2,
        "best_seed": 0.5,
        "training_reward": 0.5,
    }
    assert (fast["accuracy"], fast["num_samples"], fast["worst_seed"]) == (0.9, 10, 0.9)


def test_an_unfinished_seed_limits_the_comparison_to_common_iterations():
    runs = [
        run("a", 0, 1, {0: (0, 4), 4: (2, 4), 8: (4, 4)}, [0.0, 0.5, 1.0]),
        run("b", 1, 1, {0: (0, 4), 4: (1, 4)}, [0.0, 0.25]),
    ]
    (row,) = comparison_rows(group_runs(runs))
    assert (row["iteration"], row["num_correct"], row["num_samples"]) == (4, 3, 8)
    assert row["training_reward"] == 0.375
    (group,) = group_runs(runs)
    iterations, values = group.curves("score_rewards", "reward_mean")
    assert np.array_equal(iterations, [1, 2])
    assert np.array_equal(values, [[0.0, 0.5], [0.0, 0.25]])


def test_a_sweep_without_evaluations_has_empty_cells():
    (row,) = comparison_rows(group_runs([run("a", 0, 1, {}, [0.5])]))
    assert row["runs"] == "a"
    assert row["accuracy"] is None
    (cells,) = csv.DictReader(comparison_csv([row]).splitlines())
    assert (cells["seeds"], cells["accuracy"]) == ("0", "")


def test_csv_keeps_numbers_in_full():
    rows = comparison_rows(group_runs(sweep()))
    slow, _ = csv.DictReader(comparison_csv(rows).splitlines())
    assert float(slow["accuracy_low"]) == rows[0]["accuracy_low"]
    assert slow["optimizer.learning_rate"] == "0.0001"


def test_figure_draws_mean_and_range(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "rl.report.comparison.svg_bytes", lambda figure, title: drawn.append(figure) or b""
    )
    comparison_svg(group_runs(sweep()))
    accuracy, reward = drawn[0].axes
    # Accuracies of the slow seeds: 0.1 and 0.0, then 0.5 and 0.2.
    assert accuracy.lines[0].get_ydata().tolist() == pytest.approx([0.05, 0.35])
    corners = accuracy.collections[0].get_paths()[0].vertices.tolist()
    assert all(c in corners for c in ([0, 0.0], [0, 0.1], [4, 0.2], [4, 0.5]))
    assert reward.lines[1].get_xydata().tolist() == [[1, 0.5], [2, 0.75]]
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "optimizer.learning_rate=0.0001 (2 seeds)",
        "optimizer.learning_rate=0.001 (seed 0)",
    ]
    looks = {(line.get_color(), line.get_linestyle()) for line in accuracy.lines}
    assert len(looks) == 2


def test_figure_of_a_sweep_without_evaluations_says_so():
    groups = group_runs([run("a", 0, 1, {}, [0.5])])
    assert comparison_svg(groups) == comparison_svg(groups)


class Cells(HTMLParser):
    """Collects the text of table cells, and every address that the page would load."""

    def __init__(self, page):
        super().__init__()
        self.cells, self.loaded, self.in_cell = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.in_cell = tag in ("td", "th") or (self.in_cell and tag in ("br", "small"))
        if tag in ("td", "th"):
            self.cells.append("")
        if tag in ("script", "link", "img", "iframe"):
            self.loaded.append(tag)

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, text):
        if self.in_cell:
            self.cells[-1] += text


def test_page_holds_the_table_and_loads_nothing():
    groups = group_runs(sweep())
    page = comparison_html(comparison_rows(groups), comparison_svg(groups), "A & <b>")
    found = Cells(page)
    assert found.loaded == []
    assert found.cells[:5] == [
        "optimizer.learning_rate",
        "seeds",
        "runs",
        "iteration",
        "accuracy before",
    ]
    low, high = wilson_interval(12, 30)
    assert f"40.0%12 of 30, {low:.1%} to {high:.1%}" in found.cells
    assert "<title>A &amp; &lt;b&gt;</title>" in page
    assert page.count("<svg") == 1
    assert "<?xml" not in page


def test_settings_are_escaped():
    runs = [run("a", 0, "<script>", {}, [0.5]), run("b", 0, "x", {}, [0.5])]
    groups = group_runs(runs)
    page = comparison_html(comparison_rows(groups), b"<svg></svg>", "t")
    assert "<script>" not in page
    assert "<script>" in Cells(page).cells
