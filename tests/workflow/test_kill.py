"""Any process may die at any moment; running again ends with the same policy and tables."""

import os
import signal
import time

import pytest

from .conftest import content_ids, wait_for

# Once this exists, the stage that reads it is about to run or runs.
MOMENTS = {
    "start_policy": ("shared", "models"),
    "sync_weights": ("tiny", "0000", "policy"),
    "generate_rollouts": ("tiny", "0000", "weights"),
    "score_rewards": ("tiny", "0001", "rollouts.parquet"),
    "estimate_advantages": ("tiny", "0001", "rewards.parquet"),
    "update_actor": ("tiny", "0001", "advantages.parquet"),
    "check_iteration": ("tiny", "0001", "update.json"),
    "next sync_weights": ("tiny", "0001", "checks.json"),
    "next generate_rollouts": ("tiny", "0001", "weights"),
    "evaluate_policy": ("tiny", "0002", "weights"),
    "report_run": ("tiny", "0003", "evaluation.parquet"),
}


def exists(workplace, parts):
    path = workplace.path(*parts)
    return any(path.iterdir()) if parts[-1] == "models" and path.exists() else path.exists()


def wait_for_either(workplace, parts, process):
    """Until the moment has come or the workflow has ended."""
    wait_for(lambda: exists(workplace, parts) or process.poll() is not None)


def kill(process, how):
    if how == "group":  # as Ctrl-C in a terminal
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(how)
    process.wait(120)


def killed_at_each_rule(workplace, how, is_worker_killed=False):
    for number, parts in enumerate(MOMENTS.values()):
        process = workplace.start()
        wait_for_either(workplace, parts, process)
        time.sleep(0.03 * (number % 4))
        if is_worker_killed:
            for pid in workplace.worker_pids():
                os.kill(pid, signal.SIGKILL)
            process.wait(120)
        elif process.poll() is None:
            kill(process, how)
    workplace.run()


def same_as(workplace, finished):
    assert content_ids(workplace.path("tiny")) == content_ids(finished.path("tiny"))
    assert "Nothing to be done" in workplace.run()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, "group"], ids=str)
def test_snakemake_killed_at_each_rule(workplace, finished, how):
    killed_at_each_rule(workplace, how)
    same_as(workplace, finished)


@pytest.mark.slow
def test_worker_killed_at_each_rule(workplace, finished):
    killed_at_each_rule(workplace, None, is_worker_killed=True)
    same_as(workplace, finished)


def test_snakemake_killed_in_the_middle(workplace, finished):
    process = workplace.start()
    wait_for(lambda: exists(workplace, MOMENTS["update_actor"]))
    kill(process, signal.SIGKILL)
    workplace.run()
    same_as(workplace, finished)


def test_worker_killed_in_the_middle_fails_loudly_and_is_replaced(workplace, finished):
    process = workplace.start()
    wait_for(lambda: exists(workplace, MOMENTS["update_actor"]))
    (pid,) = workplace.worker_pids()
    os.kill(pid, signal.SIGKILL)
    process.wait(120)
    workplace.run()
    same_as(workplace, finished)
