"""Which backend attends here."""

from collections.abc import Callable
from typing import Literal

from rl.errors import MeshdialError
from rl.models.spec import ModelSpec
from rl.rollout.attention import cpu, pallas
from rl.rollout.attention.backends import Backend, Gathering, InPlace
from rl.sharding import current

Name = Literal["auto", "xla", "cpu", "pallas"]


def choose_backend(
    name: Name,
    spec: ModelSpec,
    page_size: int,
    progress: Callable[[str], None] = lambda line: None,
) -> Backend:
    """The backend `name`; of auto the fastest that works for the model on the current mesh.

    `progress` is told when a kernel is compiled. Raises MeshdialError where the one that is asked
    for does not work, and says why.
    """
    platform = current().devices.flat[0].platform
    if name == "auto":
        name = "cpu" if platform == "cpu" else "pallas"
        reason = _why_not(name, spec, page_size, platform, progress)
        name = "xla" if reason else name
    elif name != "xla":
        reason = _why_not(name, spec, page_size, platform, progress)
        if reason:
            raise MeshdialError(f"the rollout backend {name} does not work here: {reason}")
    return _BACKENDS[name]


_BACKENDS = {
    "xla": Gathering(),
    "cpu": InPlace("cpu", cpu.append_and_attend),
    "pallas": InPlace("pallas", pallas.append_and_attend, pallas),
}


def _why_not(name: Name, spec: ModelSpec, page_size: int, platform: str, progress) -> str | None:
    if name == "pallas":
        return pallas.supports(spec, page_size, platform)
    if platform != "cpu" or current().size > 1:
        return f"it attends on one CPU device, and the mesh has {current().size} {platform} devices"
    if spec.dtype != "float32":
        return f"it computes in float32, and the model's dtype is {spec.dtype}"
    if spec.config.head_dim % 8:
        return f"it wants a multiple of 8 as head_dim, and the model's is {spec.config.head_dim}"
    return cpu.why_not(progress)
