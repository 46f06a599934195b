"""The resident worker: whom it serves, when it leaves, and what it leaves behind."""

import os
import shutil
import signal
import time
from pathlib import Path

from rl import cli
from rl.processes import liveness, runtime

pytest_plugins = ["tests.worker_field"]


def until_waiting(field, number):
    field.until(lambda: [worker for worker in field.workers() if worker["num_waiting"] == number])


def only_worker(field):
    (worker,) = field.workers()
    return worker["pid"]


def test_memory_lasts_until_a_stage_fails(field):
    assert field.call(["remember", "base"])[1] == "base 1\n"
    assert field.call(["remember", "base"])[1] == "base 2\n"
    assert field.call(["fail", "half an update"])[0] == 1
    assert field.call(["remember", "base"])[1] == "base 1\n"


def test_stages_take_turns_in_the_order_of_their_arrival(field):
    waiting = [field.start(["note", "0"], ["wait_for", "go"])]
    field.until_noted("0")
    for number in range(1, 4):
        waiting.append(field.start(["note", str(number)]))
        until_waiting(field, number)
    (field.root / "go").touch()
    assert [field.finish(process)[0] for process in waiting] == [0] * 4
    assert [text for _, text in field.notes()] == ["0", "1", "2", "3"]


def test_a_waiting_stage_is_dropped_with_its_client(field):
    first = field.start(["note", "first"], ["wait_for", "go"])
    field.until_noted("first")
    second = field.start(["note", "second"])
    until_waiting(field, 1)
    second.kill()
    until_waiting(field, 0)
    (field.root / "go").touch()
    assert field.finish(first)[0] == 0
    assert field.call(["note", "third"])[0] == 0
    assert [text for _, text in field.notes()] == ["first", "third"]


def test_other_jax_settings_replace_the_worker(field):
    assert field.call(["remember", "base"], ["note", "first"])[0] == 0
    code, shown, _ = field.call(
        *(["remember", "base"], ["environment", "XLA_FLAGS"], ["note", "second"]),
        XLA_FLAGS="--xla_cpu_enable_fast_math=false",
    )
    lines = shown.splitlines()
    assert code == 0
    assert lines[0].startswith("the worker leaves (its code, layout, Python or JAX settings")
    assert lines[1:] == ["base 1", "XLA_FLAGS=--xla_cpu_enable_fast_math=false"]
    pids = [pid for pid, _ in field.notes()]
    assert pids[1] == only_worker(field) != pids[0]


def test_clients_of_different_code_are_all_served(field):
    clients = [field.start(["note", str(n)], JAX_TEST=str(n % 2)) for n in range(4)]
    assert [field.finish(process)[0] for process in clients] == [0] * 4
    assert sorted(text for _, text in field.notes()) == ["0", "1", "2", "3"]


