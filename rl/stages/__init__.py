"""The stages: one function a rule, from input paths and a slice of config to output paths.

1. A request names a stage, its slice of the config, its input and output paths.
2. `run` imports the stage's module and calls the function of that name.
3. The function reads its inputs, asks `rl.sync` for weights, and publishes its outputs whole.
4. `run` writes what the stage cost beside them, and says one line of what came of it.

A request is a function of its inputs: what the process remembers only makes it faster.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import platform
import resource
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from rl import __version__
from rl.artifacts import Publisher, write_json
from rl.compiling import compiled
from rl.context import Context
from rl.errors import MeshdialError
from rl.processes.runtime import parse_process_layout
from rl.sharding import device_mesh, on
from rl.stages.request import Request

MODULES = {
    "rl.stages.base": ("init_policy", "init_value_model", "warm_start"),
    "rl.stages.policy": ("start_policy", "sync_weights"),
    "rl.stages.experience": ("prepare_prompts", "generate_rollouts", "score_rewards"),
    "rl.stages.reward_models": ("score_with_models",),
    "rl.stages.scoring": ("reference_logprobs", "policy_logprobs"),
    "rl.stages.critic": ("start_critic", "critic_values", "update_critic"),
    "rl.stages.advantages": ("estimate_advantages",),
    "rl.stages.learning": ("update_actor",),
    "rl.stages.checking": ("check_iteration",),
    "rl.stages.evaluation": ("evaluate_policy",),
    "rl.stages.reporting": ("report_run", "compare_runs"),
}

MENTIONED_SECONDS = 1.0
"""Of compiling: from so many on a stage says so in its line."""


def run(request: Mapping[str, Any], context: Context) -> None:
    """Run one stage; MeshdialError for bad input, ClientGone if nobody waits for it any more."""
    job = Request.from_json(request)
    module = next((name for name, stages in MODULES.items() if job.stage in stages), None)
    if module is None:
        known = ", ".join(stage for stages in MODULES.values() for stage in stages)
        raise MeshdialError(f"there is no such stage, expected one of {known}")
    function = getattr(importlib.import_module(module), job.stage)
    started = time.time()
    clock, cpu_clock, programs = time.perf_counter(), time.process_time(), compiled()
    with _mesh_of(request):
        said = function(job, context)
    seconds, programs = time.perf_counter() - clock, compiled() - programs
    cost = {
        "started": started,
        "mesh": request.get("mesh", ""),
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu_clock,
        "compile_seconds": programs.seconds,
        "programs_compiled": programs.num_programs,
        "peak_memory_bytes": peak_memory_bytes(),
        **job.costs_found,
        "host": socket.gethostname(),
        "versions": versions(),
    }
    if job.timings is not None:
        write_json(Publisher(context.check_alive), job.timings, cost)
    if programs.seconds > MENTIONED_SECONDS:
        said += f" (compiling took {programs.seconds:.1f} s)"
    context.progress(progress_line(job, seconds, said))


def _mesh_of(request: Mapping[str, Any]) -> contextlib.AbstractContextManager:
    """The mesh that the request names; the first device where it names none."""
    if "layout" not in request:
        return contextlib.nullcontext()
    layouts = parse_process_layout(request["layout"])
    return on(device_mesh(layouts, request.get("mesh") or layouts[0].name))


def progress_line(job: Request, seconds: float, said: str) -> str:
    """`addition 3/12  update_actor  3.2 s  loss ...`: where the run is, and the key figure."""
    iteration = f" {job.iteration}/{job.last}" if job.last else ""
    place = f"{job.run}{iteration}" if job.run else "shared"
    return f"{place:<20} {job.stage:<19} {seconds:6.1f} s  {said}"


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@functools.cache
def versions() -> dict[str, str]:
    """Of Python and of the packages that decide a result."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "meshdial": __version__, **found}
