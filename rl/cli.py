"""The `meshdial` command: plan a run, run one stage by hand, see or stop the resident workers."""

import argparse
import glob
import os
import signal
import sys
import time

from rl import __version__, client
from rl.errors import MeshdialError
from rl.plan import command as planning
from rl.processes import liveness, pool, runtime, wire

COLUMNS = "{:>8}  {:<20}  {:>8}  {:>9}  {:<8}  {:<14}  {:<16}  {}"
POLL_S = 0.05


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; an error that the user can mend is one sentence."""
    chosen = make_parser().parse_args(arguments)
    try:
        status = chosen.action(chosen)
        sys.stdout.flush()
        return status
    except MeshdialError as error:
        print(f"meshdial: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read what this prints has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def make_parser() -> argparse.ArgumentParser:
    """`meshdial stage`, `meshdial plan`, `meshdial worker status`, `meshdial worker stop`."""
    parser = argparse.ArgumentParser(prog="meshdial", description=__doc__)
    parser.add_argument("--version", action="version", version=f"meshdial {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    stage = commands.add_parser("stage", help="run one stage, as the workflow's rules do")
    client.add_arguments(stage)
    stage.set_defaults(action=client.run)

    plan = commands.add_parser("plan", help="what a run will cost, before it runs")
    planning.add_arguments(plan)
    plan.set_defaults(action=planning.run)

    worker = commands.add_parser("worker", help="see or stop the resident workers")
    actions = worker.add_subparsers(required=True, metavar="ACTION")
    status = actions.add_parser("status", help="list your workers, their meshes and devices")
    status.set_defaults(action=show_status)
    stop = actions.add_parser("stop", help="stop the workers of this folder")
    stop.add_argument("--all", action="store_true", help="those of every folder")
    stop.add_argument("--now", action="store_true", help="do not let the running stage finish")
    stop.set_defaults(action=stop_workers)
    return parser


def find_workers(root: str | None = None) -> list[dict]:
    """The status of each worker that answers, of one folder or of all, with its `address`.

    Those of this machine, and those that the current folder has on other nodes of a SLURM job.
    """
    pool.remove_ended(os.getcwd())
    sockets = glob.glob(os.path.join(glob.escape(runtime.runtime_dir()), "*.sock"))
    found = {}
    for address in [*sorted(sockets), *pool.endpoints(os.getcwd())]:
        status = wire.ask_over(_connect(address), {"op": "status"})
        if status is not None and root in (None, status["root"]):
            found.setdefault((status["host"], status["pid"]), {**status, "address": address})
    return list(found.values())


def _connect(address: str) -> wire.Channel | None:
    return pool.connect(address) if address.endswith(".json") else wire.connect(address)


def show_status(arguments: argparse.Namespace) -> int:
    """Print one line a worker."""
    workers = find_workers()
    if not workers:
        print("no worker runs")
        return 0
    titles = ("PID", "STAGE", "IDLE", "MEMORY", "LAUNCHER", "MESHES", "DEVICES", "FOLDER")
    print(COLUMNS.format(*titles))
    for worker in workers:
        stage = worker["stage"] or "-"
        if worker["num_waiting"]:
            stage += f" (+{worker['num_waiting']})"
        idle = f"{worker['idle_s']:.0f} s"
        memory = f"{worker['memory_bytes'] / 2**20:.0f} MiB"
        meshes, devices = "+".join(worker["meshes"]), _shortened(worker["devices"])
        columns = (name_of(worker), stage, idle, memory, worker["launcher"], meshes, devices)
        print(COLUMNS.format(*columns, worker["root"]))
    return 0


def _shortened(devices: list[str]) -> str:
    """The devices, or where they are many the first and the last."""
    if len(devices) > 4:
        return f"{devices[0]}...{devices[-1]} ({len(devices)})"
    return ",".join(devices) or "-"


def name_of(worker: dict) -> str:
    """Its process number, with the host where that is another."""
    here = "" if liveness.is_local(worker) else f"@{worker['host']}"
    return f"{worker['pid']}{here}"


def stop_workers(arguments: argparse.Namespace) -> int:
    """Tell workers to leave and wait until they have; a running workflow starts new ones."""
    root = None if arguments.all else os.path.realpath(os.getcwd())
    workers = find_workers(root)
    for worker in workers:
        request = {"op": "stop", "is_urgent": arguments.now}
        wire.ask_over(_connect(worker["address"]), request)
    if not workers:
        print("no worker runs" + ("" if arguments.all else f" for {root}"))
    for worker in workers:
        if arguments.now and liveness.is_local(worker) and liveness.is_alive(worker):
            os.kill(worker["pid"], signal.SIGKILL)
        elif worker["stage"] and not arguments.now:
            print(f"process {name_of(worker)} finishes {worker['stage']} first", flush=True)
        while _is_there(worker):
            time.sleep(POLL_S)
        print(f"stopped process {name_of(worker)} of {worker['root']}")
    return 0


def _is_there(worker: dict) -> bool:
    """Whether it has not ended. One of another node removes its file when it does."""
    if liveness.is_local(worker):
        return liveness.is_alive(worker)
    return bool(pool.read_endpoint(worker["address"]))


if __name__ == "__main__":
    sys.exit(main())
