"""The client of a stage, against real workers: racing, and killed at any moment."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl import client
from rl.errors import MeshdialError

REPOSITORY = Path(__file__).resolve().parent.parent
pytest_plugins = ["tests.worker_field"]


def request_of(*words):
    parser = client.argparse.ArgumentParser()
    client.add_arguments(parser)
    return client.make_request(parser.parse_args(words))


def test_request_holds_what_the_command_line_says():
    request = request_of(
        *("generate_rollouts", "--mesh", "all:devices=1", "--run", "sums", "--iteration", "0012"),
        *("--config", '{"seed": 1}', "--input", "weights=a/b=c", "prompts=p.parquet"),
        *("--input", "nothing=", "--output", "rollouts=r.parquet", "--cost", "max_rows=64"),
        *("--cost", "kv_cache_mb=null"),
    )
    assert request["stage"] == "generate_rollouts"
    assert request["config"] == {"seed": 1}
    assert request["inputs"] == {"weights": "a/b=c", "prompts": "p.parquet", "nothing": ""}
    assert request["outputs"] == {"rollouts": "r.parquet"}
    assert request["cost"] == {"max_rows": 64, "kv_cache_mb": None}
    assert (request["run"], request["iteration"]) == ("sums", 12)
    assert request["cwd"] == os.path.realpath(os.getcwd())
    assert request["client"]["pid"] == os.getpid()
    assert (request["layout"], request["mesh"]) == ("all:devices=1", "all")


MESHES = "train:devices=4,fsdp=4+decode:devices=2,first=4,tensor=2"


@pytest.mark.parametrize(
    ("launcher", "mesh", "layout", "name"),
    [
        (
            "warm",
            "decode:devices=2,first=4,tensor=2",
            "decode:devices=2,first=4,tensor=2",
            "decode",
        ),
        ("pool", "train:devices=4,fsdp=4", "train:devices=4,fsdp=4", "train"),
        ("cold", "host:devices=0", "host:devices=0", "host"),
        ("shared", "decode:devices=2,first=4,tensor=2", MESHES, "decode"),
        ("shared", "host:devices=0", MESHES, "train"),
    ],
)
def test_a_launcher_chooses_the_process_and_keeps_the_mesh(launcher, mesh, layout, name):
    request = request_of("stub", "--launcher", launcher, "--mesh", mesh, "--meshes", MESHES)
    assert (request["layout"], request["mesh"]) == (layout, name)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--input", "weights"], "--input 'weights', expected NAME=VALUE"),
        (["--output", "a=1", "a=2"], "--output 'a=2', expected each name once"),
        (["--cost", "rows=many"], "--cost rows=many, expected a number"),
        (["--config", "{"], "--config is not JSON"),
        (["--mesh", "all"], "layout 'all', expected NAME:devices=N"),
        (
            ["--launcher", "shared", "--mesh", "b:devices=1", "--meshes", "a:devices=1"],
            "--mesh b:devices=1 is none of --meshes a:devices=1",
        ),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(words, sentence):
    with pytest.raises(MeshdialError) as error:
        request_of("stub", *words)
    assert str(error.value).startswith(sentence)


def test_eight_racing_clients_start_one_worker(field):
    clients = [field.start(["note", f"{n}"]) for n in range(8)]
    assert [field.finish(process)[0] for process in clients] == [0] * 8
    assert sorted(text for _, text in field.notes()) == [f"{n}" for n in range(8)]
    assert {pid for pid, _ in field.notes()} == {worker["pid"] for worker in field.workers()}
    assert len(field.workers()) == 1


def test_lines_are_shown_and_logged(field):
    code, shown, _ = field.call(["say", "one"], ["say", "two"], options=["--log", "logs/a.log"])
    assert (code, shown) == (0, "one\ntwo\n")
    assert (field.root / "logs/a.log").read_text() == "one\ntwo\n"


@pytest.mark.parametrize("launcher", ["warm", "cold"])
def test_bad_input_is_one_sentence(field, launcher):
    code, _, told = field.call(["refuse", "a.parquet: no column x"], launcher=launcher)
    assert (code, told) == (1, "stub: a.parquet: no column x\n")


@pytest.mark.parametrize("launcher", ["warm", "cold"])
def test_an_unforeseen_error_leaves_its_traceback_in_the_log(field, launcher):
    options = ["--log", "a.log"]
    code, _, told = field.call(["fail", "odd"], launcher=launcher, options=options)
    assert (code, told) == (1, "stub: ValueError: odd (full traceback in a.log)\n")
    assert "in fail\n    raise ValueError(text)" in (field.root / "a.log").read_text()


def test_a_stage_cannot_end_its_worker_by_exiting(field):
    code, _, told = field.call(["leave", 0])
    assert (code, told) == (1, "stub: the stage tried to end the worker (0)\n")
    assert len(field.workers()) == 1


def test_worker_killed_in_a_stage(field):
    first = field.start(["print_out", "a library spoke"], ["note", "in"], ["wait_for", "never"])
    worker = field.until_noted("in")
    waiting = field.start(["note", "served"])
    field.until(lambda: field.workers()[0]["num_waiting"] == 1)
    os.kill(worker, signal.SIGKILL)
    code, _, told = field.finish(first)
    assert code == 1
    assert f"the worker (process {worker}) died while it ran this stage" in told
    assert "  a library spoke" in told
    assert field.finish(waiting)[0] == 0  # it had not begun, so another worker serves it
    assert field.until_noted("served") != worker


def test_worker_that_crashes_shows_where(field):
    code, _, told = field.call(["abort", "about to break"])
    assert code == 1
    assert "about to break" in told
    assert "Fatal Python error: Aborted" in told
    assert "in abort" in told
    assert field.call(["note", "after"])[0] == 0


def test_client_killed_in_a_stage(field):
    process = field.start(["note", "in"], ["wait_for", "go"], ["publish", "text"])
    worker = field.until_noted("in")
    process.kill()
    process.wait()
    (field.root / "go").touch()
    assert field.call(["note", "next"])[0] == 0
    assert field.until_noted("next") == worker
    assert not (field.root / "out.txt").exists()


def test_workflow_killed_in_a_stage(field):
    workflow = field.workflow()
    environment = {"MESHDIAL_PARENT_PID": str(workflow.pid), "MESHDIAL_WORKER_LINGER_S": "0.5"}
    process = field.start(["note", "in"], ["wait_for", "go"], ["publish", "text"], **environment)
    field.until_noted("in")
    workflow.kill()
    workflow.wait()
    code, _, told = field.finish(process)
    assert (code, told) == (1, f"stub: the workflow (process {workflow.pid}) has ended\n")
    (field.root / "go").touch()
    field.until(lambda: not field.workers())
    assert not (field.root / "out.txt").exists()


def test_nothing_starts_for_a_workflow_that_has_ended(field):
    workflow = field.workflow()
    workflow.kill()
    workflow.wait()
    code, _, told = field.call(["note", "x"], MESHDIAL_PARENT_PID=str(workflow.pid))
    assert (code, told) == (1, f"stub: the workflow (process {workflow.pid}) has ended\n")
    assert field.workers() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_client_and_not_the_worker(field, number, code):
    process = field.start(["note", "in"], ["wait_for", "go"], ["publish", "text"])
    worker = field.until_noted("in")
    process.send_signal(number)
    assert field.finish(process) == (code, "", "")
    assert field.call(["note", "next"])[0] == 0
    assert field.until_noted("next") == worker
    assert not (field.root / "out.txt").exists()


def test_cold_stage_cleans_up_on_sigterm(field):
    process = field.start(["note", "in"], ["clean_up", "cleaned"], launcher="cold")
    field.until_noted("in")
    process.terminate()
    assert field.finish(process)[0] == 143
    assert (field.root / "cleaned").exists()
    assert field.workers() == []


def test_cold_stage_ends_with_its_workflow(field):
    workflow = field.workflow()
    orders = (["note", "in"], ["clean_up", "cleaned"], ["publish", "text"])
    process = field.start(*orders, launcher="cold", MESHDIAL_PARENT_PID=str(workflow.pid))
    field.until_noted("in")
    workflow.kill()
    workflow.wait()
    code, _, told = field.finish(process)
    assert code == 143
    assert told == "the workflow has ended, so this stage ends too\n"
    assert (field.root / "cleaned").exists()
    assert not (field.root / "out.txt").exists()


def test_worker_that_cannot_start_says_why(field):
    code, _, told = field.call(["note", "x"], MESHDIAL_WORKER_IDLE_S="long")
    assert code == 1
    assert "the worker ended as it started (exit 1)" in told
    assert "MESHDIAL_WORKER_IDLE_S is 'long', expected a number of seconds" in told


def test_a_worker_that_does_not_answer_is_not_waited_for(field):
    assert field.call(["note", "x"])[0] == 0
    worker = field.until_noted("x")
    os.kill(worker, signal.SIGSTOP)
    try:
        code, _, told = field.call(["note", "y"], MESHDIAL_WORKER_START_S="0.5")
    finally:
        os.kill(worker, signal.SIGCONT)
    assert code == 1
    assert "the worker did not answer" in told


def test_workers_and_clients_killed_at_random_moments(field):
    """Whoever is killed, no two stages ever run at once and the next client is served."""
    for round_number in range(4):
        clients = [field.start(["alone", 0.05], ["note", "done"]) for _ in range(3)]
        time.sleep(0.1 * round_number)
        for worker in field.workers():
            os.kill(worker["pid"], signal.SIGKILL)
        clients[round_number % 3].kill()
        for process in clients:
            assert field.finish(process)[0] in (0, 1, -signal.SIGKILL)
    assert field.call(["note", "last"])[0] == 0
    texts = {text for _, text in field.notes()}
    assert texts == {"done", "last"}


def test_client_starts_fast_and_imports_little(field):
    assert field.call()[0] == 0
    before = os.times()
    for _ in range(3):
        assert field.call()[0] == 0
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    assert used / 3 < 0.12
    names = "{'jax', 'numpy', 'dataclasses', 'subprocess', 'rl.worker', 'rl.processes.launch'}"
    code = f"import sys, rl.client; sys.exit(str({names} & set(sys.modules) or ''))"
    run = subprocess.run([sys.executable, "-S", "-c", code], cwd=REPOSITORY, text=True, stderr=-1)
    assert run.stderr.strip() == ""
