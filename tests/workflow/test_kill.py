"""Any process may die at any moment; running again ends with the same policy and tables."""

import os
import signal
import time

import pytest

from .conftest import content_ids, wait_for

# A stage's log is opened when it starts. The first of each kind compiles for some seconds.
MOMENTS = (
    *(("shared", "logs", f"{stage}-*") for stage in ("init_policy", "evaluate_policy")),
    ("tiny", "0000", "logs", "start_policy.log"),
    ("tiny", "0000", "logs", "sync_weights.log"),
    *(
        ("tiny", "0001", "logs", f"{stage}.log")
        for stage in (
            *("generate_rollouts", "score_rewards", "reference_logprobs", "estimate_advantages"),
            *("update_actor", "check_iteration", "sync_weights"),
        )
    ),
    ("tiny", "0002", "logs", "generate_rollouts.log"),
    ("tiny", "0002", "logs", "update_actor.log"),
    ("tiny", "0002", "logs", "evaluate_policy.log"),
    ("tiny", "logs", "report_run.log"),
)
FIRST_UPDATE = ("tiny", "0001", "logs", "update_actor.log")


def exists(workplace, parts):
    *folders, name = parts
    return any(workplace.path(*folders).glob(name))


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
    for number, parts in enumerate(MOMENTS):
        process = workplace.start()
        wait_for_either(workplace, parts, process)
        time.sleep(0.05 + 0.1 * (number % 3))
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
    wait_for(lambda: exists(workplace, FIRST_UPDATE))
    time.sleep(0.5)  # the update compiles
    kill(process, signal.SIGKILL)
    workplace.run()
    same_as(workplace, finished)


def test_worker_killed_in_the_middle_fails_loudly_and_is_replaced(workplace, finished):
    process = workplace.start()
    wait_for(lambda: exists(workplace, FIRST_UPDATE))
    time.sleep(0.5)  # the update compiles
    (pid,) = workplace.worker_pids()
    os.kill(pid, signal.SIGKILL)
    assert process.wait(120) == 1
    printed = (workplace.folder / "started.log").read_text()
    assert "died while it ran this stage" in printed
    workplace.run()
    same_as(workplace, finished)
