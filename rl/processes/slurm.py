"""What SLURM says of this process, and the command that starts several of one stage.

The official names: a *job* holds resources, a *step* is what one `srun` runs in it, a *task* is a
process of a step. Standard library only, and light.
"""

import os
import re
import shutil
import socket
import subprocess

from rl.errors import MeshdialError

QUERY_S = 20.0
_OVER = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
STAGE_JOB = "MESHDIAL_STAGE_JOB"  # the job that Snakemake's executor has made for one stage


def job() -> str:
    """The number of the job that this process belongs to; empty outside of any."""
    return os.environ.get("SLURM_JOB_ID", "")


def is_in_step() -> bool:
    """Whether `srun` started this process, and not the job's own script."""
    return bool(job() and os.environ.get("SLURM_STEP_ID"))


def is_for_one_mesh(launcher: str) -> bool:
    """Whether the devices that SLURM shows to this process are for its mesh and no other.

    So it is in the step of a worker of a pool, and in a job of the executor. Any other job or step,
    that of a shell too, is one in which the processes of several meshes meet.
    """
    if launcher == "pool":
        return is_in_step()
    return launcher == "cold" and bool(job()) and os.environ.get(STAGE_JOB) == job()


def place() -> str:
    """`JOB` or `JOB.STEP`: whose devices this process sees; empty outside of any job."""
    return f"{job()}.{os.environ['SLURM_STEP_ID']}" if is_in_step() else job()


def node() -> str:
    """A name of this machine by which the others of the cluster reach it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def number_on_node() -> int:
    """Of this task among those of its step on this machine, from 0."""
    return int(os.environ.get("SLURM_LOCALID") or 0) if is_in_step() else 0


def gpu_numbers() -> list[str]:
    """The node's own numbers of the GPUs given to this step or job, where SLURM tells them.

    They name the physical devices, also where every job sees its own as 0, 1, ...
    """
    text = os.environ.get("SLURM_STEP_GPUS") or os.environ.get("SLURM_JOB_GPUS") or ""
    return text.split(",") if re.fullmatch(r"\d+(,\d+)*", text) else []


def group_command(num_devices: int) -> list[str]:
    """How a stage has to be started to run in all tasks of this job; empty if it runs alone.

    That is in a job of several tasks, outside of any step: what the SLURM executor makes of a rule
    with `mpi` and `tasks`. A mesh with fewer devices than tasks runs in one process.
    """
    if not job() or is_in_step() or num_devices < 2:
        return []
    facts = _job_facts()
    num_tasks = int(facts.get("NumTasks", 1))
    if num_tasks < 2 or num_devices < num_tasks:
        return []
    if num_devices % num_tasks:
        raise MeshdialError(
            f"the mesh has {num_devices} devices and SLURM job {job()} {num_tasks} tasks, expected"
            " a number of devices that the tasks can share evenly"
        )
    command = ["srun", "-N", facts["NumNodes"].split("-")[0], "-n", str(num_tasks)]
    if facts.get("CPUs/Task", "N/A").isdecimal():
        command += ["-c", facts["CPUs/Task"]]  # which a step does not take from its job
    return [*command, "--input=none", "--kill-on-bad-exit=1", "--quit-on-interrupt"]


def _job_facts() -> dict[str, str]:
    """What SLURM knows of this job. Its variables say less: the executor takes most of them away
    from the processes of a job."""
    if shutil.which("scontrol") is None or shutil.which("srun") is None:
        return {}
    command = ["scontrol", "--oneliner", "show", "job", job()]
    answer = subprocess.run(command, text=True, capture_output=True, timeout=QUERY_S)
    if answer.returncode:
        raise MeshdialError(f"`{' '.join(command)}` failed: {answer.stderr.strip()}")
    return dict(re.findall(r"(\S+?)=(\S*)", answer.stdout))


def jobs() -> set[str] | None:
    """The numbers of this user's jobs that are not over; None where no SLURM answers."""
    own = f"--user={os.getuid()}"
    text = _answer("squeue", "--noheader", "--all", "--states=all", own, "--format=%A %T")
    if text is None:
        return None
    rows = [line.split() for line in text.splitlines()]
    return {number for number, state in rows if state not in _OVER}


def cluster() -> str:
    """The name of the cluster that `jobs` tells of; empty where no SLURM answers."""
    named = re.search(
        r"^ClusterName\s*=\s*(\S+)", _answer("scontrol", "show", "config") or "", re.M
    )
    return named[1] if named else ""


def _answer(*command: str) -> str | None:
    """What a command of SLURM prints; None if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=QUERY_S)
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else done.stdout


def mesh_options(mesh: str) -> str:
    """The name of the variable with a site's own `srun` options for the processes of a mesh."""
    return "MESHDIAL_SRUN_" + re.sub(r"[^A-Z0-9_]", "_", mesh.upper())
