"""Stands in for rl.stages in the tests of the worker: a stage is a list of orders in its config."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

from rl import group
from rl.errors import ClientGone, MeshdialError


def run(request, context):
    for order, value in request["config"].get("orders", []):
        ORDERS[order](value, request, context)


def note(text, request, context):
    with open("notes.txt", "a") as file:
        file.write(f"{os.getpid()} {text}\n")


def wait_for(path, request, context):
    """Work until `path` exists, looking now and then whether anybody still wants it."""
    while not Path(path).exists():
        context.check_alive()
        time.sleep(0.02)


def ignore_all(path, request, context):
    while not Path(path).exists():
        time.sleep(0.02)


def publish(text, request, context):
    context.check_alive()
    Path(request["outputs"]["out"]).write_text(text)


def remember(key, request, context):
    context.memory[key] = context.memory.get(key, 0) + 1
    context.progress(f"{key} {context.memory[key]}")


def refuse(text, request, context):
    raise MeshdialError(text)


def give_up(text, request, context):
    raise ClientGone(text)


def fail(text, request, context):
    raise ValueError(text)


def abort(text, request, context):
    print(text, file=sys.stderr, flush=True)
    os.abort()


def clean_up(path, request, context):
    try:
        time.sleep(60)
    finally:
        Path(path).write_text("cleaned up")


def say(text, request, context):
    context.progress(text)


def print_out(text, request, context):
    print(text)


def environment(name, request, context):
    context.progress(f"{name}={os.environ.get(name)}")


def alone(seconds, request, context):
    """Tell of any other stage that runs at the same time."""
    with open("alone.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("overlap", request, context)
        time.sleep(seconds)


def start_child(name, request, context):
    """A child that outlives the worker and keeps every file that it can inherit."""
    child = subprocess.Popen([name, "60"], stdout=-3, stderr=-3, close_fds=False)
    note(child.pid, request, context)


def count_devices(text, request, context):
    import jax

    number = len(jax.local_devices())
    context.progress(f"{len(jax.devices())} devices, {number} of this process")


def meet(text, request, context):
    group.gather(text)


def leave(code, request, context):
    sys.exit(code)


ORDERS = {
    name: function
    for name, function in list(globals().items())
    if callable(function) and name not in ("run", "Path", "ClientGone", "MeshdialError")
}
