"""Iterations that sample with an older policy: versions, weights, figures and checks."""

import json
import shutil

import numpy as np
import pytest

from rl.algorithms.off_policy import off_policy_weights
from rl.artifacts import read_json, read_table
from rl.errors import MeshdialError
from rl.report.metrics import collect_metrics, series
from rl.report.summary import summary_lines

from .pipeline import Pipeline

FIGURES = ("off_policy_ess", "off_policy_truncated", "off_policy_ratio_mean")
MOVING = {"optimizer": {"learning_rate": 0.1}}  # versions that differ, on a tiny random model


def ran(folder, iterations=3, **settings):
    pipeline = Pipeline(folder, **MOVING, **settings)
    pipeline.start()
    for n in range(1, iterations + 1):
        pipeline.iterate(n)
    return pipeline


@pytest.fixture(scope="module")
def lagged(tmp_path_factory):
    """Three iterations with lag 1. Tests must not change it."""
    return ran(tmp_path_factory.mktemp("lagged"), lag=1)


def figures(pipeline, n):
    return read_json(pipeline.path(str(n), "update.json"))


def ragged(pipeline, n, name, column):
    return read_table(pipeline.path(str(n), f"{name}.parquet"), name)[column].to_pylist()


def test_each_iteration_samples_with_the_policy_that_the_lag_says(lagged, tmp_path):
    versions = [set(ragged(lagged, n, "rollouts", "policy_version")) for n in (1, 2, 3)]
    assert versions == [{0}, {0}, {1}]
    further = ran(tmp_path, lag=2)
    assert [set(ragged(further, n, "rollouts", "policy_version")) for n in (1, 2, 3)] == [{0}] * 3


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_figures_are_those_of_the_tables(lagged, tmp_path, level):
    settings = {"correction": level, "cap": 1.5}
    pipeline = lagged
    if level == "sequence":
        pipeline = ran(tmp_path, 2, lag=1, algorithm={"off_policy": settings})
    proximal, rollout = (
        ragged(pipeline, 2, *place)
        for place in (("policy_logprobs", "policy_logprobs"), ("rollouts", "rollout_logprobs"))
    )
    ratios = [np.exp(np.subtract(p, r)) for p, r in zip(proximal, rollout, strict=True)]
    ratio = np.concatenate(ratios) if level == "token" else np.array([r.prod() for r in ratios])
    weight = np.minimum(ratio, 2.0 if level == "token" else 1.5)
    found = figures(pipeline, 2)
    assert np.abs(ratio - 1).max() > 0.01
    effective = weight.sum() ** 2 / (weight**2).sum() / weight.size
    expected = (effective, (ratio > weight).mean(), ratio.mean())
    assert [found[name] for name in FIGURES] == pytest.approx(expected, rel=1e-4)


def test_at_first_the_policy_that_samples_is_the_one_that_learns(lagged):
    found = figures(lagged, 1)
    assert [found[name] for name in FIGURES] == pytest.approx([1.0, 0.0, 1.0], abs=1e-5)
    assert found["logprob_drift_max"] < 1e-4
    assert "logprob_staleness_mean" not in found


def test_how_far_a_policy_moved_is_no_drift_and_passes_the_checks(lagged):
    found = figures(lagged, 3)
    bound = lagged.config["checks"]["max_logprob_drift"]
    assert found["logprob_staleness_mean"] > bound
    assert not [name for name in found if "logprob_drift" in name]
    checks = read_json(lagged.path("3", "checks.json"))
    assert checks["logprob_staleness_mean"] == found["logprob_staleness_mean"]
    assert any("staleness" in line for line in lagged.said if "check_iteration" in line)


def test_metrics_and_summary_tell_of_the_weights(lagged):
    paths = {n: {"update": lagged.path(str(n), "update.json")} for n in (1, 2, 3)}
    metrics = collect_metrics("tiny", paths)
    iterations, values = series(metrics, "update_actor", "off_policy_ess")
    assert iterations.tolist() == [1, 2, 3]
    (line,) = (line for line in summary_lines(metrics) if line.startswith("Off-policy weights"))
    assert f"{values.mean():.1%} of the batch (least {values.min():.1%})" in line


def test_without_a_lag_there_are_no_weights(tmp_path):
    pipeline = ran(tmp_path, 1, algorithm={"off_policy": {"correction": "sequence", "cap": 0.1}})
    found = figures(pipeline, 1)
    assert not [name for name in found if "off_policy" in name or "staleness" in name]
    assert not any("Off-policy" in line for line in pipeline.said)


def test_the_weights_change_the_update(lagged, tmp_path):
    def policy_id(pipeline, n):
        return read_json(pipeline.path(str(n), "policy", "manifest.json"))["parameters_content_id"]

    plain = ran(tmp_path, 2, lag=1, algorithm={"off_policy": {"correction": "none"}})
    assert not [name for name in figures(plain, 2) if "off_policy" in name]
    assert policy_id(plain, 2) != policy_id(lagged, 2)
    assert figures(plain, 2)["loss"] != figures(lagged, 2)["loss"]


def test_rollouts_of_another_version_than_the_lag_says_fail_the_checks(tmp_path):
    pipeline = ran(tmp_path, 2)
    pipeline.config["lag"] = 1
    with pytest.raises(MeshdialError, match=r"policy_version is 1, expected 0 in iteration 2 with"):
        pipeline.check(2)


def test_the_proximal_policy_is_the_one_that_the_update_starts_from(lagged, tmp_path):
    found = figures(lagged, 3)
    assert found["anchor_drift_mean"] < 1e-5
    copy = Pipeline(tmp_path / "copy", lag=1, **MOVING)
    shutil.copytree(lagged.folder, copy.folder)
    inputs = [("rollouts", "3/rollouts.parquet"), ("policy", "1/policy"), ("base", "base")]
    outputs = [("policy_logprobs", "3/policy_logprobs.parquet")]
    with pytest.raises(MeshdialError, match="1/policy holds policy version 1, expected 2"):
        copy.stage("policy_logprobs", 3, inputs, outputs)
    path = copy.path("3", "update.json")
    path.write_text(json.dumps(found | {"anchor_drift_mean": 0.1}))
    with pytest.raises(MeshdialError, match=r"anchor_drift_mean is 0\.1.* policy_logprobs is not"):
        copy.check(3)


def test_log_probabilities_of_another_policy_than_the_updates_fail_the_checks(lagged, tmp_path):
    copy = Pipeline(tmp_path / "copy", lag=1, **MOVING)
    shutil.copytree(lagged.folder, copy.folder)
    manifest = copy.path("3", "policy", "manifest.json")
    told = read_json(manifest)
    told["inputs"]["policy"] = "sha256:0"
    manifest.write_text(json.dumps(told))
    with pytest.raises(MeshdialError, match=r"policy_logprobs\.parquet was made from policy"):
        copy.check(3)


def test_a_token_that_is_not_trained_on_has_no_weight_whatever_it_holds():
    mask = np.array([[True, False], [True, True]])
    proximal = np.array([[-1.0, np.nan], [-2.0, -1.0]])
    clean = np.where(mask, proximal, 0.0)
    for level in ("token", "sequence"):
        dirty = off_policy_weights(proximal, proximal - 0.5, mask, level, 2.0)
        expected = off_policy_weights(clean, clean - 0.5, mask, level, 2.0)
        np.testing.assert_array_equal(dirty.weights, expected.weights)
        assert dirty[1:] == expected[1:]
