"""The command of a stage: ask the resident worker for it, or run it here.

1. Arguments become a request: the stage, its slice of config, the paths of its inputs and outputs.
2. Warm: connect to the worker of this results folder (the current directory) and device layout;
   whoever finds none, and gets its lock, starts one.
3. Print the lines that the worker sends, until it says how the stage went.
4. Cold: import the stages and run the same request in this process.

It imports only what it needs, since every stage of every run pays for its start.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

from rl import liveness, runtime
from rl.errors import ClientGone, MeshdialError
from rl.runtime import Place
from rl.wire import Channel, connect

MAX_LOST_WORKERS = 20
TAIL_LINES = 20
TAIL_BYTES = 8000
MAX_LOG_BYTES = 4_000_000


def main(arguments: list[str] | None = None) -> int:
    """Run the stage that the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rl.client", description="Run one stage.")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of a stage."""
    parser.add_argument("stage", help="which stage, for example generate_rollouts")
    parser.add_argument(
        "--launcher",
        choices=("warm", "cold"),
        default="warm",
        help="warm: in the resident worker of this folder and layout; cold: in this process",
    )
    parser.add_argument("--mesh", default="all:devices=1", help="the device layout")
    parser.add_argument("--config", default="{}", help="the stage's slice of the config, JSON")
    parser.add_argument("--run", default="", help="the name of the run")
    parser.add_argument("--iteration", type=int, default=0)
    parser.add_argument("--last", type=int, default=0, help="the run's last iteration, to show")
    for name, metavar in (("input", "NAME=PATH"), ("output", "NAME=PATH"), ("cost", "NAME=NUMBER")):
        parser.add_argument(f"--{name}", nargs="+", action="extend", default=[], metavar=metavar)
    parser.add_argument("--timings", help="where to write what the stage cost, JSON")
    parser.add_argument("--log", help="where to write its lines, and the traceback of an error")


def run(arguments: argparse.Namespace) -> int:
    """Run one stage; prints its lines, and one sentence if it fails."""
    stage, log = arguments.stage, StageLog(arguments.log)
    try:
        request = make_request(arguments)
        reply = run_here(request, log) if arguments.launcher == "cold" else run_warm(request, log)
    except (MeshdialError, ClientGone) as error:
        reply = {"event": "failed", "message": str(error)}
    if reply["event"] == "done":
        return 0
    message = f"{stage}: {reply['message']}"
    if reply.get("traceback"):
        log.write(reply["traceback"])
        message += f" (full traceback in {log.path})" if log.path else "\n" + reply["traceback"]
    log.write(message)
    print(message, file=sys.stderr, flush=True)
    return 1


def make_request(arguments: argparse.Namespace) -> dict:
    """What a worker is sent. Paths are as given, relative to `cwd`."""
    runtime.parse_layout(arguments.mesh)
    return {
        "op": "run",
        "stage": arguments.stage,
        "config": _json(arguments.config),
        "run": arguments.run,
        "iteration": arguments.iteration,
        "last": arguments.last,
        "inputs": _pairs("input", arguments.input),
        "outputs": _pairs("output", arguments.output),
        "cost": {
            name: _number(name, text) for name, text in _pairs("cost", arguments.cost).items()
        },
        "timings": arguments.timings,
        "log": arguments.log,
        "cwd": os.path.realpath(os.getcwd()),
        "layout": arguments.mesh,
        "fingerprint": runtime.fingerprint(arguments.mesh),
        "client": liveness.identify(os.getpid()),
        "parent": liveness.find_workflow(),
    }


def _json(text: str) -> dict:
    try:
        return json.loads(text)
    except ValueError as error:
        raise MeshdialError(f"--config is not JSON: {error}") from None


def _pairs(option: str, words: list[str]) -> dict[str, str]:
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals) or name in pairs:
            expected = "each name once" if name in pairs else "NAME=VALUE"
            raise MeshdialError(f"--{option} {word!r}, expected {expected}")
        pairs[name] = value
    return pairs


def _number(name: str, text: str) -> int | float:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise MeshdialError(f"--cost {name}={text}, expected a number") from None


