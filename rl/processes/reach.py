"""How a client reaches a worker: it connects to the one that is there, or starts one.

Whoever gets the lock of a place may start its worker, and hands the lock to it, open.
"""

import os
import sys
import time
from collections.abc import Callable

from rl.errors import MeshdialError
from rl.processes import runtime, wire
from rl.processes.runtime import Place
from rl.processes.wire import Channel

TAIL_LINES = 20
TAIL_BYTES = 8000
MAX_LOG_BYTES = 4_000_000
POLL_S, POOL_POLL_S = 0.02, 0.1  # the second asks a file system that many share


def reach_worker(place: Place, request: dict, check: Callable[[], None]) -> Channel:
    """A channel to the worker of `place`, which is started here if nobody else starts one."""
    wait_s = runtime.seconds("MESHDIAL_WORKER_START_S")
    deadline, process, claimant = time.monotonic() + wait_s, None, ""
    while (channel := connect(place)) is None:
        check()
        if process is not None and process.poll() is not None:
            if process.returncode != 0:
                status, tail = process.returncode, log_tail(place, 0)
                raise MeshdialError(f"the worker ended as it started (exit {status})\n{tail}")
            process = None  # another client has sent it away already
        if process is None and (lock := runtime.take_lock(place.lock)) is not None:
            claimant = claim(place)
            process = None if claimant else start_worker(place, lock, request)
            os.close(lock)  # the worker holds it now
        if is_leaving(place):
            deadline = time.monotonic() + wait_s
        elif time.monotonic() > deadline:
            raise MeshdialError(_complaint(place, claimant))
        time.sleep(POOL_POLL_S if place.endpoint else POLL_S)
    return channel


def connect(place: Place) -> Channel | None:
    """A channel to the worker of `place`; None if it is not there."""
    if place.endpoint:
        from rl.processes import pool

        return pool.connect(place.endpoint)
    return wire.connect(place.socket)


def claim(place: Place) -> str:
    """Which other node has the right to start the worker of `place`; empty if this one has."""
    if place.endpoint:
        from rl.processes import pool

        return pool.claim(place)
    return ""


def is_leaving(place: Place) -> bool:
    """Whether the worker finishes its last stage, after which another can be started.

    Only in a pool: elsewhere a worker that leaves gives its lock to a successor at once.
    """
    if place.endpoint:
        from rl.processes import pool

        return bool(pool.read_endpoint(place.endpoint).get("is_retiring"))
    return False


def _complaint(place: Place, claimant: str) -> str:
    if claimant:
        return (
            f"the worker of {place.layout} was started from node {claimant} and does not answer; if"
            f" that node is lost, remove {place.endpoint}"
        )
    return (
        f"the worker of {place.root} does not answer; end the process that holds"
        f" {place.lock} ({runtime.read_holder(place.lock)})"
    )


def start_worker(place: Place, lock: int, request: dict):
    """Start a worker that inherits `lock`, this environment, and nothing else of this process."""
    import subprocess

    environment = dict(os.environ)
    environment.pop("MESHDIAL_PARENT_PID", None)
    own_code = os.path.dirname(runtime.package_folder())
    paths = [own_code, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-u", "-P", "-m", "rl.worker", "--launcher", request["launcher"]]
    command += ["--layout", place.layout, "--fingerprint", request["fingerprint"]]
    if place.endpoint:
        from rl.processes import pool, slurm

        command = [*pool.worker_command(place.layout), *command, "--peer", slurm.node()]
    else:
        command += ["--lock", str(lock)]
    if os.path.exists(place.log) and os.path.getsize(place.log) > MAX_LOG_BYTES:
        os.replace(place.log, place.log + ".old")
    with open(place.log, "ab") as log:
        return subprocess.Popen(
            command,
            cwd=place.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
        )


def obituary(place: Place, started: dict) -> str:
    return (
        f"the worker (process {started['pid']}) died while it ran this stage;"
        " the next stage starts another\n" + log_tail(place, started["log_size"])
    )


def log_tail(place: Place, offset: int) -> str:
    """The last lines of a worker's log, from `offset` bytes on."""
    lines = []
    if os.path.exists(place.log):
        with open(place.log, "rb") as file:
            file.seek(max(offset, os.path.getsize(place.log) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    if not lines:
        return f"it left nothing in {place.log}, as when the kernel kills it for want of memory"
    return "\n".join([f"last lines of {place.log}:", *(f"  {line}" for line in lines)])
