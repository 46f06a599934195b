"""Accuracy by task, and pass@k, by numbers worked out by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.report.held_out import evaluation_figures, sample_figures, task_of
from rl.report.intervals import wilson_interval
from rl.report.metrics import collect_metrics
from rl.report.pass_at_k import interval_over_prompts, pass_at_k
from rl.report.summary import summary_lines

from .test_metrics import rollout_columns, write


def evaluation(folder, rows):
    """`rows`: (prompt id, is_correct, scored_ok, is_sampled)."""
    prompt_ids, is_correct, scored, sampled = map(list, zip(*rows, strict=True))
    columns = rollout_columns([2] * len(rows), ["stop"] * len(rows)) | {
        "prompt_id": prompt_ids,
        "reward": [float(c) if ok else None for c, ok in zip(is_correct, scored, strict=True)],
        "is_correct": is_correct,
        "scored_ok": scored,
        "is_sampled": sampled,
    }
    return write(folder / "evaluation.parquet", "evaluation", columns)


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 1 - 3 / 6
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 3, 2) == 1.0  # any two of four have a right one
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), st.data())
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one(counts, data):
    n, c = counts
    k = data.draw(st.integers(1, n))
    choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_the_interval_over_prompts():
    values = np.array([0.0, 1.0] * 50)
    low, high = interval_over_prompts(values)
    # The deviation of a mean of 100 such values is 0.05.
    assert low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.015)
    assert high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.015)
    assert interval_over_prompts(values) == (low, high)
    assert interval_over_prompts([0.25]) == (0.25, 0.25)
    assert interval_over_prompts([0.0] * 20) == wilson_interval(0, 20)
    assert interval_over_prompts([1.0] * 20) == wilson_interval(20, 20)


ROWS = [
    ("reasoning_gym/gcd/1", True, True, False),
    ("reasoning_gym/gcd/2", False, True, False),
    ("reasoning_gym/lcm/3", True, True, False),
    ("reasoning_gym/lcm/4", False, False, False),  # not scored
    *[("reasoning_gym/gcd/1", right, True, True) for right in (True, False, False)],
    *[("reasoning_gym/gcd/2", False, True, True)] * 2,
    ("reasoning_gym/gcd/2", False, False, True),
]


def test_accuracy_is_of_the_first_completions_and_of_each_task(tmp_path):
    found = evaluation_figures(evaluation(tmp_path, ROWS))
    assert (found["num_samples"], found["num_correct"], found["num_unscored"]) == (3, 2, 1)
    assert (found["num_samples:gcd"], found["num_correct:gcd"]) == (2, 1)
    assert (found["num_samples:lcm"], found["accuracy:lcm"]) == (1, 1.0)
    assert (found["accuracy_low:gcd"], found["accuracy_high:gcd"]) == wilson_interval(1, 2)


def test_one_task_has_no_figures_of_its_own(tmp_path):
    found = evaluation_figures(evaluation(tmp_path, ROWS[:2]))
    assert not any(":" in name for name in found)
    assert task_of("openai/gsm8k/1f") == "openai/gsm8k"


def test_pass_at_k_is_over_prompts_with_enough_scored_samples(tmp_path):
    found = sample_figures(evaluation(tmp_path, ROWS), [1, 2, 3])
    assert found["pass_at_1"] == pytest.approx((1 / 3 + 0) / 2)
    assert found["pass_at_2"] == pytest.approx((2 / 3 + 0) / 2)
    assert (found["pass_at_3"], found["pass_at_3_prompts"]) == (1.0, 1)
    assert found["pass_at_1_low"] <= found["pass_at_1"] <= found["pass_at_1_high"]
    assert sample_figures(evaluation(tmp_path / "b", ROWS[:4]), [1]) == {}


def test_the_summary_has_a_line_for_each_task_and_each_k(tmp_path):
    first = evaluation(tmp_path / "a", ROWS)
    last = evaluation(tmp_path / "b", [(p, True, True, s) for p, _, _, s in ROWS])
    paths = {0: {"evaluation": first}, 4: {"evaluation": last}}
    lines = "\n".join(summary_lines(collect_metrics("r", paths, [1, 2])))
    assert "gcd              1 of 2 (9% to 91%) -> 2 of 2 (34% to 100%)" in lines
    assert "pass@2             33.3%" in lines and "-> 100.0%" in lines
