"""Workers inside one SLURM allocation: `srun` starts them, a file tells where they listen.

1. The folder `.meshdial` below the results folder, which all nodes of the allocation see, holds a
   secret and, for each job and mesh, a file with the worker's address and a log.
2. A client claims that file and starts the worker; the worker writes its address there.
3. Clients on the worker's node come by its Unix socket, others by TCP, with the secret.
4. A worker that retires says so there, and removes the file when it ends, on SIGTERM too. Where
   even that did not happen, whoever lists workers removes the files of jobs that are over.

There is one worker for each job and mesh, provided that the folder's file system makes a hard link
once: the file belongs to the node whose client made it, and on that node the kernel's lock, held
by whoever waits for `srun`, tells whether the worker is there. A node that is lost together with
its claim is the one thing that has to be mended by hand, in words that the error gives.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import time

from rl.errors import MeshdialError
from rl.processes import authentication, liveness, runtime, slurm, wire
from rl.processes.runtime import Place

FOLDER = ".meshdial"
LOG_KEPT_S = 7 * 24 * 3600.0
ALWAYS_TCP = "MESHDIAL_POOL_TCP"  # by TCP even to a worker of the same node, for tests
BIND = "MESHDIAL_POOL_BIND"  # the address to listen at, if not the one that faces the client


def place_of(root: str, layout: str) -> Place:
    """The names of the worker of `root` and `layout` in this allocation, seen from this node."""
    if not slurm.job():
        raise MeshdialError(
            "launcher pool works inside a SLURM allocation, and SLURM_JOB_ID is not set; use the"
            " launcher warm"
        )
    job = "-".join(filter(None, [slurm.job(), os.environ.get("SLURM_RESTART_COUNT", "")]))
    place = runtime.place_of(root, layout, job)
    mesh, key = layout.partition(":")[0], hashlib.sha256(layout.encode()).hexdigest()[:8]
    base = os.path.join(private_folder(place.root), f"{job}-{mesh}-{key}")
    return place._replace(log=f"{base}.log", endpoint=f"{base}.json")


def private_folder(root: str) -> str:
    """The folder of the allocation's files, made with mode 0700; MeshdialError if others can
    enter it."""
    folder = os.path.join(root, FOLDER)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise MeshdialError(f"folder {folder} cannot be made: {error.strerror}") from None
    runtime.require_private(folder, "folder", 0o700)
    return folder


def endpoints(root: str) -> list[str]:
    """The files of the workers of all allocations."""
    folder = os.path.join(root, FOLDER)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if name.endswith(".json")]


def remove_ended(root: str) -> None:
    """Remove what workers have left whose job is over, where SLURM says so: their addresses, and
    after some days their logs."""
    folder = os.path.join(root, FOLDER)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    numbers = {name: match[1] for name in names if (match := re.match(r"(\d+)-", name))}
    jobs = slurm.jobs() if set(numbers.values()) - {slurm.job()} else None
    if jobs is None:
        return
    cluster, oldest = slurm.cluster(), time.time() - LOG_KEPT_S
    for name in [name for name, number in numbers.items() if number not in jobs | {slurm.job()}]:
        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError):  # another may be at it too
            if name.endswith(".json"):
                is_left = read_endpoint(path).get("cluster") in (None, "", cluster)
            else:
                is_left = os.stat(path).st_mtime < oldest
            if is_left:
                os.unlink(path)


def read_endpoint(path: str) -> dict:
    """What the file says; nothing where there is none."""
    os.listdir(os.path.dirname(path))  # has a network file system look for what others renamed
    return runtime.read_holder(path) or {}


def write_endpoint(path: str, facts: dict) -> None:
    """Replace the file, whole."""
    draft = _draft(path, facts)
    os.replace(draft, path)


def _draft(path: str, facts: dict) -> str:
    draft = f"{path}.{os.urandom(8).hex()}"
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(facts, file)
    return draft


def claim(place: Place) -> str:
    """Whose the place is to start a worker: empty if this node's, else the node that has it.

    The caller holds the place's lock, so that no worker that was started here is there any more.
    """
    own = os.uname().nodename
    claim = {"claimed_by": own, "cluster": os.environ.get("SLURM_CLUSTER_NAME", "")}
    draft = _draft(place.endpoint, claim)
    try:
        os.link(draft, place.endpoint)
    except FileExistsError:
        claimant = read_endpoint(place.endpoint).get("claimed_by", own)
        if claimant != own:
            return claimant
        write_endpoint(place.endpoint, claim)
    finally:
        if os.path.exists(draft):
            os.unlink(draft)
    return ""


def publish(place: Place, port: int, host: str, identity: dict) -> None:
    """The worker's address, for all nodes."""
    facts = read_endpoint(place.endpoint)
    if not facts:
        raise MeshdialError(f"{place.endpoint} was removed before the worker had started")
    address = {"socket": place.socket, "address": host, "port": port}
    write_endpoint(place.endpoint, facts | identity | address)


def retire(place: Place) -> None:
    """Say that nobody should come any more."""
    facts = read_endpoint(place.endpoint)
    if facts:
        kept = {name: facts[name] for name in ("claimed_by", "cluster") if name in facts}
        write_endpoint(place.endpoint, {**kept, "is_retiring": True})


def forget(place: Place) -> None:
    """Remove the file of a worker that has served its last stage, if it has one."""
    if os.path.exists(place.endpoint):
        os.unlink(place.endpoint)


def connect(endpoint: str) -> wire.Channel | None:
    """A channel to the worker whose address is in the file; None if it is not there."""
    facts = read_endpoint(endpoint)
    if "port" not in facts:
        return None
    if liveness.is_local(facts) and not os.environ.get(ALWAYS_TCP):
        channel = wire.connect(facts["socket"])
        if channel is not None:
            return channel
    secret = authentication.secret_of(os.path.dirname(endpoint))
    return wire.connect_tcp(facts["address"], facts["port"], secret)


def listen(place: Place, peer: str) -> tuple[wire.TcpListener, str]:
    """Listen for the other nodes: at the address of this one that faces `peer`, or at the one
    that the user names. Returns it too."""
    facing = _address_facing(peer)
    secret = authentication.secret_of(os.path.dirname(place.endpoint))
    try:
        return wire.TcpListener(os.environ.get(BIND) or facing, secret), facing
    except OSError as error:
        raise MeshdialError(
            f"cannot listen at {os.environ.get(BIND) or facing}: {error.strerror}"
        ) from None


def _address_facing(peer: str) -> str:
    try:
        family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # which sends nothing
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError as error:
        raise MeshdialError(
            f"this node finds no way to {peer}, where its clients are: {error.strerror}"
        ) from None


def worker_command(layout: str) -> list[str]:
    """What comes before a worker's own command, with the site's options for its (first) mesh."""
    if shutil.which("srun") is None:
        raise MeshdialError("launcher pool starts its workers by srun, which is not there")
    command = ["srun", "--overlap", "--exact", "-N1", "-n1", "--input=none", "--export=ALL"]
    if os.environ.get("SLURM_CPUS_PER_TASK"):  # which a step does not take from its job
        command.append(f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}")
    name = runtime.parse_process_layout(layout)[0].name
    command += shlex.split(os.environ.get(slurm.mesh_options(name), ""))
    # The shell waits for srun and keeps the lock open, which srun itself may close.
    return ["sh", "-c", '"$@"; exit $?', "sh", *command]
