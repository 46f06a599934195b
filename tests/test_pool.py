"""Workers of a SLURM allocation, with a stand-in for `srun` that runs its command right here."""

import os
import shlex
import signal
import socket
import stat
import subprocess
import sys

import pytest

from rl import cli
from rl.errors import MeshdialError
from rl.processes import liveness, pool, slurm, wire

pytest_plugins = ["tests.worker_field"]

SRUN = """#!/bin/sh
echo "$@" >> {calls}
until [ "${{1#/}}" != "$1" ]; do shift; done
exec env SLURM_STEP_ID=$$ SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1 "$@"
"""
SQUEUE = "#!/bin/sh\nprintf '17 RUNNING\\n18 COMPLETING\\n19 TIMEOUT\\n'\n"


@pytest.fixture
def allocation(field, tmp_path, monkeypatch):
    """A job of SLURM, as far as its clients can tell; what they asked `srun` is in `calls`."""
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    add_command(tmp_path, monkeypatch, "srun", SRUN.format(calls=tmp_path / "calls"))
    add_command(tmp_path, monkeypatch, "squeue", SQUEUE)
    add_command(tmp_path, monkeypatch, "scontrol", "#!/bin/sh\necho 'ClusterName = here'\n")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURMD_NODENAME", "localhost")
    monkeypatch.chdir(field.root)
    field.calls = tmp_path / "calls"
    return field


def add_command(tmp_path, monkeypatch, name, text):
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def call(field, *orders, **options):
    return field.call(*orders, launcher="pool", **options)


def endpoint(field):
    (path,) = pool.endpoints(str(field.root))
    return path


