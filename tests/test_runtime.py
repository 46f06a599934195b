"""The runtime folder, its names and locks, and who counts as alive."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from rl import liveness, runtime, wire
from rl.errors import ClientGone, MeshdialError


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
    code = f"from rl import runtime; runtime.take_lock({path!r}); print(flush=True); input()"
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


@pytest.mark.parametrize(
    ("platforms", "visible", "names"),
    [
        ("cpu", "0,1", ["cpu"]),
        ("cuda,cpu", "2,0", ["gpu-0", "gpu-2"]),
        ("cuda", "", ["cpu"]),
        ("cuda", "-1", ["cpu"]),
        ("cuda", None, ["gpu-0", "gpu-1", "gpu-3"]),
        ("cuda", "GPU-8932f937", ["gpu-0", "gpu-1", "gpu-3"]),
        ("", "1", ["gpu-1"]),
        ("tpu", None, ["tpu"]),
    ],
)
def test_every_device_has_a_lock(folder, monkeypatch, platforms, visible, names):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(runtime, "_gpu_numbers", lambda: [0, 1, 3])
    node = os.uname().nodename
    expected = [str(folder / f"device-{node}-{name}.lock") for name in names]
    assert runtime.device_locks() == expected


def test_fingerprint_follows_code_layout_and_jax_settings(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(runtime, "__file__", str(tmp_path / "runtime.py"))
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


def test_layouts():
    assert runtime.parse_layout("all:devices=1") == ("all", 1, ())
    layout = runtime.parse_layout("train:devices=4,fsdp=2,tensor=2")
    assert layout == runtime.Layout("train", 4, (("fsdp", 2), ("tensor", 2)))
    for text in ("all", "all:", "all:devices=0", "all:devices=1,", ":devices=1", "a b:devices=1"):
        with pytest.raises(MeshdialError, match="expected NAME:devices=N"):
            runtime.parse_layout(text)


def test_jax_reads_the_settings(tmp_path):
    code = (
        "from rl import runtime; runtime.configure_jax(runtime.parse_layout('all:devices=2'));"
        "import jax; c = jax.config; print(c.jax_compilation_cache_dir,"
        "c.jax_persistent_cache_min_compile_time_secs, jax.device_count())"
    )
    environment = {
        name: value for name, value in os.environ.items() if name[:4] not in ("JAX_", "XLA_")
    }
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, text=True, stdout=-1)
    cache, seconds, count = run.stdout.split()
    assert cache.startswith(str(tmp_path / "meshdial" / "xla") + "/")
    assert (seconds, count) == ("0.2", "2")


def test_jax_must_not_be_imported_before():
    with pytest.raises(RuntimeError, match="before jax is imported"):
        runtime.configure_jax()


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
    with pytest.raises(MeshdialError, match="expected the number of a process"):
        liveness.find_workflow()


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