def test_second_folder_waits_for_the_device_and_gets_it(field, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    workflow = field.workflow()
    first = field.start(
        ["note", "first"], ["wait_for", "go"], MESHDIAL_PARENT_PID=str(workflow.pid)
    )
    holder = field.until_noted("first")
    second = field.start(["note", "second"], ["say", "done"], root=other)
    running = f"waiting for device {os.uname().nodename}-cpu-0: the worker of {field.root}"
    assert second.stdout.readline() == f"{running} (process {holder}) runs stub\n"
    (field.root / "go").touch()
    assert field.finish(first)[0] == 0
    time.sleep(0.5)
    assert second.poll() is None  # a workflow that lives keeps its device between stages
    workflow.kill()
    assert field.finish(second) == (0, "done\n", "")
    assert field.until_noted("second", other) == only_worker(field) != holder


def test_an_idle_worker_yields_though_its_workflow_lives(field, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHDIAL_WORKER_YIELD_S", "0.5")
    other = tmp_path / "other"
    other.mkdir()
    parent = str(field.workflow().pid)
    assert field.call(["note", "first"], MESHDIAL_PARENT_PID=parent)[0] == 0
    code, shown, _ = field.call(["note", "second"], root=other)
    assert code == 0
    assert shown == ""
    assert len(field.workers()) == 1


def test_layouts_of_one_workflow_hand_the_device_over_at_once(field):
    parent = {"MESHDIAL_PARENT_PID": str(field.workflow().pid)}
    assert field.call(["note", "train"], **parent)[0] == 0
    begin = time.monotonic()
    assert field.call(["note", "other"], options=["--mesh", "b:devices=1"], **parent)[0] == 0
    assert time.monotonic() - begin < 15  # an idle worker of another workflow leaves after 20
    assert [worker["meshes"] for worker in field.workers()] == [["b"]]


def test_meshes_of_one_dial_run_side_by_side(field):
    """Each has devices of its own, and the host needs none."""
    train = field.start(
        *(["note", "train"], ["wait_for", "go"]), options=["--mesh", "train:devices=2"]
    )
    field.until_noted("train")
    for mesh in ("decode:devices=2,first=2", "host:devices=0"):
        assert field.call(["note", mesh], options=["--mesh", mesh])[0] == 0
    (field.root / "go").touch()
    assert field.finish(train)[0] == 0
    devices = {tuple(worker["meshes"]): worker["devices"] for worker in field.workers()}
    assert devices == {
        ("train",): ["cpu-0", "cpu-1"],
        ("decode",): ["cpu-2", "cpu-3"],
        ("host",): [],
    }


def test_meshes_that_share_a_device_take_turns(field):
    first = field.start(
        *(["note", "train"], ["wait_for", "go"]), options=["--mesh", "train:devices=2"]
    )
    field.until_noted("train")
    second = field.start(["note", "b"], options=["--mesh", "b:devices=2,first=1"])
    assert "-cpu-1: the worker of" in second.stdout.readline()
    (field.root / "go").touch()
    assert field.finish(first)[0] == field.finish(second)[0] == 0
    assert [text for _, text in field.notes()] == ["train", "b"]


def test_one_worker_has_all_meshes_where_they_are_shared(field):
    meshes = "train:devices=2+decode:devices=1,first=2"
    for mesh in (*meshes.split("+"), "host:devices=0"):
        options = ["--mesh", mesh, "--meshes", meshes]
        assert field.call(["note", mesh], launcher="shared", options=options)[0] == 0
    (worker,) = field.workers()
    assert {pid for pid, _ in field.notes()} == {worker["pid"]}
    assert (worker["launcher"], worker["meshes"]) == ("shared", ["train", "decode"])
    assert worker["devices"] == ["cpu-0", "cpu-1", "cpu-2"]


def test_a_killed_holder_frees_the_device(field, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    first = field.start(["note", "first"], ["wait_for", "never"])
    holder = field.until_noted("first")
    second = field.start(["note", "second"], root=other)
    assert second.stdout.readline().startswith("waiting for device")
    os.kill(holder, signal.SIGKILL)
    assert field.finish(first)[0] == 1
    assert field.finish(second)[0] == 0


def test_what_a_stage_started_does_not_keep_the_locks(field):
    assert field.call(["note", "1"], ["start_child", "sleep"])[0] == 0
    os.kill(field.until_noted("1"), signal.SIGKILL)
    assert field.call(["note", "2"])[0] == 0
    child = int(field.notes()[1][1])
    assert liveness.identify(child) is not None
    os.kill(child, signal.SIGKILL)


def test_an_idle_worker_leaves(field):
    assert field.call(["note", "x"], MESHDIAL_WORKER_IDLE_S="0.3")[0] == 0
    worker = field.until_noted("x")
    field.until(lambda: liveness.identify(worker) is None)
    place = runtime.place_of(str(field.root), "all:devices=1")
    assert not os.path.exists(place.socket)
    assert "leaves: it was idle" in Path(place.log).read_text()


def test_a_worker_outlives_its_workflow_for_the_next_one(field):
    first, second = field.workflow(), field.workflow()
    environment = {"MESHDIAL_WORKER_LINGER_S": "1.5"}
    assert field.call(["note", "1"], MESHDIAL_PARENT_PID=str(first.pid), **environment)[0] == 0
    first.kill()
    assert field.call(["note", "2"], MESHDIAL_PARENT_PID=str(second.pid))[0] == 0
    time.sleep(2.0)
    assert field.until_noted("1") == field.until_noted("2") == only_worker(field)
    second.kill()
    field.until(lambda: not field.workers())


def test_a_stage_that_nobody_waits_for_is_cut_off(field):
    first = field.start(
        *(["note", "deaf"], ["ignore_all", "never"], ["publish", "text"]),
        MESHDIAL_WORKER_GRACE_S="0.3",
    )
    worker = field.until_noted("deaf")
    first.kill()
    assert field.call(["note", "next"])[0] == 0
    assert field.until_noted("next") != worker


def test_nothing_is_published_for_a_dead_workflow_though_the_client_lives(field):
    workflow = field.workflow()
    process = field.start(
        *(["note", "in"], ["wait_for", "go"], ["publish", "text"]),
        MESHDIAL_PARENT_PID=str(workflow.pid),
        MESHDIAL_WORKER_LINGER_S="0.2",
    )
    worker = field.until_noted("in")
    process.send_signal(signal.SIGSTOP)  # so that it cannot leave by itself
    workflow.kill()
    (field.root / "go").touch()
    field.until(lambda: liveness.identify(worker) is None)
    assert not (field.root / "out.txt").exists()
    process.send_signal(signal.SIGCONT)
    assert field.finish(process)[0] == 1


def test_dead_sockets_are_replaced(field):
    assert field.call(["note", "1"])[0] == 0
    os.kill(field.until_noted("1"), signal.SIGKILL)
    place = runtime.place_of(str(field.root), "all:devices=1")
    assert os.path.exists(place.socket)
    assert field.call(["note", "2"])[0] == 0
    assert len(field.workers()) == 1


def test_a_worker_whose_files_are_removed_leaves(field, monkeypatch):
    assert field.call(["note", "x"])[0] == 0
    worker = field.until_noted("x")
    folder = os.environ["MESHDIAL_RUNTIME_DIR"]
    shutil.rmtree(folder)
    field.until(lambda: liveness.identify(worker) is None)
    assert field.call(["note", "y"])[0] == 0


def test_relative_paths_hold_when_the_folder_was_made_anew(field):
    assert field.call(["note", "x"])[0] == 0
    worker = field.until_noted("x")
    shutil.rmtree(field.root)
    field.root.mkdir()
    assert field.call(["note", "y"])[0] == 0
    assert field.until_noted("y") == worker


def test_status_and_stop(field, capsys, monkeypatch):
    assert cli.main(["worker", "status"]) == 0
    assert capsys.readouterr().out == "no worker runs\n"
    process = field.start(["note", "in"], ["wait_for", "go"], stage="update_actor")
    worker = field.until_noted("in")
    cli.main(["worker", "status"])
    header, line = capsys.readouterr().out.splitlines()
    titles = ["PID", "STAGE", "IDLE", "MEMORY", "LAUNCHER", "MESHES", "DEVICES", "FOLDER"]
    assert header.split() == titles
    pid, stage, idle, _, memory, unit, launcher, meshes, devices, folder = line.split()
    assert (pid, stage, idle, unit) == (str(worker), "update_actor", "0", "MiB")
    assert 5 < int(memory) < 500
    assert (launcher, meshes, devices) == ("warm", "all", "cpu-0")
    assert folder == str(field.root)
    cli.main(["worker", "stop"])
    assert "no worker runs for" in capsys.readouterr().out
    monkeypatch.chdir(field.root)
    (field.root / "go").touch()
    cli.main(["worker", "stop"])
    assert f"stopped process {worker} of {field.root}\n" in capsys.readouterr().out
    assert field.finish(process)[0] == 0  # its stage was finished first
    assert field.workers() == []


def test_stop_now_breaks_the_stage_off(field):
    process = field.start(["note", "in"], ["ignore_all", "never"])
    worker = field.until_noted("in")
    cli.main(["worker", "stop", "--all", "--now"])
    assert liveness.identify(worker) is None
    assert field.finish(process)[0] == 1
