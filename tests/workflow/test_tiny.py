"""The whole DAG on the tiny experiment: what it makes, and that it makes it once."""

import itertools
import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from rl.artifacts import artifact_id, read_json, read_table, table_provenance

from .conftest import ROOT, content_ids

ITERATIONS = ("0001", "0002", "0003")


def test_every_stage_says_a_line(finished):
    for stage in ("init_policy", "prepare_prompts", "start_policy", "sync_weights", "report_run"):
        assert stage in finished.printed
    for iteration in (1, 2, 3):
        for stage in ("generate_rollouts", "score_rewards", "update_actor", "check_iteration"):
            assert any(
                f"tiny {iteration}/3" in line and stage in line
                for line in finished.printed.splitlines()
            ), (stage, iteration)
    assert "Held-out accuracy" in finished.printed


def test_a_second_run_does_nothing(finished):
    assert "Nothing to be done" in finished.run()


def test_parameters_change_and_stay_finite(finished):
    versions = [
        load_file(finished.path("tiny", n, "weights", "adapter_model.safetensors"))
        for n in ("0000", *ITERATIONS)
    ]
    for before, after in itertools.pairwise(versions):
        assert before.keys() == after.keys()
        assert all(np.isfinite(values).all() for values in after.values())
        assert any(not np.array_equal(before[name], after[name]) for name in before)


def test_advantages_are_not_degenerate(finished):
    for n in ITERATIONS:
        table = read_table(finished.path("tiny", n, "advantages.parquet"), "advantages")
        groups: dict[str, list[float]] = {}
        for row in table.to_pylist():
            groups.setdefault(row["group_id"], []).append(row["advantages"][0])
        spread = [values for values in groups.values() if max(values) > min(values)]
        assert spread
        for values in groups.values():
            assert math.isclose(sum(values), 0.0, abs_tol=1e-5)


def test_each_iteration_samples_with_the_policy_before_it(finished):
    for n in ITERATIONS:
        table = pq.read_table(finished.path("tiny", n, "rollouts.parquet"))
        assert set(table["policy_version"].to_pylist()) == {int(n) - 1}
        provenance = table_provenance(finished.path("tiny", n, "rollouts.parquet"))
        weights = finished.path("tiny", f"{int(n) - 1:04d}", "weights")
        assert provenance["inputs"]["weights"] == artifact_id(weights)


def test_the_prompts_of_iterations_differ_until_the_epoch_ends(finished):
    drawn = [
        set(pq.read_table(finished.path("tiny", n, "rollouts.parquet"))["prompt_id"].to_pylist())
        for n in ITERATIONS
    ]
    assert [len(names) for names in drawn] == [4, 4, 4]
    assert len(set.union(*drawn)) == 12


def test_a_colocated_sync_moves_nothing_and_exports_the_adapter_alone(finished):
    for n in ("0000", *ITERATIONS):
        timings = read_json(finished.path("tiny", n, "timings", "sync_weights.json"))
        assert (timings["sync"]["outcome"], timings["sync"]["bytes_moved"]) == ("alias", 0)
        tensors = load_file(finished.path("tiny", n, "weights", "adapter_model.safetensors"))
        assert all("lora_" in name for name in tensors)
        assert timings["sync"]["bytes_written"] == sum(v.nbytes for v in tensors.values())
    for n in ITERATIONS:
        timings = read_json(finished.path("tiny", n, "timings", "generate_rollouts.json"))
        assert (timings["sync"]["outcome"], timings["sync"]["bytes_moved"]) == ("alias", 0)


def test_drift_between_rollout_and_trainer_is_nil(finished):
    for n in ITERATIONS:
        assert read_json(finished.path("tiny", n, "update.json"))["logprob_drift_max"] < 1e-4


def test_metrics_and_figures_are_there(finished):
    metrics = read_table(finished.path("tiny", "metrics.parquet"), "metrics")
    assert set(metrics["iteration"].to_pylist()) == {0, 1, 2, 3}
    for figure in finished.path("tiny", "report").glob("*.svg"):
        text = figure.read_text()
        assert text.startswith("<?xml"), figure
        assert "No timings" not in text, figure


def test_nothing_is_left_half_written(finished):
    assert [p for p in finished.path().rglob(".*") if "partial" in p.name] == []


@pytest.mark.parametrize("launcher", ["cold"])
def test_a_stage_alone_gives_the_same_content_in_a_process_of_its_own(copied, launcher):
    before = content_ids(copied.path("tiny"))
    name = "results/tiny/0002/rollouts.parquet"
    target = copied.folder / name
    content = target.read_bytes()
    target.unlink()
    copied.run("--default-resources", f"launcher='{launcher}'", "--", name)
    assert target.read_bytes() == content
    assert copied.worker_pids() == []
    assert content_ids(copied.path("tiny")) == before


def test_snakemakes_report_has_the_figures(finished):
    target = finished.folder / "report.html"
    finished.run("--report", str(target))
    text = target.read_text()
    for name in ("learning_curve", "logprob_drift", "stage_seconds"):
        assert name in text


def test_the_linter_is_content(finished):
    printed = finished.run("--lint")
    assert "your workflow is in a good condition" in printed


def test_the_profile_of_the_repository_is_loaded_by_itself(finished):
    import subprocess

    done = subprocess.run(
        [*finished.command()[:1], "-n", "--cores", "1", "--configfile", "configs/tiny.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "Using workflow specific profile profiles/default" in done.stderr
    assert json.dumps(done.returncode) == "0"
