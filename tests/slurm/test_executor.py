"""Each stage as a SLURM job, on a real SLURM: a whole run, and all that may happen to a job."""

import signal

from ..workflow.conftest import wait_for
from . import cluster
from .conftest import FIRST_POLICY, artifacts_of

LAST_EVALUATION = ("tiny", "0002", "evaluation.parquet")


def test_a_run_on_two_pools_equals_a_local_one(submitted, local):
    assert submitted.artifacts() == artifacts_of(local.path("tiny"))
    assert "Held-out accuracy" in submitted.output


def test_each_stage_ran_on_the_pool_of_its_role(submitted):
    assert {job["state"] for job in submitted.jobs()} == {"COMPLETED"}
    assert {(job["rule"].split("_wildcards")[0], job["pool"]) for job in submitted.jobs()} == {
        ("rule_start_policy_kept", "actor"),
        ("rule_update_actor_kept", "actor"),
        ("rule_reference_logprobs", "actor"),
        ("rule_generate_rollouts", "rollout"),
        ("rule_evaluate_policy", "rollout"),
        ("rule_evaluate_base", "rollout"),
    }
    assert {job["gres"] for job in submitted.jobs()} == {"gres:gpu:1"}
    assert len(submitted.jobs()) == 9  # the rest books no device and runs beside Snakemake


def test_what_a_stage_says_on_its_node_is_shown_and_kept(submitted):
    (line,) = (s for s in submitted.output.splitlines() if s.startswith("tiny 2/2") and "loss" in s)
    assert submitted.path("tiny", "0002", "logs", "update_actor.log").read_text() == line + "\n"


def test_running_again_does_nothing(submitted):
    assert "Nothing to be done" in submitted.run()


def test_a_job_out_of_time_fails_and_publishes_nothing(stuck, submitted):
    place, process, job = stuck
    assert place.ended(process) == 1
    assert f"SLURM-job '{job['id']}' failed, SLURM status is: 'TIMEOUT'" in place.printed()
    (log,) = place.path("shared", "logs", "slurm").rglob(f"{job['id']}.log")
    assert str(log) in place.printed() and "DUE TO TIME LIMIT" in log.read_text()
    assert not place.path("tiny", "0000", "policy").exists()
    place.run("--", FIRST_POLICY)
    assert place.artifacts() == {"0000/policy": submitted.artifacts()["0000/policy"]}


def test_a_cancelled_job_is_tried_again(copied, submitted):
    last_weights = copied.forget_the_last_update()
    process, job = copied.start_and_stall("update_actor", "--", last_weights)
    cluster.run("scancel", job["id"])
    assert copied.ended(process) == 0, copied.printed()
    assert f"SLURM-job '{job['id']}' failed, SLURM status is: 'CANCELLED'" in copied.printed()
    assert copied.artifacts() == submitted.artifacts()


def test_a_stage_whose_node_is_lost_goes_to_another(copied, submitted):
    copied.path(*LAST_EVALUATION).unlink()
    process, job = copied.start_and_stall("evaluate_policy")
    node = f"nodename={job['node']}"
    cluster.run("scontrol", "update", node, "state=down", "reason=test")
    try:
        assert copied.ended(process) == 0, copied.printed()
    finally:
        cluster.run("scontrol", "update", node, "state=resume")
    assert f"SLURM-job '{job['id']}' failed due to a node failure" in copied.printed()
    lost, retried = copied.jobs()
    assert lost["rule"] == retried["rule"] and lost["pool"] == retried["pool"] == "rollout"
    assert retried["node"] not in ("", job["node"])
    assert copied.artifacts() == submitted.artifacts()


def test_ctrl_c_cancels_the_jobs(copied, submitted):
    copied.path(*LAST_EVALUATION).unlink()
    process, _ = copied.start_and_stall("evaluate_policy")
    process.send_signal(signal.SIGINT)
    assert copied.ended(process) == 1
    wait_for(lambda: [job["state"] for job in copied.jobs()] == ["CANCELLED"])
    assert not copied.path(*LAST_EVALUATION).exists()
    copied.run()
    assert copied.artifacts() == submitted.artifacts()
