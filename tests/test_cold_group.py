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
    """The first says so and ends at once, and JAX ends the others before they repeat it."""
    first = start(0, ["meet", ""])
    second = start(1, ["refuse", "no column x"])
    code, _, told = field.finish(first)
    assert code == 1
    assert told == "stub: process 1 of 2 failed: no column x\n"
    code, _, told = field.finish(second)
    assert code != 0
    assert told == ""
