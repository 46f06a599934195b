"""Stands in for rl.stages where only the order of stages matters: they take a time that is set
in the environment, write something under the names of their outputs, and say that they ran."""

import json
import os
import time
from pathlib import Path

FOLDERS = ("model", "policy", "weights")


def run(request, context):
    started = time.time()
    seconds = json.loads(os.environ.get("STAGE_SECONDS", "{}"))
    time.sleep(seconds.get(request["stage"], 0.0))
    for name, path in request["outputs"].items():
        if name in FOLDERS:
            Path(path).mkdir(parents=True)
        else:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text("{}")
    found = {"started": started, "seconds": time.time() - started, "mesh": request["mesh"]}
    Path(request["timings"]).write_text(json.dumps(found))
    with open("ran.txt", "a") as file:
        file.write(f"{request['iteration']} {request['stage']}\n")
