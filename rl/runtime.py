"""Where processes of one machine meet: the private runtime folder, its names, its locks.

Standard library only, and light: the client of every stage imports this.

For each pair of a results folder (the current directory) and a device layout, the runtime folder
holds a socket, a lock and a log. Whoever holds the lock may start a worker and hands the lock to
it, open, so that there is no moment in which a second worker could start. For each device it holds
one more lock, which a worker keeps for life. The kernel frees them all when their holder dies.
"""

import fcntl
import hashlib
import json
import os
import re
import stat
import sys
from typing import NamedTuple

from rl.errors import MeshdialError

MAX_SOCKET_PATH = 103  # bytes; macOS allows 103, Linux 107
STAGES_MODULE = "MESHDIAL_STAGES_MODULE"  # another module than rl.stages, for tests of the worker
DEFAULT_SECONDS = {
    "MESHDIAL_WORKER_START_S": 60.0,  # how long a client waits for a worker to answer at all
    "MESHDIAL_WORKER_IDLE_S": 600.0,  # a worker without requests ends after this
    "MESHDIAL_WORKER_LINGER_S": 2.0,  # a worker whose workflows have all ended ends after this
    "MESHDIAL_WORKER_YIELD_S": 20.0,  # idle for this, a worker leaves its device to one that waits
    "MESHDIAL_WORKER_GRACE_S": 30.0,  # a stage whose client has died is cut off after this
}


class Layout(NamedTuple):
    """A mesh: its name, its number of devices, and its axes as (name, size)."""

    name: str
    num_devices: int
    axes: tuple[tuple[str, int], ...]


class Place(NamedTuple):
    """What belongs to one results folder and one layout."""

    root: str
    layout: str
    socket: str
    lock: str
    log: str


def seconds(name: str) -> float:
    """The setting `name` from the environment, or its default; MeshdialError if not a number."""
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else DEFAULT_SECONDS[name]
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise MeshdialError(f"{name} is {text!r}, expected a number of seconds")
    return value


def parse_layout(text: str) -> Layout:
    """`NAME:devices=N[,AXIS=SIZE...]`, for example `all:devices=1` or `train:devices=4,fsdp=4`."""
    match = re.fullmatch(r"([A-Za-z0-9_.-]+):devices=([1-9]\d*)((?:,[a-z_]+=[1-9]\d*)*)", text)
    if match is None:
        raise MeshdialError(f"layout {text!r}, expected NAME:devices=N[,AXIS=SIZE...]")
    pairs = [pair.split("=") for pair in match[3].split(",")[1:]]
    return Layout(match[1], int(match[2]), tuple((axis, int(size)) for axis, size in pairs))


def runtime_dir() -> str:
    """The folder of sockets, locks and logs, made with mode 0700.

    $MESHDIAL_RUNTIME_DIR, else $XDG_RUNTIME_DIR/meshdial, else $TMPDIR/meshdial-UID, else
    /tmp/meshdial-UID; the middle two only where they exist and leave room for a socket's path.
    MeshdialError if others could write to it or read it.
    """
    folder = os.environ.get("MESHDIAL_RUNTIME_DIR") or _usual_folder()
    folder = os.path.abspath(folder)
    length = len(os.fsencode(_socket_path(folder, "0" * 16)))
    if length > MAX_SOCKET_PATH:
        raise MeshdialError(
            f"the socket path below {folder} would have {length} bytes, at most {MAX_SOCKET_PATH}"
            " are possible; set MESHDIAL_RUNTIME_DIR to a folder with a shorter name"
        )
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise MeshdialError(f"runtime folder {folder} cannot be made: {error.strerror}") from None
    _require_private(folder)
    return folder


def _usual_folder() -> str:
    own_name = f"meshdial-{os.getuid()}"
    for variable, name in (("XDG_RUNTIME_DIR", "meshdial"), ("TMPDIR", own_name)):
        base = os.environ.get(variable)
        if base and os.access(base, os.W_OK | os.X_OK):
            folder = os.path.abspath(os.path.join(base, name))
            if len(os.fsencode(_socket_path(folder, "0" * 16))) <= MAX_SOCKET_PATH:
                return folder
    return os.path.join("/tmp", own_name)


def _require_private(folder: str) -> None:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise MeshdialError(f"runtime folder {folder} is not a folder")
    if found.st_uid != os.getuid():
        raise MeshdialError(f"runtime folder {folder} belongs to user {found.st_uid}, not to you")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise MeshdialError(
            f"runtime folder {folder} has mode {mode:04o}, expected 0700: `chmod 700` it"
        )


