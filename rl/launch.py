"""Running one stage in this process, for the resident worker and for the cold launcher."""

import gc
import importlib
import os
import traceback

from rl import liveness, runtime
from rl.context import Context
from rl.errors import ClientGone, MeshdialError


def run_stage(request: dict, context: Context) -> dict:
    """Run a stage and say how it went: `{"event": "done"}`, or `failed` with its `message`.

    `traceback` is there for errors that are not the user's. ClientGone propagates. Memory is
    emptied after any failure: a stage that broke off may have left half an update in it.
    """
    try:
        import_stages().run(request, context)
    except MeshdialError as error:
        reply = {"event": "failed", "message": str(error)}
    except ClientGone:
        context.memory.clear()
        raise
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


def run_cold(request: dict, show) -> dict:
    """Run a stage in this process; it ends on a signal, or when the workflow has ended."""
    liveness.exit_cleanly_on_signals(request["parent"])
    runtime.configure_jax(runtime.parse_layout(request["layout"]))
    context = Context({}, show, liveness.watch(request["parent"]))
    return run_stage(request, context)
