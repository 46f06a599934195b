"""The processes that run one stage together, each with some of its mesh's devices.

1. The first thing such a process does is to `join` the others, under `srun` by SLURM's variables,
   elsewhere by MESHDIAL_COORDINATOR, MESHDIAL_NUM_PROCESSES and MESHDIAL_PROCESS_ID.
2. All run the same stage code; what is said once (a table, a line) the first process says.
3. They meet by words of JSON, which JAX's coordination service carries: no device takes part, so
   that a meeting cannot be mistaken for a step of a computation.
4. Who fails says so, and whoever waits for it fails too; if the first one does, all end, whatever
   they are at. One that dies is missed by the service.

A process without others is a group of one: all of this is immediate, and JAX is not imported.
"""

import atexit
import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rl.errors import MeshdialError

HEARTBEAT_SECONDS = 60  # a process that is silent for so long counts as dead
LEAVE_SECONDS = 2.0  # for which a first process that has failed waits for the others to end
_LEAVE_TICK_SECONDS = 0.5
_FAREWELL = "meshdial/farewell"
_POLL_MS = 1000  # between looks at signals while waiting
_FIRST_PORT, _NUM_PORTS = 61440, 4096  # above those that systems give to clients
_VARIABLES = ("MESHDIAL_COORDINATOR", "MESHDIAL_NUM_PROCESSES", "MESHDIAL_PROCESS_ID")


class Settings(NamedTuple):
    """Where the first process listens (HOST:PORT), how many there are, and which this is."""

    coordinator: str
    num_processes: int
    process_id: int


class _Membership:
    """What this process knows of its group: its place, and how often it has met the others."""

    def __init__(self):
        self.size, self.rank = 1, 0
        self.num_meetings = 0
        self.failure: str | None = None
        self.client: Any = None


_here = _Membership()


def settings() -> Settings | None:
    """The group that this process was started for; None where it was started alone.

    MeshdialError if the variables contradict each other.
    """
    given = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    # Only a step of `srun` has this one; a batch script's own variables count tasks to come.
    num_processes = int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1)
    if num_processes > 1 and given.keys() <= {"MESHDIAL_COORDINATOR"}:
        coordinator = given.get("MESHDIAL_COORDINATOR") or _coordinator_of_step()
        _check_address(coordinator)
        return Settings(coordinator, num_processes, int(os.environ["SLURM_PROCID"]))
    return _given_settings(given) if given else None


def _coordinator_of_step() -> str:
    host = first_host(os.environ["SLURM_STEP_NODELIST"])
    port = _port_of(f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}")
    return f"{host}:{port}"


def _check_address(coordinator: str) -> None:
    if not coordinator.rpartition(":")[2].isdecimal():
        raise MeshdialError(f"MESHDIAL_COORDINATOR is {coordinator!r}, expected HOST:PORT")


def _given_settings(given: dict[str, str]) -> Settings | None:
    for name in _VARIABLES:
        if name not in given:
            raise MeshdialError(f"{name} is not set, though {next(iter(given))} is")
        if name != "MESHDIAL_COORDINATOR" and not given[name].isdecimal():
            raise MeshdialError(f"{name} is {given[name]!r}, expected a whole number")
    coordinator, size, rank = (given[name] for name in _VARIABLES)
    _check_address(coordinator)
    if int(rank) >= int(size):
        raise MeshdialError(f"MESHDIAL_PROCESS_ID is {rank}, expected less than {size}")
    return Settings(coordinator, int(size), int(rank)) if int(size) > 1 else None


def _port_of(step: str) -> int:
    """A port for the step `JOB.STEP`; other steps on the same node most likely have others."""
    digest = hashlib.sha256(step.encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:8], "big") % _NUM_PORTS


def first_host(nodes: str) -> str:
    """The first of SLURM's list of nodes: `node[003-007,9],other` -> `node003`."""
    prefix, number = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes).groups()
    return prefix + (number or "")


def join() -> None:
    """Meet the other processes, if there are any: before anything asks JAX for devices.

    The devices of a process are those that it can see: under SLURM, those of its task.
    MeshdialError in the first process if it cannot listen where the others look for it.
    """
    wanted = settings()
    if wanted is None or _here.size > 1:
        return
    if wanted.process_id == 0:
        _check_port(wanted.coordinator)
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        wanted.coordinator,
        wanted.num_processes,
        wanted.process_id,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    # JAX has no public name for the service's words; orbax and flax reach for them here too.
    _here.client = jax._src.distributed.global_state.client
    _here.size, _here.rank = wanted.num_processes, wanted.process_id


