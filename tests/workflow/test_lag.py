"""A lag lets rollouts run beside updates, on a mesh of their own; which stages run when."""

import itertools
import json
import signal
from collections import Counter

import pytest
import yaml

from rl.config import expand
from rl.report.timeline import collect_spans
from rl.stage_table import STAGES

from .conftest import ROOT, TINY, Workplace, content_ids, wait_for

TWO_MESHES = {
    "meshes": {"train": {"devices": 1}, "decode": {"devices": 1}},
    "roles": {"actor": "train", "reference": "train", "rollout": "decode", "reward": "decode"},
}
LONG = {"generate_rollouts": 1.0, "update_actor": 1.0}


def plan(folder, **settings):
    """The tiny config without evaluation and KL, with other settings, as a file."""
    config = yaml.safe_load(TINY.read_text()) | {"evaluation": {"every": 0}}
    config |= {"algorithm": {"kl": {"coefficient": 0}}} | settings
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def timed(workplace):
    """A workplace whose stages only take their time."""
    workplace.environment |= {
        "MESHDIAL_STAGES_MODULE": "tests.workflow.timed_stages",
        "PYTHONPATH": str(ROOT),
        "STAGE_SECONDS": json.dumps(LONG),
    }
    return workplace


def spans_of(workplace, config, *arguments, launcher="cold"):
    """What ran when: (run, span), after a whole run of `config`."""
    workplace.run("--default-resources", f"launcher='{launcher}'", *arguments, config=config)
    found = []
    for run in expand(yaml.safe_load(config.read_text())):
        folders = {int(p.name): p for p in workplace.path(run).iterdir() if p.name.isdigit()}
        files = {
            n: {stage: folder / "timings" / f"{stage}.json" for stage in STAGES}
            for n, folder in folders.items()
        }
        found += [(run, span) for span in collect_spans(files)]
    return sorted(found, key=lambda pair: pair[1].started)


def overlap(first, second):
    """For how many seconds both ran."""
    return min(first.ended, second.ended) - max(first.started, second.started)


def pairs(spans):
    """The rollouts of each iteration with the update of the one before."""
    by_name = {(span.stage, span.iteration): span for _, span in spans}
    last = max(iteration for _, iteration in by_name)
    return [
        (by_name["generate_rollouts", n + 1], by_name["update_actor", n]) for n in range(1, last)
    ]


def crowded(spans):
    """Stages that ran at the same time on one mesh."""
    by_mesh = itertools.combinations([span for _, span in spans if span.mesh != "host"], 2)
    return [(a, b) for a, b in by_mesh if a.mesh == b.mesh and overlap(a, b) > 0.01]


def test_with_lag_1_rollouts_run_beside_the_update_before_and_each_mesh_runs_one_stage(timed):
    spans = spans_of(timed, plan(timed.folder, lag=1, iterations=4, cluster=TWO_MESHES))
    assert [overlap(*pair) > 0.3 for pair in pairs(spans)] == [True] * 3
    assert crowded(spans) == []
    meshes = {span.stage: span.mesh for _, span in spans}
    assert (meshes["generate_rollouts"], meshes["update_actor"]) == ("decode", "train")
    assert (meshes["policy_logprobs"], meshes["check_iteration"]) == ("train", "host")


def test_with_lag_0_rollouts_wait_for_the_update_before(timed):
    spans = spans_of(timed, plan(timed.folder, iterations=3, cluster=TWO_MESHES))
    assert [overlap(*pair) < 0 for pair in pairs(spans)] == [True] * 2
    assert "policy_logprobs" not in {span.stage for _, span in spans}


def test_with_lag_1_one_core_is_enough(timed):
    timed.environment["STAGE_SECONDS"] = "{}"
    config = plan(timed.folder, lag=1, iterations=4, cluster=TWO_MESHES)
    spans = spans_of(timed, config, "--cores", "1")
    assert [overlap(*pair) <= 0.01 for pair in pairs(spans)] == [True] * 3
    updates = [span.iteration for _, span in spans if span.stage == "update_actor"]
    assert updates == [1, 2, 3, 4]


