"""A cold stage in two processes: who talks, and what happens when one fails or dies."""

import signal
import socket

import pytest

pytest_plugins = ["tests.worker_field"]


@pytest.fixture
def start(field):
    """Starts one of the two processes of a stage."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def start_process(number, *orders):
        return field.start(
            *orders,
            launcher="cold",
            options=["--mesh", "train:devices=4", "--log", "stage.log"],
            MESHDIAL_COORDINATOR=f"127.0.0.1:{port}",
            MESHDIAL_NUM_PROCESSES="2",
            MESHDIAL_PROCESS_ID=str(number),
        )

    return start_process


def test_the_first_process_does_the_talking(field, start):
    processes = [start(number, ["count_devices", ""], ["say", "done"]) for number in range(2)]
    first, second = [field.finish(process) for process in processes]
    assert first == (0, "4 devices, 2 of this process\ndone\n", "")
    assert second == (0, "", "")
    assert (field.root / "stage.log").read_text() == first[1]


def test_a_failure_of_the_second_alone_is_told_and_ends_it(field, start):
    first = start(0, ["note", "in"], ["wait_for", "never"])
    second = start(1, ["fail", "odd"])
    code, shown, told = field.finish(second)
    assert (code, shown) == (1, "")
    assert told.startswith("process 1: stub: ValueError: odd")
    assert "in fail\n    raise ValueError(text)" in (field.root / "stage.log").read_text()
    first.send_signal(signal.SIGTERM)  # as srun does
    assert field.finish(first)[0] == 143


def test_who_waits_for_a_failed_process_fails_too(field, start):
    """The first says so, and ends the others before they repeat it."""
    first = start(0, ["meet", ""])
    second = start(1, ["refuse", "no column x"])
    code, _, told = field.finish(first)
    assert code == 1
    assert told == "stub: process 1 of 2 failed: no column x\n"
    assert field.finish(second) == (1, "", "")


@pytest.mark.parametrize(
    "orders",
    [[["note", "in"], ["wait_for", "never"]], [["note", "in"], ["ignore_all", "never"]], []],
    ids=["at work", "deaf", "done"],
)
def test_a_failure_of_the_first_is_told_once_and_ends_all(field, start, orders):
    """The second may compute, and hear nothing of it, or wait for the end of the stage."""
    second = start(1, *orders)
    first = start(0, ["wait_for", "go"], ["refuse", "no column x"])
    if orders:
        field.until_noted("in")
    (field.root / "go").touch()
    assert field.finish(first) == (1, "", "stub: no column x\n")
    assert field.finish(second) == (1, "", "")
    assert (field.root / "stage.log").read_text() == "stub: no column x\n"


@pytest.mark.parametrize("gone", [0, 1])
def test_all_end_when_one_sees_that_nobody_waits(field, start, gone):
    """As when the workflow has died: JAX would have this one wait for the others."""
    processes = [
        start(number, ["give_up", "nobody waits"] if number == gone else ["meet", ""])
        for number in range(2)
    ]
    (code, _, told), second = [field.finish(process) for process in processes]
    reason = "nobody waits" if gone == 0 else "process 1 of 2 failed: nobody waits"
    assert (code, told) == (1, f"stub: {reason}\n")
    assert second == (1, "", "")


def test_the_first_says_that_the_second_failed_after_its_own_work(field, start):
    first = start(0)
    second = start(1, ["refuse", "no room"])
    assert field.finish(first) == (1, "", "stub: process 1 of 2 failed: no room\n")
    assert field.finish(second) == (1, "", "")
