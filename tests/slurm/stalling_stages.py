"""The stages of a run, one of which stalls: once, with its output written but not yet published.

STALLED_STAGE is its name; STALL_MARK is made when it stalls, and a stage whose mark is there does
not stall again. Chosen by MESHDIAL_STAGES_MODULE.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import rl.stages


def run(request: dict, context) -> None:
    mark = Path(os.environ["STALL_MARK"])

    def stall():
        if any(is_drafted(Path(path)) for path in request["outputs"].values()):
            mark.touch()
            time.sleep(600)

    if request["stage"] == os.environ["STALLED_STAGE"] and not mark.exists():
        context = replace(context, check_alive=stall)
    rl.stages.run(request, context)


def is_drafted(target: Path) -> bool:
    return any(target.parent.glob(f".{target.name}.partial-*/{target.name}"))