def test_in_the_worker_of_one_mesh_stages_take_turns_and_runs_go_depth_first(timed):
    timed.environment["STAGE_SECONDS"] = json.dumps({"update_actor": 0.3})
    grid = {"run": "pair", "sweep": {"grid": {"seed": [0, 1]}}}
    config = plan(timed.folder, lag=1, iterations=2, **grid)
    spans = spans_of(timed, config, launcher="warm")
    assert crowded(spans) == []
    order = [run for run, span in spans if span.iteration > 0]
    assert order == sorted(order)


def done(workplace):
    """(iteration, stage) of every stage that ever came to its end."""
    lines = (workplace.folder / "ran.txt").read_text().splitlines()
    return [(int(number), stage) for number, stage in map(str.split, lines)]


def versions_left(workplace, name):
    return [int(p.parent.name) for p in sorted(workplace.path("tiny").glob(f"0*/{name}"))]


COLD = ("--default-resources", "launcher='cold'")


@pytest.mark.parametrize("lag", [1, 2])
def test_weights_live_until_their_last_reader_and_more_iterations_only_add_jobs(timed, lag):
    timed.environment["STAGE_SECONDS"] = "{}"
    settings = {"lag": lag, "keep": "last", "cluster": TWO_MESHES}
    for last in (3, 5):
        config = plan(timed.folder, iterations=last, **settings)
        timed.run(*COLD, config=config)
        assert versions_left(timed, "policy") == [0, last]
        assert versions_left(timed, "weights") == sorted({0, *range(last - lag, last + 1)})
    ran = [pair for pair in done(timed) if pair[0] > 0]
    assert len(ran) == len(set(ran))  # nothing twice
    assert {n for n, stage in ran if stage == "generate_rollouts"} == {1, 2, 3, 4, 5}

    timed.path("tiny", "0004", "rollouts.parquet").unlink()
    printed = timed.run(*COLD, config=config, expect=1)
    assert "not kept (keep: last)" in printed and "allow_remake=true" in printed
    assert not timed.path("tiny", "0004", "rollouts.parquet").exists()


@pytest.mark.parametrize("lag", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_with_a_lag_goes_on_where_it_was(timed, lag):
    settings = {"lag": lag, "keep": "last", "cluster": TWO_MESHES, "iterations": 4}
    timed.environment["STAGE_SECONDS"] = json.dumps({"generate_rollouts": 0.4, "update_actor": 0.4})
    config = plan(timed.folder, **settings)
    for moment in (1, 3):
        process = timed.start(*COLD, config=config)
        log = timed.path("tiny", f"000{moment}", "logs", "update_actor.log")
        wait_for(lambda log=log, process=process: log.exists() or process.poll() is not None)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    timed.run(*COLD, config=config)
    assert versions_left(timed, "policy") == [0, 4]
    assert versions_left(timed, "weights") == sorted({0, *range(4 - lag, 5)})
    counts = Counter(done(timed))
    assert {counts[n, "update_actor"] for n in (1, 2, 3, 4)} == {1}
    assert counts.total() - len(counts) <= 4  # at most what ran when Snakemake was killed
    assert "Nothing to be done" in timed.run(*COLD, config=config)


@pytest.mark.slow
def test_a_mesh_for_the_rollouts_changes_no_content(workplace, tmp_path):
    apart = ROOT / "configs" / "tiny_disaggregated.yaml"
    config = yaml.safe_load(apart.read_text())
    del config["cluster"]
    together = Workplace(tmp_path / "together")
    path = together.folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    try:
        together.run(config=path)
    finally:
        together.close()
    workplace.run("--cores", "1", config=apart)
    name = config["run"]
    expected = content_ids(together.path(name))
    assert content_ids(workplace.path(name)) == expected
    assert {f"000{n}/update.json" for n in (1, 2, 3, 4)} < set(expected)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("actor_mesh=0", "limit actor_mesh is 0, expected at least 1"),
        ("actr_mesh=1", "limit actr_mesh is unknown, expected one of actor_mesh"),
        ("micro_batch_tokens=1", "micro_batch_tokens"),
    ],
)
def test_a_limit_that_would_change_what_a_rule_takes_is_refused(timed, limit, words):
    printed = timed.run("-n", "--resources", limit, config=plan(timed.folder), expect=1)
    assert words in printed
