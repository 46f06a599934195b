"""Processes that run one stage together: how they find each other, meet, and fail."""

import hashlib
import json
import socket

import pytest

from rl import group
from rl.errors import MeshdialError

from .processes import run_alone, run_group

VARIABLES = ("MESHDIAL_COORDINATOR", "MESHDIAL_NUM_PROCESSES", "MESHDIAL_PROCESS_ID")
SLURM = {
    "SLURM_JOB_ID": "70",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[007-009,12]",
    "SLURM_PROCID": "1",
}


@pytest.fixture
def environment(monkeypatch):
    for name in (*VARIABLES, *SLURM):
        monkeypatch.delenv(name, raising=False)

    def set_to(values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_a_process_without_others_is_alone(environment):
    assert group.settings() is None
    environment({**SLURM, "SLURM_STEP_NUM_TASKS": "1"})
    assert group.settings() is None
    environment({name: value for name, value in zip(VARIABLES, ("x:1", "1", "0"), strict=True)})
    assert group.settings() is None


def test_a_batch_script_is_no_step_of_several_tasks(environment):
    environment({"SLURM_JOB_ID": "70", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"})
    assert group.settings() is None


def test_slurm_says_who_the_others_are(environment):
    environment(SLURM)
    digest = hashlib.sha256(b"70.3").hexdigest()
    assert group.settings() == (f"gpu007:{61440 + int(digest[:16], 16) % 4096}", 2, 1)
    environment({"MESHDIAL_COORDINATOR": "gpu007:6"})  # another port, the rest from SLURM
    assert group.settings() == ("gpu007:6", 2, 1)
    environment(dict(zip(VARIABLES, ("head:5", "4", "2"), strict=True)))
    assert group.settings() == ("head:5", 4, 2)  # what is given by hand comes first


def test_steps_on_one_node_have_ports_of_their_own(environment):
    environment(SLURM)
    ports = set()
    for job in (1000, 1064, 1128, 1001, 5096):
        for step in (0, 1, 2, 64):
            environment({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
            ports.add(int(group.settings().coordinator.rpartition(":")[2]))
    assert len(ports) == 20
    assert all(61440 <= port < 65536 for port in ports)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_taken_is_told_in_a_sentence(environment, host):
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        environment(dict(zip(VARIABLES, (f"localhost:{port}", "2", "0"), strict=True)))
        with pytest.raises(MeshdialError) as error:
            group.join()
    assert str(error.value) == (
        f"the first process of the group cannot listen on port {port} (Address already in use): "
        "set MESHDIAL_COORDINATOR to its HOST:PORT with a free port, in all of them"
    )


@pytest.mark.parametrize(
    "nodes, host",
    [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[01,03-5],m", "n01"), ("n-x[7]", "n-x7")],
)
def test_the_first_host_of_a_list(nodes, host):
    assert group.first_host(nodes) == host


@pytest.mark.parametrize(
    "values, sentence",
    [
        (("x:1", "2", None), "MESHDIAL_PROCESS_ID is not set, though MESHDIAL_COORDINATOR is"),
        (("x:1", "two", "0"), "MESHDIAL_NUM_PROCESSES is 'two', expected a whole number"),
        (("x", "2", "0"), "MESHDIAL_COORDINATOR is 'x', expected HOST:PORT"),
        (("x:1", "2", "2"), "MESHDIAL_PROCESS_ID is 2, expected less than 2"),
    ],
)
def test_settings_that_contradict_each_other(environment, values, sentence):
    environment({name: value for name, value in zip(VARIABLES, values, strict=True) if value})
    with pytest.raises(MeshdialError) as error:
        group.settings()
    assert str(error.value) == sentence


def test_alone_everything_is_immediate_and_without_jax():
    code = """
    import sys
    from rl import group
    group.join()
    group.barrier("x")
    group.fail("nobody hears it")
    assert (group.size(), group.rank(), group.is_first()) == (1, 0, True)
    assert (group.gather({"a": 1}), group.agree("x")) == ([{"a": 1}], "x")
    assert group.first(lambda: 3) == 3
    assert "jax" not in sys.modules
    """
    result = run_alone(code)
    assert result.returncode == 0, result.stderr


MEETING = """
import json, sys
from pathlib import Path
from rl import group
from rl.artifacts import Publisher, write_json
from rl.errors import MeshdialError

folder, rank = Path(sys.argv[1]), group.rank()

def failure_of(action):
    try:
        action()
    except (MeshdialError, RuntimeError) as error:
        return str(error)

def publish():
    write_json(Publisher(), folder / "said.json", {"by": rank})
    with Publisher().directory(folder / "filled") as draft:
        (draft / str(rank)).write_text(str(rank))

said = {
    "gathered": group.gather({"rank": rank}),
    "agreed": group.agree(f"text of {rank}"),
    "first": group.first(lambda: rank),
    "lost": failure_of(lambda: group.barrier(f"place {rank}")),
}
publish()
said["files"] = sorted(path.name for path in folder.iterdir())
if sys.argv[2] == "in the block":
    def fail():
        with Publisher().directory(folder / "bad") as draft:
            (draft / str(rank)).write_text("x")
            if rank == 1:
                raise MeshdialError("a value is not finite")
else:
    def check_alive():
        if rank == 1:
            raise RuntimeError("nobody waits")
    fail = lambda: write_json(Publisher(check_alive), folder / "bad", 1)
said["failed"] = failure_of(fail)
said["afterwards"] = failure_of(lambda: group.barrier("on"))
print(json.dumps(said), flush=True)
"""


@pytest.mark.parametrize(
    "how, reason", [("in the block", "a value is not finite"), ("at the end", "nobody waits")]
)
def test_two_processes_meet_publish_and_fail_together(tmp_path, how, reason):
    results = run_group(MEETING, tmp_path, how, num_devices=1)
    said = [json.loads(result.stdout.splitlines()[-1]) for result in results]
    for found in said:
        assert found["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert (found["agreed"], found["first"]) == ("text of 0", 0)
        places = "['place 0', 'place 1']"
        assert found["lost"] == f"the processes of a group are not at one place: {places}"
        assert found["afterwards"] == f"this process has left its group: {reason}"
    assert said[0]["failed"] == f"process 1 of 2 failed: {reason}"
    assert said[1]["failed"] == reason
    assert said[0]["files"] == ["filled", "said.json"]  # the first has cleared up by then
    assert json.loads((tmp_path / "said.json").read_text()) == {"by": 0}
    assert sorted(path.name for path in (tmp_path / "filled").iterdir()) == ["0", "1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["filled", "said.json"]
