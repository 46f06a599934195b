"""A whole run inside one allocation, by the scripts for sbatch."""

import os
import sys
from pathlib import Path

import pytest

from rl.artifacts import read_json

from ..workflow.conftest import ROOT, wait_for
from . import cluster
from .conftest import Submitter, artifacts_of, written

SIZES = ("--cpus-per-task=2", "--mem=8000", "--time=10", "--gres=gpu:1")


@pytest.fixture
def place(slurm, tmp_path):
    place = Submitter(tmp_path / "place")
    yield place
    place.close()


def submit(place, script, *options, config) -> str:
    """Submits a script as a user would; what it printed, once it is complete."""
    own_programs = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    job = cluster.run(
        *("sbatch", "--parsable", *options, str(ROOT / "workflow" / "slurm" / script)),
        *("--snakefile", str(ROOT / "Snakefile"), "--configfile", str(config)),
        *("--workflow-profile", str(ROOT / "profiles" / "default")),
        env=place.environment | own_programs,
        cwd=place.folder,
    ).strip()
    wait_for(lambda: not states(job) & {"PENDING", "RUNNING", "COMPLETING"})
    printed = (place.folder / f"slurm-{job}.log").read_text()
    assert states(job) == {"COMPLETED"}, printed
    return printed


def states(job) -> set[str]:
    """Of a job, or of the two jobs that it consists of over two partitions."""
    return set(cluster.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").split())


def test_a_colocated_run_equals_a_local_one(place, local):
    config = written(place.folder / "config.yaml", {})
    printed = submit(place, "colocated.sh", *SIZES, "--partition=actor", config=config)
    assert "Held-out accuracy" in printed
    assert place.artifacts() == artifacts_of(local.path("tiny"))


@pytest.mark.parametrize(
    ("options", "second_node"),
    [
        ((*SIZES, "-pactor"), "127.0.0.12"),
        ((*SIZES, "-N1", "-pactor", ":", *SIZES, "-N1", "-prollout"), "127.0.0.21"),
    ],
    ids=["two nodes", "two partitions"],
)
def test_a_pool_equals_a_local_run(place, local, options, second_node):
    log = cluster.HOME / "log" / f"slurmd-{second_node}"
    launched = log.read_text().count("launch task")
    submit(place, "pool.sh", *options, config=place.config())
    assert place.artifacts() == artifacts_of(local.path("tiny"))
    sync = read_json(place.path("tiny", "0002", "timings", "generate_rollouts.json"))["sync"]
    assert sync["outcome"] == "load" and sync["bytes_moved"] > 0
    assert log.read_text().count("launch task") == launched + 1
