"""Who is still there: processes named by host, pid and start, so that a reused pid fools nobody.

Of a process on another host nothing is known here: whoever asks goes by the connection to it.
"""

import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from rl.errors import ClientGone, MeshdialError

TICK_S = 0.25
CLEANUP_S = 5.0


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of process `pid`; None for one that has ended.

    A zombie has ended. Where there is no /proc the start time is 0 and only the pid counts.
    """
    if sys.platform != "linux":
        return 0 if _answers(pid) else None
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def identify(pid: int) -> dict | None:
    """`{"pid", "start", "host"}` of a living process of this host, else None."""
    start = start_time(pid)
    return None if start is None else {"pid": pid, "start": start, "host": os.uname().nodename}


def is_local(process: dict) -> bool:
    return process["host"] == os.uname().nodename


def is_alive(process: dict) -> bool:
    """Whether a process is there, as far as this host can know: those of others are taken to be."""
    return not is_local(process) or start_time(process["pid"]) == process["start"]


def find_workflow() -> dict | None:
    """The workflow process named by MESHDIAL_PARENT_PID (PID or PID@HOST).

    None where it is not set, or names one of another host, whose job system has to end what it
    started.
    """
    text = os.environ.get("MESHDIAL_PARENT_PID", "")
    if not text:
        return None
    match = re.fullmatch(r"(\d+)(?:@(\S+))?", text)
    if match is None:
        raise MeshdialError(f"MESHDIAL_PARENT_PID is {text!r}, expected PID or PID@HOST")
    if match[2] not in (None, os.uname().nodename):
        return None
    workflow = identify(int(match[1]))
    if workflow is None:
        raise ClientGone(f"the workflow (process {match[1]}) has ended")
    return workflow


def watch(workflow: dict | None) -> Callable[[], None]:
    """A function that raises `ClientGone` once `workflow` has ended."""

    def check_alive() -> None:
        if workflow is not None and not is_alive(workflow):
            raise ClientGone(f"the workflow (process {workflow['pid']}) has ended")

    return check_alive


def exit_at_once_on_signals() -> None:
    """SIGINT and SIGTERM end this process with 130 and 143; one that is ignored stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os._exit(128 + number))


def exit_cleanly_on_signals(workflow: dict | None) -> None:
    """End this process on SIGINT, SIGTERM or the workflow's death, after `finally` blocks ran.

    Python runs a handler only between two bytecodes of the main thread, which may sit in compiled
    code for minutes. So a thread learns of the signal too, and ends the process when the main
    thread has not done so within some seconds.
    """
    ends = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]

    def leave(number, frame):
        raise SystemExit(128 + number)

    for number in ends:
        signal.signal(number, leave)
    start_thread(_end_process, _arrivals(), ends, workflow)


def end_on_sigterm(prepare: Callable[[], None]) -> None:
    """On SIGTERM `prepare`, and end this process with 143, whatever its main thread is at."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    arrivals = _arrivals()

    def wait() -> None:
        while os.read(arrivals, 1)[0] != signal.SIGTERM:
            pass
        prepare()
        os._exit(128 + signal.SIGTERM)

    start_thread(wait)


def start_thread(target: Callable[..., None], *words) -> threading.Thread:
    """A thread without which the process is of no use: if it breaks, the process ends."""

    def work() -> None:
        try:
            target(*words)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _arrivals() -> int:
    """A pipe that tells the number of each signal that arrives, also while Python's own handlers
    wait for the main thread."""
    arrivals, announce = os.pipe()
    os.set_blocking(announce, False)
    signal.set_wakeup_fd(announce, warn_on_full_buffer=False)
    return arrivals


def _end_process(arrivals: int, ends: list[int], workflow: dict | None) -> None:
    number = None
    while number not in ends:
        if select.select([arrivals], [], [], TICK_S)[0]:
            number = os.read(arrivals, 1)[0]
        elif workflow is not None and not is_alive(workflow):
            print("the workflow has ended, so this stage ends too", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            break
    time.sleep(CLEANUP_S)
    os._exit(128 + (number or signal.SIGTERM))


def resident_bytes() -> int:
    """Memory that this process holds now; its peak where there is no /proc."""
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
