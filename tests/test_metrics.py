"""Metrics, timings, intervals and the summary, against numbers worked out by hand."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.artifacts import SCHEMAS, Publisher, make_table, write_table
from rl.errors import MeshdialError
from rl.report.intervals import wilson_interval
from rl.report.metrics import collect_metrics, collect_timings, run_name, series
from rl.report.summary import sparkline, summary_lines

PROVENANCE = {"stage": "test", "stage_version": 1, "config": {}, "inputs": {}}


def write(path, kind, columns):
    write_table(Publisher(), path, kind, make_table(kind, columns), PROVENANCE)
    return path


def rollout_columns(lengths, reasons, version=0):
    count = len(lengths)
    words = [str(i) for i in range(count)]
    return {
        "sample_id": words,
        "group_id": words,
        "prompt_id": words,
        "prompt": words,
        "prompt_tokens": [[1]] * count,
        "completion": words,
        "completion_tokens": [[1] * n for n in lengths],
        "completion_mask": [[True] * n for n in lengths],
        "rollout_logprobs": [[-0.5] * n for n in lengths],
        "sampling_logprobs": [None] * count,
        "policy_version": [version] * count,
        "finish_reason": reasons,
        "ground_truth": words,
        "info": ["{}"] * count,
    }


def figures(table, iteration, stage):
    rows = [r for r in table.to_pylist() if (r["iteration"], r["stage"]) == (iteration, stage)]
    return {row["name"]: row["value"] for row in rows}


def tidy(rows, run="r"):
    columns = zip(*[(run, *row) for row in rows], strict=True)
    return make_table("metrics", dict(zip(SCHEMAS["metrics"].names, columns, strict=True)))


def evaluation_rows(iteration, num_correct, num_samples, num_unscored=0):
    low, high = wilson_interval(num_correct, num_samples)
    values = {
        "accuracy": num_correct / num_samples,
        "accuracy_low": low,
        "accuracy_high": high,
        "num_correct": num_correct,
        "num_samples": num_samples,
        "num_unscored": num_unscored,
    }
    return [(iteration, "evaluate_policy", name, float(v)) for name, v in values.items()]


def test_wilson_interval_of_known_cases():
    # z^2 = 3.841459: none of 10 gives [0, z^2 / (10 + z^2)].
    assert wilson_interval(0, 10) == pytest.approx((0, 3.841459 / 13.841459), abs=1e-6)
    assert wilson_interval(5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998


@given(st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_surrounds_the_proportion_and_mirrors(counts):
    num_correct, num_samples = counts
    low, high = wilson_interval(num_correct, num_samples)
    assert 0 <= low <= num_correct / num_samples <= high <= 1
    mirrored = wilson_interval(num_samples - num_correct, num_samples)
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-12)


@pytest.mark.parametrize("counts", [(0, 0), (-1, 3), (4, 3)])
def test_wilson_interval_refuses_what_is_no_proportion(counts):
    with pytest.raises(ValueError, match="not a proportion"):
        wilson_interval(*counts)


def test_rollout_figures(tmp_path):
    columns = rollout_columns([1, 2, 3, 6], ["stop", "stop", "length", "stop"], version=4)
    path = write(tmp_path / "rollouts.parquet", "rollouts", columns)
    assert figures(collect_metrics("r", {5: {"rollouts": path}}), 5, "generate_rollouts") == {
        "num_samples": 4,
        "num_tokens": 12,
        "completion_length_mean": 3,
        "completion_length_p10": pytest.approx(1.3),  # 0.3 of the way from 1 to 2
        "completion_length_p90": pytest.approx(5.1),  # 0.7 of the way from 3 to 6
        "policy_version": 4,
        "finish_stop_fraction": 0.75,
        "finish_length_fraction": 0.25,
        "finish_timeout_fraction": 0,
    }


def test_reward_figures_leave_out_what_was_not_scored(tmp_path):
    columns = {
        "sample_id": ["a", "b", "c"],
        "reward": [1.0, None, 0.0],
        "scored_ok": [True, False, True],
        "failure": [None, "timed out", None],
        "component:format": [0.5, None, 0.25],
    }
    path = write(tmp_path / "rewards.parquet", "rewards", columns)
    assert figures(collect_metrics("r", {1: {"rewards": path}}), 1, "score_rewards") == {
        "num_samples": 3,
        "num_unscored": 1,
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "reward_min": 0,
        "reward_max": 1,
        "component:format_mean": 0.375,
    }


def test_rewards_of_which_none_was_scored_have_no_mean(tmp_path):
    columns = {"sample_id": ["a"], "reward": [None], "scored_ok": [False], "failure": ["crashed"]}
    path = write(tmp_path / "rewards.parquet", "rewards", columns)
    found = figures(collect_metrics("r", {1: {"rewards": path}}), 1, "score_rewards")
    assert found == {"num_samples": 1, "num_unscored": 1}


def test_group_figures(tmp_path):
    # Group g: 0 and 1 deviate by 1/2. Group h: equal. Group i: 0 and 3, the third not scored.
    columns = {
        "sample_id": list("abcdefg"),
        "group_id": ["g", "h", "g", "h", "i", "i", "i"],
        "reward": [0.0, 1.0, 1.0, 1.0, 0.0, 3.0, None],
        "shaped_reward": [0.0, 1.0, 1.0, 0.5, 0.0, 3.0, None],
        "advantages": [[-1.0], [0.0], [1.0], [0.0], [-1.0], [1.0], [0.0]],
        "returns": [None] * 7,
        "is_degenerate": [False, True, False, True, False, False, False],
        "is_used": [True, False, True, False, True, True, True],
    }
    path = write(tmp_path / "advantages.parquet", "advantages", columns)
    found = figures(collect_metrics("r", {1: {"advantages": path}}), 1, "estimate_advantages")
    assert found == {
        "num_groups": 3,
        "num_degenerate_groups": 1,
        "degenerate_group_fraction": pytest.approx(1 / 3),
        "group_reward_std_mean": pytest.approx((0.5 + 0 + 1.5) / 3),
        "num_groups_left_out": 1,
        "num_degenerate_groups_used": 0,
        "shaped_reward_mean": pytest.approx(5.5 / 6),
    }


def test_evaluation_figures_count_over_scored_samples(tmp_path):
    columns = rollout_columns([2, 4, 6, 8], ["stop"] * 4) | {
        "reward": [1.0, 0.5, None, 0.0],
        "is_correct": [True, False, False, False],
        "scored_ok": [True, True, False, True],
        "is_sampled": [False] * 4,
    }
    path = write(tmp_path / "evaluation.parquet", "evaluation", columns)
    found = figures(collect_metrics("r", {0: {"evaluation": path}}), 0, "evaluate_policy")
    low, high = wilson_interval(1, 3)
    expected = {
        "num_samples": 3,
        "num_unscored": 1,
        "num_correct": 1,
        "accuracy": 1 / 3,
        "accuracy_low": low,
        "accuracy_high": high,
        "reward_mean": 0.5,
        "completion_length_mean": 5,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_metrics_are_ordered_and_repeat_byte_for_byte(tmp_path):
    for n in (1, 2, 10):
        (tmp_path / f"{n}.json").write_text(json.dumps({"loss": 0.5 * n, "kl": 0.25, "note": "x"}))
    paths = {n: {"update": tmp_path / f"{n}.json"} for n in (10, 1, 2)}
    table = collect_metrics("addition", paths)
    assert table.schema == SCHEMAS["metrics"]
    assert run_name(table) == "addition"
    assert table["iteration"].to_pylist() == [1, 1, 2, 2, 10, 10]
    assert table["name"].to_pylist() == ["kl", "loss"] * 3
    iterations, losses = series(table, "update_actor", "loss")
    assert (iterations.tolist(), losses.tolist()) == ([1, 2, 10], [0.5, 1.0, 5.0])
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path in files:
        write_table(Publisher(), path, "metrics", collect_metrics("addition", paths), PROVENANCE)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_only_the_needed_columns_are_read(tmp_path, monkeypatch):
    path = write(tmp_path / "rollouts.parquet", "rollouts", rollout_columns([1], ["stop"]))
    asked = []
    read = pq.ParquetFile.read
    monkeypatch.setattr(
        pq.ParquetFile, "read", lambda self, columns: asked.append(columns) or read(self, columns)
    )
    collect_metrics("r", {1: {"rollouts": path}})
    assert asked == [["completion_mask", "finish_reason", "policy_version"]]


def test_bad_artifacts_are_named(tmp_path):
    with pytest.raises(MeshdialError, match="no metrics of an artifact named 'rollout'"):
        collect_metrics("r", {1: {"rollout": tmp_path / "x"}})
    with pytest.raises(MeshdialError, match=r"rollouts\.parquet is missing"):
        collect_metrics("r", {1: {"rollouts": tmp_path / "rollouts.parquet"}})
    rewards = write(
        tmp_path / "rewards.parquet",
        "rewards",
        {"sample_id": ["a"], "reward": [1.0], "scored_ok": [True], "failure": [None]},
    )
    with pytest.raises(MeshdialError, match=r"a table of rewards, not of rollouts"):
        collect_metrics("r", {1: {"rollouts": rewards}})
    footer = pq.read_metadata(rewards).metadata[b"meshdial"]
    other = pa.table({"reward": pa.array([1.0], pa.float32())})
    pq.write_table(other.replace_schema_metadata({b"meshdial": footer}), tmp_path / "other.parquet")
    with pytest.raises(MeshdialError, match="column reward is float, expected double"):
        collect_metrics("r", {1: {"rewards": tmp_path / "other.parquet"}})
    other = other.rename_columns(["score"]).replace_schema_metadata({b"meshdial": footer})
    pq.write_table(other, tmp_path / "other.parquet")
    with pytest.raises(MeshdialError, match="has no column reward, which a rewards table needs"):
        collect_metrics("r", {1: {"rewards": tmp_path / "other.parquet"}})


def test_timings_flatten_numbers_and_skip_missing_files(tmp_path):
    record = {"seconds": 2.5, "sync": {"outcome": "alias", "bytes_moved": 0}, "is_warm": True}
    (tmp_path / "update_actor.json").write_text(json.dumps(record))
    paths = {1: {n: tmp_path / f"{n}.json" for n in ("update_actor", "generate_rollouts")}}
    table = collect_timings("r", paths)
    assert table.drop_columns(["run"]).to_pylist() == [
        {"iteration": 1, "stage": "update_actor", "name": "seconds", "value": 2.5},
        {"iteration": 1, "stage": "update_actor", "name": "sync.bytes_moved", "value": 0.0},
    ]


def test_no_rows_still_have_the_columns():
    assert collect_timings("r", {}).schema == SCHEMAS["metrics"]
    with pytest.raises(MeshdialError, match="exactly one run"):
        run_name(collect_timings("r", {}))


def test_sparkline_levels_and_width():
    assert sparkline(np.array([0.0, 0.5, 1.0]), 0.0, 1.0) == "▁▅█"
    assert sparkline(np.array([0.2, 0.2]), 0.2, 0.2) == "▁▁"
    assert sparkline(np.repeat([0.0, 1.0], 100), 0.0, 1.0, width=4) == "▁▁██"


def test_summary_of_a_run(tmp_path):
    rewards = [(1, "score_rewards", "reward_mean", 0.125), (2, "score_rewards", "reward_mean", 0.5)]
    metrics = tidy([*evaluation_rows(0, 0, 10), *rewards, *evaluation_rows(2, 5, 10, 1)])
    timings = tidy(
        [
            (1, "update_actor", "seconds", 3.0),
            (1, "update_actor", "cpu_seconds", 99.0),
            (2, "update_actor", "seconds", 2.0),
            (2, "generate_rollouts", "seconds", 7.5),
        ]
    )
    assert summary_lines(metrics, timings, "results/r/report/learning_curve.svg") == [
        "Held-out accuracy  0.0% (0 of 10, 0.0% to 27.8%) -> "
        "50.0% (5 of 10, 23.7% to 76.3%; 1 more could not be scored)",
        "                   iterations 0 -> 2, intervals are 95% Wilson",
        "                   ▁▅  (0% to 100%, 2 evaluations)",
        "Training reward    0.125 -> 0.500 over 2 iterations",
        "                   ▁█  (0.125 to 0.500)",
        "Seconds by stage   generate_rollouts 7.5, update_actor 5.0, total 12.5",
        "Learning curve     results/r/report/learning_curve.svg",
    ]


def test_summary_without_evaluations_or_timings():
    metrics = tidy([(1, "score_rewards", "reward_mean", 0.5)])
    assert summary_lines(metrics) == [
        "Held-out accuracy  never evaluated",
        "Training reward    0.500 -> 0.500 over 1 iteration",
        "                   ▁  (0.500 to 0.500)",
    ]


def test_figures_of_a_critic(tmp_path):
    path = tmp_path / "critic_update.json"
    path.write_text('{"value_loss": 0.25, "explained_variance": -0.5}')
    found = figures(collect_metrics("r", {2: {"critic_update": path}}), 2, "update_critic")
    assert found == {"value_loss": 0.25, "explained_variance": -0.5}
