"""What the workflow's own process sets up before the first stage runs."""

import fcntl
import os
import sys
from pathlib import Path

from rl.errors import MeshdialError
from rl.processes import slurm

_held: list[int] = []


def enter_workflow(is_remote: bool) -> None:
    """Stages run with this Python, and do not publish for this process once it has died.

    `is_remote` says that Snakemake's executor has started this process for one stage, and under
    SLURM the job around it.
    """
    if is_remote:
        os.environ[slurm.STAGE_JOB] = slurm.job()
    own_folder = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([own_folder, os.environ.get("PATH", "")])
    os.environ["MESHDIAL_PARENT_PID"] = f"{os.getpid()}@{os.uname().nodename}"


def take_run_lock(folder: Path) -> None:
    """Hold `folder` until this process ends; MeshdialError if another workflow has it.

    The kernel frees the lock when its holder dies, however that happens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise MeshdialError(
            f"{folder} is in use by another workflow (process {holder}); wait for it or stop it"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    _held.append(lock)
