"""The `meshdial` command: run one stage by hand, and see or stop the resident workers."""

import argparse
import glob
import os
import signal
import sys
import time

from rl import __version__, client, liveness, runtime
from rl.errors import MeshdialError
from rl.wire import ask

COLUMNS = "{:>8}  {:<20}  {:>8}  {:>9}  {:<20}  {}"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; an error that the user can mend is one sentence."""
    chosen = make_parser().parse_args(arguments)
    try:
        return chosen.action(chosen)
    except MeshdialError as error:
        print(f"meshdial: {error}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    """`meshdial stage`, `meshdial worker status`, `meshdial worker stop`."""
    parser = argparse.ArgumentParser(prog="meshdial", description=__doc__)
    parser.add_argument("--version", action="version", version=f"meshdial {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    stage = commands.add_parser("stage", help="run one stage, as the workflow's rules do")
    client.add_arguments(stage)
    stage.set_defaults(action=client.run)

    worker = commands.add_parser("worker", help="see or stop the resident workers")
    actions = worker.add_subparsers(required=True, metavar="ACTION")
    status = actions.add_parser("status", help="list your workers on this machine")
    status.set_defaults(action=show_status)
    stop = actions.add_parser("stop", help="stop the workers of this folder")
    stop.add_argument("--all", action="store_true", help="those of every folder")
    stop.add_argument("--now", action="store_true", help="do not let the running stage finish")
    stop.set_defaults(action=stop_workers)
    return parser


def answers(op: str, root: str | None = None) -> list[dict]:
    """What each worker that answers, of one folder or of all, says to `op`."""
    found = []
    for path in sorted(glob.glob(os.path.join(glob.escape(runtime.runtime_dir()), "*.sock"))):
        status = ask(path, {"op": "status"})
        if status is not None and root in (None, status["root"]):
            found.append(status if op == "status" else ask(path, {"op": op}) or status)
    return found


def show_status(arguments: argparse.Namespace) -> int:
    """Print one line a worker."""
    workers = answers("status")
    if not workers:
        print("no worker runs")
        return 0
    print(COLUMNS.format("PID", "STAGE", "IDLE", "MEMORY", "LAYOUT", "FOLDER"))
    for worker in workers:
        stage = worker["stage"] or "-"
        if worker["num_waiting"]:
            stage += f" (+{worker['num_waiting']})"
        idle = f"{worker['idle_s']:.0f} s"
        memory = f"{worker['memory_bytes'] / 2**20:.0f} MiB"
        print(COLUMNS.format(worker["pid"], stage, idle, memory, worker["layout"], worker["root"]))
    return 0


def stop_workers(arguments: argparse.Namespace) -> int:
    """Tell workers to leave and wait until they have; a running workflow starts new ones."""
    root = None if arguments.all else os.path.realpath(os.getcwd())
    workers = answers("stop", root)
    if not workers:
        print("no worker runs" + ("" if arguments.all else f" for {root}"))
    for worker in workers:
        if arguments.now and liveness.is_alive(worker):
            os.kill(worker["pid"], signal.SIGKILL)
        elif worker["stage"]:
            print(f"process {worker['pid']} finishes {worker['stage']} first", flush=True)
        while liveness.is_alive(worker):
            time.sleep(0.05)
        print(f"stopped process {worker['pid']} of {worker['root']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