class StageLog:
    """Shows a stage's lines and keeps them in its log file, where it has one."""

    def __init__(self, path: str | None):
        self.path = path
        if path:
            self._write("w", "")

    def show(self, line: str) -> None:
        self.write(line)
        print(line, flush=True)

    def write(self, text: str) -> None:
        if self.path:
            self._write("a", text.rstrip("\n") + "\n")

    def _write(self, mode: str, text: str) -> None:
        """A log that cannot be written, on a full disk say, is no reason to fail."""
        try:
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            with open(self.path, mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            print(f"{self.path} was not written: {error.strerror}", file=sys.stderr, flush=True)
            self.path = None


def run_here(request: dict, log: StageLog) -> dict:
    """The cold launcher."""
    from rl.launch import run_cold

    return run_cold(request, log.show)


def run_warm(request: dict, log: StageLog) -> dict:
    """The worker's last word on this request: `done` or `failed`.

    A worker that leaves before it took up the request is followed by another; one that dies while
    it runs the stage is an error, since the stage may be why.
    """
    liveness.exit_at_once_on_signals()
    check = liveness.watch(request["parent"])
    place = runtime.place_of(request["cwd"], request["layout"])
    for _ in range(MAX_LOST_WORKERS):
        channel = reach_worker(place, request["fingerprint"], check)
        reply = converse(channel, request, log, check) if channel.send(request) else None
        channel.close()
        if reply is not None:
            return reply
    raise MeshdialError(
        f"{MAX_LOST_WORKERS} workers ended before they took up this stage\n" + log_tail(place, 0)
    )


def converse(
    channel: Channel, request: dict, log: StageLog, check: Callable[[], None]
) -> dict | None:
    """Follow one request to its end; None if it has to be sent again, to another worker."""
    wait_s, started = runtime.seconds("MESHDIAL_WORKER_START_S"), None
    while True:
        try:
            message = channel.receive(wait_s, check)
        except TimeoutError:
            raise MeshdialError(f"the worker did not answer for {wait_s:.0f} s") from None
        if message is None:
            check()
            place = runtime.place_of(request["cwd"], request["layout"])
            return started and {"event": "failed", "message": obituary(place, started)}
        wait_s = None
        if message["event"] == "progress":
            log.show(message["line"])
        elif message["event"] == "started":
            started = message
        elif message["event"] == "retiring":
            log.show(f"the worker leaves ({message['reason']}); asking another")
            return None
        elif message["event"] in ("done", "failed"):
            return message


def obituary(place: Place, started: dict) -> str:
    return (
        f"the worker (process {started['pid']}) died while it ran this stage;"
        " the next stage starts another\n" + log_tail(place, started["log_size"])
    )


def log_tail(place: Place, offset: int) -> str:
    """The last lines of a worker's log, from `offset` bytes on."""
    lines = []
    if os.path.exists(place.log):
        with open(place.log, "rb") as file:
            file.seek(max(offset, os.path.getsize(place.log) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    if not lines:
        return f"it left nothing in {place.log}, as when the kernel kills it for want of memory"
    return "\n".join([f"last lines of {place.log}:", *(f"  {line}" for line in lines)])


def reach_worker(place: Place, fingerprint: str, check: Callable[[], None]) -> Channel:
    """A channel to the worker of `place`, which is started here if nobody else starts one."""
    deadline = time.monotonic() + runtime.seconds("MESHDIAL_WORKER_START_S")
    process = None
    while (channel := connect(place.socket)) is None:
        check()
        if process is not None and process.poll() is not None:
            if process.returncode != 0:
                status, tail = process.returncode, log_tail(place, 0)
                raise MeshdialError(f"the worker ended as it started (exit {status})\n{tail}")
            process = None  # another client has sent it away already
        if process is None and (lock := runtime.take_lock(place.lock)) is not None:
            process = start_worker(place, lock, fingerprint)
            os.close(lock)  # the worker holds it now
        if time.monotonic() > deadline:
            raise MeshdialError(
                f"the worker of {place.root} does not answer; end the process that holds"
                f" {place.lock} ({runtime.read_holder(place.lock)})"
            )
        time.sleep(0.02)
    return channel


def start_worker(place: Place, lock: int, fingerprint: str):
    """Start a worker that inherits `lock`, this environment, and nothing else of this process."""
    import subprocess

    environment = dict(os.environ)
    environment.pop("MESHDIAL_PARENT_PID", None)
    own_code = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = [own_code, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-u", "-P", "-m", "rl.worker", "--lock", str(lock)]
    command += ["--mesh", place.layout, "--fingerprint", fingerprint]
    if os.path.exists(place.log) and os.path.getsize(place.log) > MAX_LOG_BYTES:
        os.replace(place.log, place.log + ".old")
    with open(place.log, "ab") as log:
        return subprocess.Popen(
            command,
            cwd=place.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
        )


if __name__ == "__main__":
    sys.exit(main())
