"""The C++ kernel's library: compiled once for a machine, then loaded from the user's cache.

1. What decides the library (sources, compiler, flags, jaxlib, processor) is hashed.
2. $XDG_CACHE_HOME/meshdial/kernels/HASH, or ~/.cache/..., has it, or it is compiled beside its name
   and renamed. Processes that do so at once each make a whole one.
3. A library is code that runs as this user: the folders `kernels` and HASH are refused where
   others can enter them. Whoever can write to a folder above them is trusted.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jaxlib

from rl.errors import MeshdialError
from rl.processes.runtime import require_private

_SOURCES = ("paged_attention.cc", "bundle_attention.h", "tiles.h", "vector_math.h")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
_COMPILE_S = 300

# What /proc/cpuinfo calls the things that decide which instructions a processor has.
_CPU_KEYS = ("vendor_id", "cpu family", "model", "model name", "flags", "Features")
_CPU_KEYS += ("CPU implementer", "CPU architecture", "CPU variant", "CPU part")


def compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, or the first of c++, g++ and clang++ on the PATH.

    MeshdialError where there is none.
    """
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise MeshdialError(f"$CXX is {os.environ['CXX']!r}, no command: {error}") from None
    for command in [named] if named else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]):
            return command
    wanted = f"$CXX is {shlex.join(named)!r}" if named else ", ".join(_COMPILERS) + " are missing"
    raise MeshdialError(f"there is no C++ compiler: {wanted}")


def load(progress: Callable[[str], None]) -> ctypes.CDLL:
    """The kernel's library, compiled if it has to be, which one line to `progress` announces.

    MeshdialError, saying why, where that is not possible.
    """
    command = compiler()
    flags = [*_FLAGS, *_machine_flags()]
    folder = _private_folder(_key([_identity(command), *flags]))
    library = folder / "paged_attention.so"
    if not _is_whole(library):
        progress(f"compiling the attention kernel with {shlex.join(command)} into {folder}")
        _compile([*command, *flags], library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise MeshdialError(f"the attention kernel cannot be loaded: {error}") from None


def _is_whole(library: Path) -> bool:
    """Whether the library is there as it was compiled: loading a damaged one may kill a process."""
    if not (library.exists() and _sum_of(library).exists()):
        return False
    require_private(str(library), "file", 0o700)
    return _sum_of(library).read_bytes() == _digest(library)


def _sum_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(library: Path) -> bytes:
    return hashlib.sha256(library.read_bytes()).hexdigest().encode()


def _compile(command: list[str], library: Path) -> None:
    """Compile beside `library` and rename, its checksum after it."""
    source = Path(__file__).parent / _SOURCES[0]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        target = Path(folder) / library.name
        line = [*command, f"-I{jax.ffi.include_dir()}", str(source), "-o", str(target)]
        try:
            done = subprocess.run(
                line, capture_output=True, text=True, errors="replace", timeout=_COMPILE_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MeshdialError(f"the attention kernel does not compile: {error}") from None
        if done.returncode or not target.exists():
            said = _first_error(done.stderr) or f"{command[0]} ended with {done.returncode}"
            raise MeshdialError(f"the attention kernel does not compile: {said}")
        target.chmod(0o700)
        with open(target, "rb") as file:
            os.fsync(file.fileno())
        checksum = _sum_of(target)
        checksum.write_bytes(_digest(target))
        os.replace(target, library)
        os.replace(checksum, _sum_of(library))


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


def _private_folder(key: str) -> Path:
    """The folder of one library, made with mode 0700; MeshdialError if others can enter it."""
    # Without a home folder that is a folder named ~ here, as for other caches.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    kernels = Path(os.path.abspath(cache)) / "meshdial" / "kernels"
    for folder in (kernels, kernels / key):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise MeshdialError(f"the kernels' folder {folder} cannot be made: {error}") from None
        require_private(str(folder), "folder", 0o700)
    return kernels / key


def _key(words: list[str]) -> str:
    sources = [(Path(__file__).parent / name).read_text() for name in _SOURCES]
    everything = [jaxlib.__version__, *_processor(), *words, *sources]
    return hashlib.sha256("\0".join(everything).encode()).hexdigest()[:16]


def _identity(command: list[str]) -> str:
    """What the compiler says it is."""
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MeshdialError(f"the C++ compiler does not run: {error}") from None
    return shlex.join(command) + done.stdout


def _machine_flags() -> list[str]:
    """For the very processor that this process runs on."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return ["-march=native"]
    return ["-mcpu=native"] if machine in ("aarch64", "arm64") else []


@functools.cache
def _processor() -> tuple[str, ...]:
    """What tells processors apart for which code compiled for one need not run on the other."""
    names = {platform.machine(), platform.system(), platform.processor()}
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names |= {line for line in lines if line.partition(":")[0].strip() in _CPU_KEYS}
    return tuple(sorted(names))