def test_a_pool_without_an_allocation_is_refused(field, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    code, _, told = call(field, ["note", "x"])
    assert code == 1
    assert told.startswith("stub: launcher pool works inside a SLURM allocation")


def test_srun_starts_one_worker_for_each_mesh(allocation, monkeypatch):
    monkeypatch.setenv("MESHDIAL_SRUN_TRAIN_1", "--het-group=1 --gpus=4 -w 'node 7'")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    train = ["--mesh", "train-1:devices=2"]
    clients = [
        allocation.start(["note", "train"], launcher="pool", options=train) for _ in range(3)
    ]
    assert [allocation.finish(process)[0] for process in clients] == [0] * 3
    assert call(allocation, ["note", "all"])[0] == 0
    assert len({pid for pid, text in allocation.notes() if text == "train"}) == 1
    first, second = allocation.calls.read_text().splitlines()
    options = "--overlap --exact -N1 -n1 --input=none --export=ALL --cpus-per-task=6"
    assert first.startswith(f"{options} --het-group=1 --gpus=4 -w node 7 {sys.executable}")
    assert second.startswith(f"{options} {sys.executable}")
    status = {worker["meshes"][0]: worker for worker in allocation.workers()}
    assert status.keys() == {"train-1", "all"}
    assert status["train-1"]["launcher"] == "pool"
    step = status["train-1"]["pid"]  # as the stand-in numbers them
    assert status["train-1"]["devices"] == [f"cpu-17.{step}-0", f"cpu-17.{step}-1"]


@pytest.mark.parametrize("by_tcp", ["", "1"])
def test_both_ways_lead_to_the_same_worker(allocation, monkeypatch, by_tcp):
    monkeypatch.setenv("MESHDIAL_POOL_TCP", by_tcp)
    ways = []
    monkeypatch.setattr(wire, "connect", lambda path: ways.append("unix"))
    assert call(allocation, ["remember", "base"])[1] == "base 1\n"
    assert call(allocation, ["remember", "base"])[1] == "base 2\n"
    pool.connect(endpoint(allocation)).close()
    assert ways == ([] if by_tcp else ["unix"])


def test_the_folder_lets_nobody_else_in(allocation):
    assert call(allocation, ["note", "x"])[0] == 0
    folder = allocation.root / pool.FOLDER
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert modes["secret"] == 0o600
    folder.chmod(0o750)
    code, _, told = call(allocation, ["note", "x"])
    assert (code, told) == (
        1,
        f"stub: folder {folder} has mode 0750, expected 0700: `chmod 700` it\n",
    )


def test_a_worker_killed_in_a_stage_is_followed_by_another(allocation):
    first = allocation.start(["note", "in"], ["wait_for", "never"], launcher="pool")
    worker = allocation.until_noted("in")
    os.kill(worker, signal.SIGKILL)
    code, _, told = allocation.finish(first)
    assert code == 1
    assert f"the worker (process {worker}) died while it ran this stage" in told
    assert call(allocation, ["note", "next"])[0] == 0
    assert allocation.until_noted("next") != worker


def test_a_client_gone_stops_its_stage_by_tcp(allocation, monkeypatch):
    """Seen from the worker, a client of another node is its connection."""
    monkeypatch.setenv("MESHDIAL_POOL_TCP", "1")
    orders = (["note", "in"], ["wait_for", "go"], ["publish", "text"])
    process = allocation.start(*orders, launcher="pool")
    worker = allocation.until_noted("in")
    process.kill()
    process.wait()
    (allocation.root / "go").touch()
    assert call(allocation, ["note", "next"])[0] == 0
    assert allocation.until_noted("next") == worker
    assert not (allocation.root / "out.txt").exists()


def test_a_worker_that_leaves_is_waited_for(allocation):
    """Its successor comes when it has gone, since the devices are still its own."""
    first = allocation.start(["note", "in"], ["wait_for", "go"], launcher="pool")
    worker = allocation.until_noted("in")
    wire.ask_over(pool.connect(endpoint(allocation)), {"op": "stop"})
    second = allocation.start(["note", "next"], launcher="pool", MESHDIAL_WORKER_START_S="0.5")
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(2.0)
    (allocation.root / "go").touch()
    assert allocation.finish(first)[0] == 0
    assert allocation.finish(second)[0] == 0
    assert allocation.until_noted("next") != worker


def test_status_and_stop(allocation, capsys):
    assert call(allocation, ["note", "x"])[0] == 0
    worker = allocation.until_noted("x")
    cli.main(["worker", "status"])
    words = capsys.readouterr().out.splitlines()[1].split()
    assert (words[0], words[-4:-1]) == (str(worker), ["pool", "all", f"cpu-17.{worker}-0"])
    cli.main(["worker", "stop"])
    assert capsys.readouterr().out == f"stopped process {worker} of {allocation.root}\n"
    assert pool.endpoints(str(allocation.root)) == []


def test_a_worker_on_another_node(allocation, tmp_path, monkeypatch, capsys):
    """The kernel gives it another host name; process numbers then mean nothing between the two."""
    rename = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh"]
    if subprocess.run([*rename, "true"], stderr=-3).returncode:
        pytest.skip("this system does not let a process have a host name of its own")
    text = SRUN.format(calls=allocation.calls).replace("exec ", f"exec {shlex.join(rename)} ")
    add_command(tmp_path, monkeypatch, "srun", text)
    assert call(allocation, ["remember", "base"])[1] == "base 1\n"
    assert call(allocation, ["remember", "base"])[1] == "base 2\n"
    (worker,) = allocation.workers()
    assert worker["host"] == "elsewhere"
    workflow = allocation.workflow()
    process = allocation.start(
        *(["note", "in"], ["wait_for", "go"], ["publish", "text"]),
        launcher="pool",
        MESHDIAL_PARENT_PID=str(workflow.pid),
    )
    allocation.until_noted("in")
    workflow.kill()  # which the client sees, and the worker by its end
    assert allocation.finish(process)[0] == 1
    (allocation.root / "go").touch()
    assert call(allocation, ["note", "next"])[0] == 0
    assert not (allocation.root / "out.txt").exists()
    cli.main(["worker", "status"])
    assert capsys.readouterr().out.splitlines()[1].startswith(f"{worker['pid']}@elsewhere ")
    cli.main(["worker", "stop", "--now"])
    assert capsys.readouterr().out.startswith(f"stopped process {worker['pid']}@elsewhere of")
    allocation.until(lambda: liveness.identify(worker["pid"]) is None)


def test_a_claim_of_another_node_is_respected(allocation, monkeypatch):
    place = pool.place_of(str(allocation.root), "all:devices=1")
    assert pool.claim(place) == ""
    assert pool.claim(place) == ""
    pool.write_endpoint(place.endpoint, {"claimed_by": "elsewhere"})
    assert pool.claim(place) == "elsewhere"
    code, _, told = call(allocation, ["note", "x"], MESHDIAL_WORKER_START_S="0.3")
    assert code == 1
    assert "was started from node elsewhere and does not answer; if that node is lost" in told
    assert f"remove {place.endpoint}" in told
    assert allocation.notes() == []


def test_each_job_has_its_own_place(allocation, monkeypatch):
    first = pool.place_of(str(allocation.root), "all:devices=1")
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    second = pool.place_of(str(allocation.root), "all:devices=1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    third = pool.place_of(str(allocation.root), "all:devices=1")
    for attribute in ("endpoint", "lock", "socket", "log"):
        assert len({getattr(place, attribute) for place in (first, second, third)}) == 3


def test_a_worker_whose_file_was_removed_leaves(allocation):
    assert call(allocation, ["note", "x"])[0] == 0
    worker = allocation.until_noted("x")
    os.unlink(endpoint(allocation))
    allocation.until(lambda: liveness.identify(worker) is None)
    assert call(allocation, ["note", "y"])[0] == 0


def test_a_port_that_is_somebody_elses_by_now(allocation, monkeypatch):
    """As after a crash: whoever listens there does not know the secret."""
    place = pool.place_of(str(allocation.root), "all:devices=1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        facts = {"claimed_by": os.uname().nodename, "host": "elsewhere", "address": "127.0.0.1"}
        pool.write_endpoint(place.endpoint, facts | {"port": listener.getsockname()[1]})
        monkeypatch.setattr("rl.processes.authentication.PATIENCE_S", 0.2)
        assert pool.connect(place.endpoint) is None


SCONTROL = """#!/bin/sh
echo "JobId=17 JobName=x NumNodes=2 NumCPUs=8 NumTasks={tasks} CPUs/Task=4 ReqB:S:C:T=0:0:*:*"
"""


def test_how_a_stage_is_started_in_a_job_of_several_tasks(allocation, tmp_path, monkeypatch):
    add_command(tmp_path, monkeypatch, "scontrol", SCONTROL.format(tasks=2))
    expected = ["srun", "-N", "2", "-n", "2", "-c", "4", "--input=none"]
    expected += ["--kill-on-bad-exit=1", "--quit-on-interrupt"]
    assert slurm.group_command(4) == expected
    assert slurm.group_command(1) == []  # one device is one process's
    assert slurm.group_command(0) == []
    with pytest.raises(MeshdialError, match="has 3 devices and SLURM job 17 2 tasks"):
        slurm.group_command(3)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert slurm.group_command(4) == []
    monkeypatch.delenv("SLURM_STEP_ID")
    add_command(tmp_path, monkeypatch, "scontrol", SCONTROL.format(tasks=1))
    assert slurm.group_command(4) == []
    monkeypatch.delenv("SLURM_JOB_ID")
    assert slurm.group_command(4) == []


def test_options_of_a_mesh_have_a_name_that_shells_take():
    assert slurm.mesh_options("decode-2.b") == "MESHDIAL_SRUN_DECODE_2_B"


def test_a_cold_stage_becomes_srun_in_a_job_of_several_tasks(allocation, tmp_path, monkeypatch):
    add_command(tmp_path, monkeypatch, "scontrol", SCONTROL.format(tasks=2))
    monkeypatch.setenv("MESHDIAL_SRUN_TRAIN", "--mpi=none")
    workflow = allocation.workflow()
    code, shown, _ = allocation.call(
        *(["environment", "SLURM_STEP_NUM_TASKS"], ["environment", "MESHDIAL_PARENT_PID"]),
        launcher="cold",
        options=["--mesh", "train:devices=2"],
        MESHDIAL_PARENT_PID=str(workflow.pid),
    )
    assert code == 0
    assert shown == "SLURM_STEP_NUM_TASKS=1\nMESHDIAL_PARENT_PID=None\n"
    (words,) = allocation.calls.read_text().splitlines()
    assert "-n 2 -c 4 --input=none --kill-on-bad-exit=1 --quit-on-interrupt --mpi=none" in words
    assert "-m rl.client stub --launcher cold" in words


def test_files_of_jobs_that_are_over_are_removed(allocation, tmp_path, monkeypatch, capsys):
    """A job's end kills its steps, so that a worker may leave its address behind."""
    folder = allocation.root / pool.FOLDER
    folder.mkdir(mode=0o700)
    jobs = {"17": "here", "17-1": "here", "18": "here", "19": "here", "20": "here"}
    jobs |= {"21": "elsewhere", "22": ""}
    for job, cluster in jobs.items():
        pool.write_endpoint(folder / f"{job}-all-1a.json", {"claimed_by": "n1", "cluster": cluster})
        (folder / f"{job}-all-1a.log").touch()
    os.utime(folder / "20-all-1a.log", (0, 0))
    (folder / "secret").touch(mode=0o600)
    add_command(tmp_path, monkeypatch, "squeue", "#!/bin/sh\nexit 1\n")
    pool.remove_ended(str(allocation.root))
    assert len(pool.endpoints(str(allocation.root))) == 7  # SLURM does not answer
    add_command(tmp_path, monkeypatch, "squeue", SQUEUE)
    cli.main(["worker", "status"])
    assert capsys.readouterr().out == "no worker runs\n"
    left = [path.name.partition("-all")[0] for path in sorted(folder.glob("*.json"))]
    assert left == ["17-1", "17", "18", "21"]
    assert (folder / "19-all-1a.log").exists() and not (folder / "20-all-1a.log").exists()
    assert (folder / "secret").exists()


@pytest.mark.parametrize("order", ["wait_for", "ignore_all"])
def test_sigterm_ends_a_worker_in_order(allocation, order):
    """As at the end of a job: whoever waits is told, and no address is left."""
    process = allocation.start(["note", "in"], [order, "never"], launcher="pool")
    worker = allocation.until_noted("in")
    os.kill(worker, signal.SIGTERM)
    code, _, told = allocation.finish(process)
    assert (code, told) == (1, "stub: the worker leaves: it was told to end (SIGTERM)\n")
    allocation.until(lambda: liveness.identify(worker) is None)
    assert pool.endpoints(str(allocation.root)) == []


def test_sigterm_ends_an_idle_worker(allocation):
    assert call(allocation, ["note", "x"])[0] == 0
    worker = allocation.until_noted("x")
    os.kill(worker, signal.SIGTERM)
    allocation.until(lambda: liveness.identify(worker) is None)
    assert pool.endpoints(str(allocation.root)) == []
