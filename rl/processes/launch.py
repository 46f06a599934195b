"""Running one stage in this process, for the resident worker and for the cold launcher."""

import gc
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Callable

from rl import group
from rl.context import Context
from rl.errors import ClientGone, MeshdialError
from rl.processes import accelerators, liveness, runtime, slurm


def run_stage(request: dict, context: Context) -> dict:
    """Run a stage and say how it went: `{"event": "done"}`, or `failed` with its `message`.

    `traceback` is there for errors that are not the user's. Memory is emptied after any failure: a
    stage that broke off may have left half an update in it.
    """
    try:
        import_stages().run(request, context)
    except (MeshdialError, ClientGone) as error:
        reply = {"event": "failed", "message": str(error)}
    except Exception as error:
        last_line = traceback.format_exception_only(error)[-1].strip()
        reply = {"event": "failed", "message": last_line, "traceback": traceback.format_exc()}
    else:
        return {"event": "done"}
    context.memory.clear()
    gc.collect()
    return reply


def import_stages():
    """The module whose `run(request, context)` runs any stage."""
    return importlib.import_module(os.environ.get(runtime.STAGES_MODULE) or "rl.stages")


def spread_over_tasks(request: dict) -> None:
    """Outside of a step of a SLURM job with several tasks: become the `srun` that runs this very
    command in each of them, and ends all if one fails. Elsewhere nothing happens."""
    layouts = runtime.parse_process_layout(request["layout"])
    command = slurm.group_command(sum(layout.num_devices for layout in layouts))
    if command:
        command += shlex.split(os.environ.get(slurm.mesh_options(request["mesh"]), ""))
        os.environ.pop("MESHDIAL_PARENT_PID", None)  # no process of the other nodes
        os.execvp(command[0], [*command, sys.executable, *sys.orig_argv[1:]])


def run_cold(request: dict, show: Callable[[str], None]) -> dict:
    """Run a stage in this process, together with those that were started with it.

    It ends on a signal, or when the workflow has ended. `is_in_group` is true in the answer of one
    of several processes: once one has failed, all have, and none must wait for another as JAX would
    when Python ends.
    """
    liveness.exit_cleanly_on_signals(request["parent"])
    member = group.settings()
    num_processes = member.num_processes if member else 1
    layouts = runtime.parse_process_layout(request["layout"])
    accelerators.configure_jax(layouts, request["launcher"], num_processes)
    group.join()
    group.end_with_first()
    context = Context({}, show, liveness.watch(request["parent"]))
    reply = run_stage(request, context)
    try:
        if reply["event"] == "done":
            group.barrier("end of the stage")
    except MeshdialError as error:
        reply = {"event": "failed", "message": str(error)}
    if reply["event"] == "failed":
        group.fail(reply["message"])
    return {**reply, "is_in_group": num_processes > 1}