def _socket_path(folder: str, key: str) -> str:
    return os.path.join(folder, f"{key}.sock")


def place_of(root: str, layout: str) -> Place:
    """The names of the worker of `root` (a results folder) and `layout` on this machine."""
    root = os.path.realpath(root)
    key = hashlib.sha256("\0".join([os.uname().nodename, root, layout]).encode()).hexdigest()[:16]
    folder = runtime_dir()
    base = os.path.join(folder, key)
    return Place(root, layout, _socket_path(folder, key), f"{base}.lock", f"{base}.log")


def take_lock(path: str) -> int | None:
    """A descriptor that holds the lock `path` until closed, or None while another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if is_at(descriptor, path):
        return descriptor
    os.close(descriptor)  # someone removed the file meanwhile: its lock protects nothing
    return None


def is_at(descriptor: int, path: str) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def write_holder(lock: int, holder: dict) -> None:
    """Say in a lock's file who holds it: a hint for those that wait."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(holder).encode(), 0)


def read_holder(path: str) -> dict | None:
    """Who says to hold a lock; None where nothing sensible is written."""
    try:
        with open(path, encoding="utf-8") as file:
            holder = json.load(file)
    except (FileNotFoundError, ValueError):
        return None
    return holder if isinstance(holder, dict) else None


def device_locks() -> list[str]:
    """The lock of every device that JAX would use under this environment, in a fixed order."""
    platform = (os.environ.get("JAX_PLATFORMS") or _likely_platform()).split(",")[0].strip().lower()
    if platform in ("gpu", "cuda", "rocm"):
        names = [f"gpu-{number}" for number in _visible_gpus()] or ["cpu"]
    else:
        names = [platform]
    folder, node = runtime_dir(), os.uname().nodename
    return [os.path.join(folder, f"device-{node}-{name}.lock") for name in names]


def _likely_platform() -> str:
    if _gpu_numbers():
        return "cuda"
    return "tpu" if os.path.exists("/dev/accel0") else "cpu"


def _gpu_numbers() -> list[int]:
    matches = (re.fullmatch(r"nvidia(\d+)", name) for name in os.listdir("/dev"))
    return sorted(int(match[1]) for match in matches if match)


def _visible_gpus() -> list[int]:
    """The numbers in CUDA_VISIBLE_DEVICES; all GPUs where it is unset or names one otherwise."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = [word.strip() for word in (visible or "").split(",")]
    if visible is None or not all(re.fullmatch(r"-?\d*", word) for word in words):
        return _gpu_numbers() or [0]
    return sorted({int(word) for word in words if word.isdecimal()})


def fingerprint(layout: str) -> str:
    """Differs when a worker must not serve a client: other code, layout, Python or JAX settings."""
    parts = [layout, sys.executable, sys.version, os.environ.get(STAGES_MODULE, "")]
    parts += sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(("JAX_", "XLA_")) or name in ("CUDA_VISIBLE_DEVICES", "LIBTPU_INIT_ARGS")
    )
    parts += _sources(os.path.dirname(os.path.abspath(__file__)))
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:32]


def _sources(folder: str) -> list[str]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                found += _sources(entry.path) if entry.name != "__pycache__" else []
            elif entry.name.endswith(".py"):
                facts = entry.stat()
                found.append(f"{entry.path} {facts.st_mtime_ns} {facts.st_size}")
    return sorted(found)


def configure_jax(layout: Layout | None = None) -> None:
    """Settings of a stage process, made before JAX is imported; what the user has set stays.

    Compiled programs are kept in $XDG_CACHE_HOME or ~/.cache, meshdial/xla, in a folder for each
    kind of processor, since a program compiled for one may not run on another. A layout of several
    devices gets as many CPU devices, for runs without an accelerator.
    """
    if "jax" in sys.modules:
        raise RuntimeError("configure_jax must be called before jax is imported")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = os.path.join(base, "meshdial", "xla", _processor_key())
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    flags = os.environ.get("XLA_FLAGS", "")
    if layout and layout.num_devices > 1 and "xla_force_host_platform_device_count" not in flags:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(layout.num_devices))


def _processor_key() -> str:
    """Eight letters for the kind of processor: its architecture and instruction sets."""
    facts = {os.uname().machine}
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            facts |= {line.strip() for line in lines if line.startswith(("flags", "Features"))}
    return hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()[:8]
