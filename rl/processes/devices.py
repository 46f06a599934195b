"""The locks of the devices that a worker uses, taken before its first stage and kept for life."""

import os
import threading
import time
from collections.abc import Callable, Iterable

from rl.errors import MeshdialError
from rl.processes import runtime, wire

QUIET_S = 1.0  # how long waiting goes without saying
SILENCE_S = 60.0  # a holder that has not answered for this long is an error


class Devices:
    """The locks of the devices `names`; `holder` tells others whom to ask for them."""

    def __init__(self, names: Iterable[str], holder: dict):
        self._holder = holder
        paths = sorted(runtime.device_lock(name) for name in names)
        self._locks: dict[str, int | None] = dict.fromkeys(paths)
        self._open = threading.Lock()  # held while a lock's descriptor is used or closed

    def take(self, wait: Callable[[str], bool], question: dict) -> bool:
        """Hold every device. While another process has one, it is asked `question`, and
        `wait(line)` is called again and again, with a line that changes only with the holder;
        False from it, or an exception, gives up.

        In a fixed order, so that two that wait for each other's devices cannot come to be.
        """
        is_complete = False
        try:
            missing = [path for path, lock in self._locks.items() if lock is None]
            is_complete = all(self._take_one(path, wait, question) for path in missing)
        finally:
            if not is_complete:
                self._release()
        return is_complete

    def _take_one(self, path: str, wait: Callable[[str], bool], question: dict) -> bool:
        began = heard = time.monotonic()
        line, told = "", None
        while (lock := runtime.take_lock(path)) is None:
            holder = runtime.read_holder(path) or {}
            answer = wire.ask(holder["socket"], question) if "socket" in holder else None
            now = time.monotonic()
            if answer is not None or holder.get("is_retiring"):
                heard = now
            elif now - heard > SILENCE_S:
                raise MeshdialError(_complaint(path, holder))
            if now - began > QUIET_S and holder.get("pid") != told:
                line, told = _waiting_line(path, holder, answer or {}), holder.get("pid")
            if not wait(line):
                return False
        runtime.write_holder(lock, self._holder)
        self._locks[path] = lock
        return True

    def announce_retirement(self) -> None:
        """Tell those that wait that the devices come free once the running stage is over."""
        with self._open:
            self._holder = self._holder | {"is_retiring": True}
            for lock in self._locks.values():
                if lock is not None:
                    runtime.write_holder(lock, self._holder)

    def are_in_place(self) -> bool:
        """Whether the lock files that are held still carry their names."""
        with self._open:
            held = [(lock, path) for path, lock in self._locks.items() if lock is not None]
            return all(runtime.is_at(lock, path) for lock, path in held)

    def _release(self) -> None:
        with self._open:
            for path, lock in self._locks.items():
                if lock is not None:
                    os.close(lock)
                self._locks[path] = None


def _waiting_line(path: str, holder: dict, answer: dict) -> str:
    doing = "is about to leave"
    if answer.get("event") == "busy":
        doing = f"runs {answer['stage']}" if answer["stage"] else "is kept for its workflow"
    return (
        f"waiting for {_device(path)}: the worker of {holder.get('root', 'another folder')}"
        f" (process {holder.get('pid', 'unknown')}) {doing}"
    )


def _complaint(path: str, holder: dict) -> str:
    return (
        f"{_device(path)} is held by process {holder.get('pid', 'unknown')}, which has not"
        f" answered for {SILENCE_S:.0f} s; end the process that has {path} open"
    )


def _device(path: str) -> str:
    return "device " + os.path.basename(path).removesuffix(".lock").removeprefix("device-")
