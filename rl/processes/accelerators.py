"""Which devices a process sees, and what JAX is told before it is imported.

The meshes of a dial lie end to end on a machine: a process sees the devices of its own meshes, in
their order, and no others. Standard library only.
"""

import hashlib
import os
import re
import sys
from collections.abc import Sequence

from rl.errors import MeshdialError
from rl.processes import slurm
from rl.processes.runtime import Layout

GPU_PLATFORMS = ("gpu", "cuda", "rocm")
MAX_CPU_DEVICES = 64  # of a process: a processor that counts as more takes minutes for nothing


def device_names(layouts: Sequence[Layout], launcher: str) -> list[str]:
    """The devices of a process of these meshes, named so that on one machine a name means one.

    Inside a SLURM job the devices are the job's own, and so are their names: each job counts its
    CPU devices from 0, and where it sees its GPUs as 0, 1, ... SLURM may know their real numbers.
    """
    prefix = f"{slurm.place()}-" if slurm.job() else ""
    platform = _platform()
    if platform == "tpu":
        _require_all_tpus(layouts)
        return ["tpu"]
    if platform != "gpu":
        numbers = [layout.first + n for layout in layouts for n in range(layout.num_devices)]
        return [f"{platform}-{prefix}{number}" for number in numbers]
    visible, real = _visible_gpus(), slurm.gpu_numbers()
    if visible and len(real) == len(visible):
        names = dict(zip(visible, real, strict=True))
    else:
        names = {word: prefix + re.sub(r"[^\w.-]", "_", word) for word in visible or []}
    return [f"gpu-{names.get(word, prefix + word)}" for word in own_gpus(layouts, launcher)]


def own_gpus(layouts: Sequence[Layout], launcher: str, num_processes: int = 1) -> list[str]:
    """What CUDA_VISIBLE_DEVICES has to be in a process of these meshes, or in this one of the
    `num_processes` of one mesh; MeshdialError if there are too few.

    Where a SLURM job or step was made for this mesh alone, and shows just as many as it wants, they
    are its own, whatever number its first device has on a machine that holds the whole dial. In a
    job that holds several meshes they lie end to end, as anywhere else.
    """
    visible, wanted = _visible_gpus(), _num_devices(layouts, num_processes)
    is_own = slurm.is_for_one_mesh(launcher) or (num_processes > 1 and slurm.is_in_step())
    if is_own and visible is not None and len(visible) == wanted:
        return visible
    if num_processes > 1:
        start = slurm.number_on_node() * wanted
        numbers = list(range(start, start + wanted))
    else:
        numbers = [layout.first + n for layout in layouts for n in range(layout.num_devices)]
    if visible is None:  # they cannot be counted here, so JAX will say if one is missing
        return [str(number) for number in numbers]
    last, count = max(numbers, default=-1), len(visible)
    if last >= count:
        raise MeshdialError(
            f"mesh {' and '.join(layout.name for layout in layouts)} wants {len(numbers)} GPUs, up"
            f" to number {last} of this machine counted from 0, and {count} are visible"
        )
    return [visible[number] for number in numbers]


def _num_devices(layouts: Sequence[Layout], num_processes: int) -> int:
    """Of one process."""
    total = sum(layout.num_devices for layout in layouts)
    if total % num_processes:
        raise MeshdialError(
            f"mesh {layouts[0].name} has {total} devices, which {num_processes} processes cannot"
            " share evenly"
        )
    return total // num_processes


def _platform() -> str:
    """`gpu`, `tpu`, `cpu` or another that JAX is told to use."""
    asked = os.environ.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
    if asked in GPU_PLATFORMS or (not asked and _gpu_numbers()):
        return "cpu" if _visible_gpus() == [] else "gpu"
    return asked or ("tpu" if os.path.exists("/dev/accel0") else "cpu")


def _gpu_numbers() -> list[int]:
    matches = (re.fullmatch(r"nvidia(\d+)", name) for name in os.listdir("/dev"))
    return sorted(int(match[1]) for match in matches if match)


def _visible_gpus() -> list[str] | None:
    """The words of CUDA_VISIBLE_DEVICES up to the first that is no device, as CUDA reads it; all
    GPUs where it is unset; None where they cannot be counted."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return [str(number) for number in _gpu_numbers()] or None
    words = [word.strip() for word in text.split(",")]
    ends = (place for place, word in enumerate(words) if word in ("", "-1"))
    return words[: next(ends, len(words))]


def _require_all_tpus(layouts: Sequence[Layout]) -> None:
    if any(layout.first for layout in layouts[:1]):
        raise MeshdialError(
            f"mesh {layouts[0].name} is a part of this machine's TPU, which cannot be split between"
            " processes here; use the launcher shared, where one process holds all meshes"
        )


def configure_jax(
    layouts: Sequence[Layout] = (), launcher: str = "cold", num_processes: int = 1
) -> None:
    """Settings of a process of these meshes, or of one of the `num_processes` that share a mesh,
    made before JAX is imported; what the user has set stays.

    Compiled programs are kept in $XDG_CACHE_HOME or ~/.cache, meshdial/xla, in a folder for each
    kind of processor, since a program compiled for one may not run on another. MeshdialError if
    there are too few devices.
    """
    if "jax" in sys.modules:
        raise RuntimeError("configure_jax must be called before jax is imported")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = os.path.join(base, "meshdial", "xla", _processor_key())
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    # Which would take SIGTERM for itself, and let a process go on that was told to end.
    os.environ.setdefault("JAX_ENABLE_PREEMPTION_SERVICE", "false")
    if any(layout.is_host for layout in layouts):
        os.environ["JAX_PLATFORMS"] = "cpu"
    elif layouts and _platform() == "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own_gpus(layouts, launcher, num_processes))
    elif layouts and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        wanted = _num_devices(layouts, num_processes)
        if wanted > MAX_CPU_DEVICES:
            raise MeshdialError(
                f"mesh {' and '.join(layout.name for layout in layouts)} wants {wanted} devices in"
                f" a process without accelerators, expected at most {MAX_CPU_DEVICES}"
            )
        if wanted > 1:
            os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(wanted))


def _processor_key() -> str:
    """Eight letters for the kind of processor: its architecture and instruction sets."""
    facts = {os.uname().machine}
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            facts |= {line.strip() for line in lines if line.startswith(("flags", "Features"))}
    return hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()[:8]
