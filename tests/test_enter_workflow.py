"""What Snakemake's process tells its stages of the job around them."""

import os

import pytest

from rl.processes import slurm
from rl.workflow import enter_workflow


@pytest.mark.parametrize(("is_remote", "own"), [(True, True), (False, False)])
def test_only_the_executors_job_is_for_one_stage(monkeypatch, is_remote, own):
    for name in ("MESHDIAL_STAGE_JOB", "MESHDIAL_PARENT_PID", "PATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # which then go back to what they were
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    enter_workflow(is_remote)
    assert slurm.is_for_one_mesh("cold") == own
    assert not slurm.is_for_one_mesh("warm")
    assert not slurm.is_for_one_mesh("pool")  # no step
