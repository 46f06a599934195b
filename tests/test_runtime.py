"""The runtime folder, its names and locks, and who counts as alive."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from rl.errors import ClientGone, MeshdialError
from rl.processes import liveness, runtime, wire


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A runtime folder that does not exist yet."""
    path = tmp_path / "run"
    monkeypatch.setenv("MESHDIAL_RUNTIME_DIR", str(path))
    return path


def test_folder_is_made_private(folder):
    assert runtime.runtime_dir() == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o702, 0o777])
def test_folder_that_others_can_enter_is_refused(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(MeshdialError, match=f"has mode {mode:04o}, expected 0700"):
        runtime.runtime_dir()


def test_folder_of_someone_else_is_refused(folder, monkeypatch):
    runtime.runtime_dir()
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(MeshdialError, match="belongs to user"):
        runtime.runtime_dir()


def test_a_link_or_a_file_is_no_folder(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MeshdialError, match="is not a folder"):
        runtime.runtime_dir()
    folder.unlink()
    folder.touch()
    with pytest.raises(MeshdialError, match="cannot be made"):
        runtime.runtime_dir()


def test_a_path_too_long_for_a_socket_is_refused(monkeypatch):
    monkeypatch.setenv("MESHDIAL_RUNTIME_DIR", "/tmp/" + "x" * 77)
    with pytest.raises(MeshdialError, match="would have 104 bytes, at most 103 are possible"):
        runtime.runtime_dir()


def test_usual_folders(tmp_path, monkeypatch):
    own_name = f"meshdial-{os.getuid()}"
    monkeypatch.delenv("MESHDIAL_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert runtime.runtime_dir() == str(tmp_path / "meshdial")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert runtime.runtime_dir() == str(tmp_path / own_name)
    long_name = tmp_path / ("x" * 80)
    long_name.mkdir()
    monkeypatch.setenv("TMPDIR", str(long_name))
    assert runtime._usual_folder() == f"/tmp/{own_name}"


def test_each_folder_and_layout_has_its_own_place(folder, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    place = runtime.place_of(str(tmp_path), "all:devices=1")
    assert runtime.place_of(str(tmp_path / "link"), "all:devices=1") == place
    assert runtime.place_of(str(tmp_path), "all:devices=2").socket != place.socket
    assert runtime.place_of(str(folder), "all:devices=1").socket != place.socket
    assert len(os.fsencode(place.socket)) <= runtime.MAX_SOCKET_PATH


def test_one_holder_a_lock(folder):
    path = os.path.join(runtime.runtime_dir(), "a.lock")
    lock = runtime.take_lock(path)
    assert runtime.take_lock(path) is None
    runtime.write_holder(lock, {"pid": 1})
    runtime.write_holder(lock, {"p": 2})
    assert runtime.read_holder(path) == {"p": 2}
    os.close(lock)
    again = runtime.take_lock(path)
    assert again is not None
    os.close(again)


def test_a_lock_is_freed_by_the_death_of_its_holder(folder):
    path = os.path.join(runtime.runtime_dir(), "a.lock")
    code = (
        f"from rl.processes import runtime; runtime.take_lock({path!r}); print(flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as holder:
        holder.stdout.readline()
        assert runtime.take_lock(path) is None
        holder.kill()
    lock = runtime.take_lock(path)
    assert lock is not None
    os.close(lock)


def test_a_holder_that_makes_no_sense_is_nobody(folder):
    path = os.path.join(runtime.runtime_dir(), "a.lock")
    assert runtime.read_holder(path) is None
    for text in ("", '{"pid": 1', "3"):
        with open(path, "w") as file:
            file.write(text)
        assert runtime.read_holder(path) is None


def test_fingerprint_follows_code_layout_and_jax_settings(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(runtime, "package_folder", lambda: str(tmp_path))
    first = runtime.fingerprint("all:devices=1")
    assert runtime.fingerprint("all:devices=1") == first
    assert runtime.fingerprint("all:devices=2") != first
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert runtime.fingerprint("all:devices=1") == first
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    assert runtime.fingerprint("all:devices=1") != first
    monkeypatch.delenv("JAX_ENABLE_X64")
    (tmp_path / "models" / "a.py").write_text("x = 22\n")
    assert runtime.fingerprint("all:devices=1") != first


def sizes(text):
    return dict(runtime.parse_layout(text).axes)


def test_layouts():
    assert runtime.parse_layout("all:devices=1") == (
        *("all", 1, 0),
        (("data", 1), ("fsdp", 1), ("tensor", 1)),
    )
    layout = runtime.parse_layout("decode:devices=4,first=8,data=2,tensor=2")
    assert (layout.name, layout.num_devices, layout.first) == ("decode", 4, 8)
    assert dict(layout.axes) == {"data": 2, "fsdp": 1, "tensor": 2}
    assert sizes("train:devices=4") == {"data": 1, "fsdp": 4, "tensor": 1}
    host = runtime.parse_layout("host:devices=0")
    assert (host.is_host, layout.is_host) == (True, False)


@pytest.mark.parametrize(
    "text",
    [
        *("all", "all:", "all:devices=0", "all:devices=1,", ":devices=1", "a b:devices=1"),
        *("all:first=1", "host:devices=0,first=1", "all:devices=01", "all:devices=2,model=2"),
        *("all:devices=1,devices=1", "a+b:devices=1", "all:devices=-1", "all:devices=1\n"),
    ],
)
def test_what_is_no_layout(text):
    with pytest.raises(MeshdialError, match="expected NAME:devices=N"):
        runtime.parse_layout(text)


def test_axes_multiply_to_the_devices():
    with pytest.raises(MeshdialError, match="has axes for 2 devices, not 4"):
        runtime.parse_layout("train:devices=4,fsdp=2")


def test_layouts_of_a_process():
    train, decode = "train:devices=4,fsdp=4", "decode:devices=2,first=4,tensor=2"
    found = runtime.parse_process_layout(f"{train}+{decode}")
    assert found == (runtime.parse_layout(train), runtime.parse_layout(decode))
    for text, sentence in (
        (f"{train}+{train}", "has a mesh twice"),
        (f"{train}+decode:devices=2,first=3", "has a device in two meshes"),
        (f"{train}+host:devices=0", "expected host:devices=0 to stand alone"),
    ):
        with pytest.raises(MeshdialError, match=sentence):
            runtime.parse_process_layout(text)


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_seconds_are_numbers(monkeypatch, text):
    monkeypatch.setenv("MESHDIAL_WORKER_IDLE_S", text)
    with pytest.raises(MeshdialError, match=f"MESHDIAL_WORKER_IDLE_S is '{text}'"):
        runtime.seconds("MESHDIAL_WORKER_IDLE_S")


def test_a_process_is_its_pid_and_its_start():
    own = liveness.identify(os.getpid())
    assert liveness.is_alive(own)
    assert not liveness.is_alive(own | {"start": own["start"] - 1})


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = liveness.identify(child.pid)
    assert liveness.is_alive(identity)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not liveness.is_alive(identity)
    child.communicate()


def test_the_workflow_is_named_by_the_environment(monkeypatch):
    monkeypatch.delenv("MESHDIAL_PARENT_PID", raising=False)
    assert liveness.find_workflow() is None
    liveness.watch(None)()
    monkeypatch.setenv("MESHDIAL_PARENT_PID", str(os.getpid()))
    workflow = liveness.find_workflow()
    liveness.watch(workflow)()
    with pytest.raises(ClientGone):
        liveness.watch(workflow | {"start": 0})()
    monkeypatch.setenv("MESHDIAL_PARENT_PID", "mother")
    with pytest.raises(MeshdialError, match="expected PID or PID@HOST"):
        liveness.find_workflow()


def test_a_process_of_another_host_is_not_judged(monkeypatch):
    """Its number means nothing here, where another process may have it, or none."""
    host = os.uname().nodename
    monkeypatch.setenv("MESHDIAL_PARENT_PID", f"{os.getpid()}@{host}")
    assert liveness.find_workflow() == liveness.identify(os.getpid())
    monkeypatch.setenv("MESHDIAL_PARENT_PID", f"{os.getpid()}@{host}x")
    assert liveness.find_workflow() is None
    own = liveness.identify(os.getpid())
    assert not liveness.is_alive(own | {"start": 0})
    assert liveness.is_alive(own | {"start": 0, "host": host + "x"})


def test_a_listener_with_too_many_callers_is_no_error(folder):
    path = os.path.join(runtime.runtime_dir(), "a.sock")
    assert wire.connect(path) is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        channels = [wire.connect(path) for _ in range(5)]
        assert channels[0] is not None
        assert channels[-1] is None
    for channel in channels:
        if channel is not None:
            channel.close()
    assert wire.connect(path) is None


def test_messages_arrive_whole_and_in_order():
    here, there = map(wire.Channel, socket.socketpair())
    large = {"text": "line\n" * 40_000}
    assert here.send({"n": 1})
    assert there.receive(1.0) == {"n": 1}
    with pytest.raises(TimeoutError):
        there.receive(0.1)
    sender = threading.Thread(target=here.send, args=(large,))
    sender.start()
    assert there.receive(5.0) == large
    sender.join()
    assert there.is_open()
    assert here.send({"n": 2})
    here.close()
    assert there.is_open()  # what was sent before the end is still to be read
    assert there.receive(1.0) == {"n": 2}
    assert there.receive(1.0) is None
    assert not there.is_open()
    assert not there.send({})
    there.close()
