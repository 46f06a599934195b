"""Where processes of one machine meet: the private runtime folder, its names, its locks.

Standard library only, and light: the client of every stage imports this.

For each pair of a results folder (the current directory) and a device layout, the runtime folder
holds a socket, a lock and a log. Whoever holds the lock may start a worker and hands the lock to
it, open, so that there is no moment in which a second worker could start. For each device it holds
one more lock, which a worker keeps for life. The kernel frees them all when their holder dies.
"""

import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import stat
import sys
from typing import NamedTuple

from rl.errors import MeshdialError
from rl.mesh import HOST

MAX_SOCKET_PATH = 103  # bytes; macOS allows 103, Linux 107
AXES = ("data", "fsdp", "tensor")
LAYOUT_FORM = "NAME:devices=N[,first=K][,data=D][,fsdp=F][,tensor=T]"
STAGES_MODULE = "MESHDIAL_STAGES_MODULE"  # another module than rl.stages, for tests of the worker
LAUNCHERS = ("warm", "shared", "cold", "pool")
DEFAULT_SECONDS = {
    "MESHDIAL_WORKER_START_S": 60.0,  # how long a client waits for a worker to answer at all
    "MESHDIAL_WORKER_IDLE_S": 600.0,  # a worker without requests ends after this
    "MESHDIAL_WORKER_LINGER_S": 2.0,  # a worker whose workflows have all ended ends after this
    "MESHDIAL_WORKER_YIELD_S": 20.0,  # idle for this, a worker leaves its device to one that waits
    "MESHDIAL_WORKER_GRACE_S": 30.0,  # a stage whose client has died is cut off after this
}


class Layout(NamedTuple):
    """A mesh: its name, its number of devices, the number of the first on its machine, and the
    sizes of all its axes. The host's has no device: it runs stages that need no accelerator."""

    name: str
    num_devices: int
    first: int
    axes: tuple[tuple[str, int], ...]

    @property
    def is_host(self) -> bool:
        return self.num_devices == 0


class Place(NamedTuple):
    """What belongs to one results folder and one layout; `endpoint` is the file that says where
    the worker of a SLURM allocation listens, empty for one that needs none."""

    root: str
    layout: str
    socket: str
    lock: str
    log: str
    endpoint: str = ""


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
    """`NAME:devices=N[,first=K][,data=D][,fsdp=F][,tensor=T]`, for example `all:devices=1` or
    `decode:devices=2,first=4,tensor=2`; `host:devices=0` is the host.

    Devices without axes are all on `fsdp`. MeshdialError if the axes do not multiply to N.
    """
    name, _, words = text.partition(":")
    sizes = dict(re.findall(r"(\w+)=(0|[1-9]\d*)(?:,|$)", words))
    is_known = sizes.keys() <= {"devices", "first", *AXES}
    canonical = ",".join(f"{key}={size}" for key, size in sizes.items())
    if not (re.fullmatch(r"[A-Za-z0-9_.-]+", name) and is_known and canonical == words):
        raise MeshdialError(f"layout {text!r}, expected {LAYOUT_FORM}")
    if "devices" not in sizes or (sizes["devices"] == "0") != (text == HOST):
        raise MeshdialError(f"layout {text!r}, expected {LAYOUT_FORM}")
    num_devices, first = int(sizes["devices"]), int(sizes.get("first", 0))
    has_axes = any(axis in sizes for axis in AXES)
    rest = {} if has_axes or not num_devices else {"fsdp": num_devices}
    axes = {axis: int(sizes.get(axis, rest.get(axis, 1))) for axis in AXES}
    if num_devices and math.prod(axes.values()) != num_devices:
        product = math.prod(axes.values())
        raise MeshdialError(f"layout {text!r} has axes for {product} devices, not {num_devices}")
    return Layout(name, num_devices, first, tuple(axes.items()))


def parse_process_layout(text: str) -> tuple[Layout, ...]:
    """The meshes of one process, joined by `+`; MeshdialError if two share a name or a device."""
    layouts = tuple(parse_layout(word) for word in text.split("+"))
    if len({layout.name for layout in layouts}) < len(layouts):
        raise MeshdialError(f"layout {text!r} has a mesh twice")
    ranges = sorted((layout.first, layout.first + layout.num_devices) for layout in layouts)
    if any(end > start for (_, end), (start, _) in itertools.pairwise(ranges)):
        raise MeshdialError(f"layout {text!r} has a device in two meshes")
    if len(layouts) > 1 and any(layout.is_host for layout in layouts):
        raise MeshdialError(f"layout {text!r}, expected {HOST} to stand alone")
    return layouts


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
    require_private(folder, "folder", 0o700)
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


def require_private(path: str, kind: str, mode: int) -> None:
    """MeshdialError unless `path` is a folder or file (`kind`) of this user that nobody else can
    read, write or enter; a link is neither."""
    found = os.lstat(path)
    is_kind = stat.S_ISDIR(found.st_mode) if kind == "folder" else stat.S_ISREG(found.st_mode)
    if not is_kind:
        raise MeshdialError(f"{path} is not a {kind}")
    if found.st_uid != os.getuid():
        raise MeshdialError(f"{kind} {path} belongs to user {found.st_uid}, not to you")
    if found.st_mode & 0o077:
        raise MeshdialError(
            f"{kind} {path} has mode {stat.S_IMODE(found.st_mode):04o}, expected {mode:04o}:"
            f" `chmod {mode:o}` it"
        )


def _socket_path(folder: str, key: str) -> str:
    return os.path.join(folder, f"{key}.sock")


def place_of(root: str, layout: str, *more: str) -> Place:
    """The names of the worker of `root` (a results folder) and `layout` on this machine; `more`
    tells apart what these two do not."""
    root = os.path.realpath(root)
    words = "\0".join([os.uname().nodename, root, layout, *more])
    key = hashlib.sha256(words.encode()).hexdigest()[:16]
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


def device_lock(name: str) -> str:
    """The lock file of a device of this machine, for example of `gpu-2`."""
    return os.path.join(runtime_dir(), f"device-{os.uname().nodename}-{name}.lock")


def fingerprint(layout: str) -> str:
    """Differs when a worker must not serve a client: other code, layout, Python or JAX settings."""
    parts = [layout, sys.executable, sys.version, os.environ.get(STAGES_MODULE, "")]
    parts += sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(("JAX_", "XLA_")) or name in ("CUDA_VISIBLE_DEVICES", "LIBTPU_INIT_ARGS")
    )
    parts += _sources(package_folder())
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:32]


def package_folder() -> str:
    """Where the package's own code lies."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


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
