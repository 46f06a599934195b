"""The command of a stage: ask the resident worker for it, or run it here.

1. Arguments become a request: the stage, its slice of config, the paths of its inputs and outputs.
2. Warm, shared, pool: connect to the worker of this results folder (the current directory) and of
   the mesh, or of all meshes; whoever finds none, and gets its lock, starts one.
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

from rl.errors import ClientGone, MeshdialError
from rl.processes import liveness, reach, runtime
from rl.processes.runtime import Place
from rl.processes.wire import Channel

MAX_LOST_WORKERS = 20
FOLLOWER_S = 2.0  # how much longer than the first process its followers wait to complain


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
        choices=runtime.LAUNCHERS,
        default="warm",
        help="warm: in the resident worker of this folder and mesh; shared: in the one worker of"
        " this folder, which holds all meshes; cold: in this process; pool: as warm, where the"
        " worker runs on its part of a SLURM allocation",
    )
    parser.add_argument(
        "--mesh",
        default="all:devices=1",
        metavar="MESH",
        help=f"the mesh of the stage, {runtime.LAYOUT_FORM}; {runtime.HOST} needs no device",
    )
    parser.add_argument(
        "--meshes", metavar="MESH+MESH...", help="all meshes of the run, for the shared launcher"
    )
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
    log, reply = StageLog(None), {}
    try:
        log = log_of(arguments)
        request = make_request(arguments)
        run_request = run_here if arguments.launcher == "cold" else run_in_worker
        reply = run_request(request, log)
    except (MeshdialError, ClientGone) as error:
        reply = {"event": "failed", "message": str(error)}
    if reply["event"] == "done":
        return 0
    log.complain(arguments.stage, reply)
    if reply.get("is_in_group"):
        from rl import group

        group.leave()
        os._exit(1)  # JAX would first wait for the others, which may wait for this one
    return 1


def make_request(arguments: argparse.Namespace) -> dict:
    """What a worker is sent. Paths are as given, relative to `cwd`."""
    layout, mesh = choose_layout(arguments.launcher, arguments.mesh, arguments.meshes)
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
        "launcher": arguments.launcher,
        "cwd": os.path.realpath(os.getcwd()),
        "layout": layout,
        "mesh": mesh,
        "fingerprint": runtime.fingerprint(layout),
        "client": liveness.identify(os.getpid()),
        "parent": liveness.find_workflow(),
    }


def choose_layout(launcher: str, mesh: str, meshes: str | None) -> tuple[str, str]:
    """The layout of the process that runs a stage, and the name of the stage's mesh within it.

    The one process of the shared launcher runs the stages of the host too.
    """
    stage_mesh, all_meshes = runtime.parse_layout(mesh), meshes or mesh
    layouts = runtime.parse_process_layout(all_meshes)
    if launcher != "shared":
        return mesh, stage_mesh.name
    if stage_mesh.is_host:
        return all_meshes, layouts[0].name
    if stage_mesh not in layouts:
        raise MeshdialError(f"--mesh {mesh} is none of --meshes {all_meshes}")
    return all_meshes, stage_mesh.name


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


def _number(name: str, text: str) -> int | float | None:
    if text == "null":
        return None
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

    def complain(self, stage: str, reply: dict) -> None:
        """Say in one sentence why a stage failed; a traceback goes to the log if there is one."""
        message = f"{stage}: {reply['message']}"
        if reply.get("traceback"):
            self.write(reply["traceback"])
            where = f" (full traceback in {self.path})" if self.path else "\n" + reply["traceback"]
            message += where
        self.write(message)
        print(message, file=sys.stderr, flush=True)

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


class FollowerLog(StageLog):
    """Of a process that runs a stage together with others: the first of them does the talking.

    If that one fails too it does so at once, and ends the others before they complain.
    """

    def __init__(self, path: str | None, number: int):
        super().__init__(None)
        self.path, self.number = path, number

    def show(self, line: str) -> None:
        pass

    def complain(self, stage: str, reply: dict) -> None:
        shown, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)  # JAX would tell at length that the first process is gone
        time.sleep(FOLLOWER_S)
        os.dup2(shown, 2)
        super().complain(f"process {self.number}: {stage}", reply)


def log_of(arguments: argparse.Namespace) -> StageLog:
    """Where the lines of a stage go."""
    if arguments.launcher == "cold":
        from rl import group

        member = group.settings()
        if member is not None and member.process_id > 0:
            return FollowerLog(arguments.log, member.process_id)
    return StageLog(arguments.log)


def run_here(request: dict, log: StageLog) -> dict:
    """The cold launcher, in this process or, in a SLURM job of several tasks, in one of each."""
    from rl.processes import launch

    launch.spread_over_tasks(request)
    return launch.run_cold(request, log.show)


def run_in_worker(request: dict, log: StageLog) -> dict:
    """The worker's last word on this request: `done` or `failed`.

    A worker that leaves before it took up the request is followed by another; one that dies while
    it runs the stage is an error, since the stage may be why.
    """
    liveness.exit_at_once_on_signals()
    check = liveness.watch(request["parent"])
    place = place_of(request)
    for _ in range(MAX_LOST_WORKERS):
        channel = reach.reach_worker(place, request, check)
        reply = converse(channel, request, place, log, check) if channel.send(request) else None
        channel.close()
        if reply is not None:
            return reply
    raise MeshdialError(
        f"{MAX_LOST_WORKERS} workers ended before they took up this stage\n"
        + reach.log_tail(place, 0)
    )


def place_of(request: dict) -> Place:
    """Where the worker of this request is met."""
    if request["launcher"] == "pool":
        from rl.processes import pool

        return pool.place_of(request["cwd"], request["layout"])
    return runtime.place_of(request["cwd"], request["layout"])


def converse(
    channel: Channel, request: dict, place: Place, log: StageLog, check: Callable[[], None]
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
            return started and {"event": "failed", "message": reach.obituary(place, started)}
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


if __name__ == "__main__":
    sys.exit(main())