def _check_port(coordinator: str) -> None:
    """JAX would share the port with whoever has it, or say it in a screen of messages."""
    port = int(coordinator.rpartition(":")[2])
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=is_dual).close()
    except OSError as error:
        raise MeshdialError(
            f"the first process of the group cannot listen on port {port} "
            f"({os.strerror(error.errno)}): set MESHDIAL_COORDINATOR to its HOST:PORT with a free "
            "port, in all of them"
        ) from None


def size() -> int:
    """How many processes there are, this one included."""
    return _here.size


def rank() -> int:
    """The number of this process, from 0."""
    return _here.rank


def is_first() -> bool:
    return _here.rank == 0


def gather(value: Any) -> list[Any]:
    """Everyone's `value` (any JSON), in the order of the processes, once all have given theirs.

    MeshdialError if one of them has failed instead.
    """
    if _here.size == 1:
        return [value]
    if _here.failure is not None:
        raise MeshdialError(f"this process has left its group: {_here.failure}")
    number = _here.num_meetings
    _here.num_meetings += 1  # a failure from here on is heard at the next one
    _say(number, {"value": value})
    words = [_heard(number, other) for other in range(_here.size)]
    if number:  # all have come to this meeting, so nobody listens to the one before any more
        _here.client.key_value_delete(_key(number - 1, _here.rank))
    for other, word in enumerate(words):
        if "failure" in word:
            _here.failure = word["failure"]
            raise MeshdialError(f"process {other} of {_here.size} failed: {word['failure']}")
    return [word["value"] for word in words]


def barrier(name: str) -> None:
    """Returns once all processes have come to the barrier of this name."""
    names = gather(name)
    if len(set(names)) > 1:
        raise RuntimeError(f"the processes of a group are not at one place: {names}")


def agree(text: str) -> str:
    """The text of the first process."""
    return gather(text if is_first() else None)[0]


def first(make: Callable[[], Any]) -> Any:
    """What `make` (JSON) gives in the first process, which alone calls it."""
    if _here.size == 1:
        return make()
    with reporting():
        return gather(make() if is_first() else None)[0]


@contextmanager
def reporting() -> Iterator[None]:
    """A block whose failure in this process is told to the others."""
    try:
        yield
    except BaseException as error:
        fail(str(error) or type(error).__name__)
        raise


def fail(reason: str) -> None:
    """Tell the others that this process will not come to another meeting."""
    if _here.size == 1 or _here.failure is not None:
        return
    _here.failure = reason
    _say(_here.num_meetings, {"failure": reason})


def leave() -> None:
    """Of a process that has failed, before it exits. With the first one JAX's service goes, and
    takes the others with it in many words, so it lets them end before, for a while."""
    if _here.size == 1 or not is_first():
        return
    import jax

    _here.client.key_value_set(_FAREWELL, "", allow_overwrite=True)
    deadline = time.monotonic() + LEAVE_SECONDS
    for other in range(1, _here.size):
        left_ms = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            _here.client.blocking_key_value_get(f"{_FAREWELL}/{other}", left_ms)
        except jax.errors.JaxRuntimeError:
            return
    time.sleep(_LEAVE_TICK_SECONDS)  # between the word of the last one and its end


def end_with_first() -> None:
    """End this process, quietly, once the first one says that it leaves: what this one computes
    just now, in compiled code perhaps, nobody will have."""
    if _here.size > 1 and not is_first():
        is_over = threading.Event()
        thread = threading.Thread(target=_end_with_first, args=(is_over,), daemon=True)
        thread.start()
        atexit.register(lambda: (is_over.set(), thread.join()))


def _end_with_first(is_over: threading.Event) -> None:
    import jax

    while not is_over.wait(_LEAVE_TICK_SECONDS):
        try:
            _here.client.key_value_try_get(_FAREWELL)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                continue
            return  # the first one is gone already
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _here.client.key_value_set(f"{_FAREWELL}/{_here.rank}", "", allow_overwrite=True)
        os._exit(1)


def _key(number: int, process: int) -> str:
    return f"meshdial/{number}/{process}"


def _say(number: int, word: dict) -> None:
    text = json.dumps(word)
    _here.client.key_value_set(_key(number, _here.rank), text, allow_overwrite=True)


def _heard(number: int, process: int) -> dict:
    """What a process says at a meeting, as soon as it says it."""
    import jax

    while True:
        try:
            return json.loads(_here.client.blocking_key_value_get(_key(number, process), _POLL_MS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise MeshdialError(f"the first process of the group is gone: {error}") from None
