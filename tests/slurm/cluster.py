"""A real SLURM on this one machine: four nodes in two pools, there for the tests and then gone.

Everything lies below HOME, but for the link /etc/slurm/slurm.conf: the commands that a job runs
look nowhere else. A node's name is a loopback address, so that names resolve without /etc/hosts.
Daemons are told by their pid files, never by name, so those of a run that was killed are found.
"""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOME = Path("/run/meshdial-slurm")  # short, since sockets lie in it, and only root can write there
CONF = Path("/etc/slurm/slurm.conf")
PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
SBIN = ":/usr/sbin:/sbin"
POOLS = {"actor": ("127.0.0.11", "127.0.0.12"), "rollout": ("127.0.0.21", "127.0.0.22")}
NUM_GPUS = 4  # pretended, like the processors and the memory
START_S = 60

SETTINGS = """
ClusterName=meshdial
SlurmUser=root
SlurmdUser=root
MpiDefault=none
MailProg=/bin/true
ReturnToService=1
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
JobAcctGatherParams=OverMemoryKill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
DefMemPerCPU=512
AccountingStorageType=accounting_storage/none
MinJobAge=3600
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
KillWait=5
JobRequeue=0
"""


def reason_to_skip() -> str:
    """Why no cluster can be had here; empty where one can."""
    if os.name != "posix" or os.uname().sysname != "Linux":
        return "SLURM's daemons need Linux"
    if os.getuid() != 0:
        return "SLURM's daemons need root"
    if CONF.exists() and not is_own(CONF):
        return f"this machine has a SLURM of its own ({CONF})"
    if missing_programs() and not (shutil.which("apt-get") and os.environ.get("CI")):
        return f"no SLURM here: apt-get install {' '.join(PACKAGES)} (with CI=true the tests do so)"
    return ""


def is_own(conf: Path) -> bool:
    return conf.is_symlink() and os.readlink(conf).startswith(f"{HOME}/")


def missing_programs() -> list[str]:
    path = os.environ["PATH"] + SBIN
    return [program for program in PROGRAMS if shutil.which(program, path=path) is None]


@contextmanager
def running_cluster() -> Iterator[None]:
    """Bring the cluster up, and take it down at the end; one at a time on a machine."""
    os.environ["PATH"] += SBIN
    if missing_programs():
        install()
    with open(HOME.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another session here has its cluster first
        take_down()  # what a run that was killed has left
        try:
            configure()
            start()
            yield
        finally:
            take_down()


def install() -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    options = ("install", "-y", "-qq", "--no-install-recommends", *PACKAGES)
    for command in (["apt-get", "update", "-qq"], ["apt-get", *options]):
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def configure() -> None:
    """Write the configuration, the key that the daemons share, and the device files."""
    for name in ("state", "spool", "log", "pid", "dev"):
        (HOME / name).mkdir(parents=True)
    key = HOME / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    for number in range(NUM_GPUS):
        os.mknod(HOME / f"dev/gpu{number}", 0o600 | 0o020000, os.makedev(1, 3))  # as /dev/null
    (HOME / "slurm.conf").write_text(slurm_conf())
    (HOME / "gres.conf").write_text(
        "AutoDetect=off\n"
        + "".join(
            f"NodeName={node} Name=gpu File={HOME}/dev/gpu[0-{NUM_GPUS - 1}]\n" for node in nodes()
        )
    )
    (HOME / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    CONF.parent.mkdir(exist_ok=True)
    CONF.unlink(missing_ok=True)
    CONF.symlink_to(HOME / "slurm.conf")


def nodes() -> list[str]:
    return [node for pool in POOLS.values() for node in pool]


def slurm_conf() -> str:
    host, (control, *ports) = socket.gethostname(), free_ports(1 + len(nodes()))
    lines = [
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={control}",
        f"AuthInfo=socket={HOME}/munge.socket",
        f"StateSaveLocation={HOME}/state",
        f"SlurmdSpoolDir={HOME}/spool/%n",
        f"SlurmctldPidFile={HOME}/pid/slurmctld",
        f"SlurmdPidFile={HOME}/pid/slurmd-%n",
        f"SlurmctldLogFile={HOME}/log/slurmctld",
        f"SlurmdLogFile={HOME}/log/slurmd-%n",
    ]
    for node, port in zip(nodes(), ports, strict=True):
        place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
        lines.append(f"NodeName={node} {place} CPUs=8 RealMemory=20000 Gres=gpu:{NUM_GPUS}")
    for pool, members in POOLS.items():
        lines.append(f"PartitionName={pool} Nodes={','.join(members)} MaxTime=60")
    return SETTINGS + "\n".join(lines) + "\n"


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def start() -> None:
    """Start the daemons; each goes to the background by itself and writes its pid file."""
    munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "pid/munged"}
    munge |= {"log-file": "log/munged", "seed-file": "munge.seed"}
    run("munged", "--force", *(f"--{name}={HOME}/{path}" for name, path in munge.items()))
    run("slurmctld", "-i", "-f", str(HOME / "slurm.conf"))
    for node in nodes():
        run("slurmd", "-N", node, "-f", str(HOME / "slurm.conf"))  # gres.conf lies beside it
    deadline = time.monotonic() + START_S
    while not are_idle():
        assert time.monotonic() < deadline, run("sinfo", "-N", "-o", "%N %T %E")
        time.sleep(0.2)


def are_idle() -> bool:
    """Whether all nodes are there and idle; not while SLURM does not answer."""
    done = subprocess.run(["sinfo", "-hN", "-o", "%T"], capture_output=True, text=True)
    return done.stdout.split() == ["idle"] * len(nodes())


def run(*command: str, **more) -> str:
    """What a command prints; its error is the test's."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, text=True, **both, **more)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}"
    return done.stdout


def take_down() -> None:
    """Cancel what runs, stop the daemons by their pid files, and remove all that is ours."""
    if is_running(HOME / "pid" / "slurmctld"):
        run("scancel", "--quiet", "--user", "root")
        deadline = time.monotonic() + 20
        while run("squeue", "-h", "-t", "R,CG") and time.monotonic() < deadline:
            time.sleep(0.2)
    for prefix in ("slurmd-", "slurmctld", "munged"):
        for pid_file in (HOME / "pid").glob(f"{prefix}*"):
            stop(pid_file)
    if is_own(CONF):
        CONF.unlink()
    shutil.rmtree(HOME, ignore_errors=True)


def is_running(pid_file: Path) -> bool:
    """Whether the daemon that wrote the file is there: its number may be another's by now."""
    try:
        pid, program = int(pid_file.read_text()), pid_file.name.partition("-")[0]
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return False
    return name == program and rest.split()[0] != "Z"


def stop(pid_file: Path) -> None:
    for number, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
        deadline = time.monotonic() + patience_s
        if is_running(pid_file):
            os.kill(int(pid_file.read_text()), number)
        while is_running(pid_file) and time.monotonic() < deadline:
            time.sleep(0.05)
