"""Processes that run a reward function, as their parent sees them: started, asked, and ended.

A function's module is imported once, by the mould; the processes that make the calls are forks of
it, so that one can be ended and replaced in milliseconds however long the import takes. Where the
import started threads a fork is unsafe, and each process imports the module for itself.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rl.errors import MeshdialError
from rl.rewards.child import collect

CHILD = Path(__file__).with_name("child.py")
STARTUP_LIMIT_S = 120.0
MOULD_LIMIT_S = 10.0
CRASH_GRACE_S = 0.2
LARGEST_REPLY_BYTES = 1 << 16
# The same order of sets in every process, no bytecode in the user's folder, no threads of linear
# algebra: calls are many and small, and a process without threads can be forked.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Score(NamedTuple):
    """A finite value, or why there is none. 0.0 is a value."""

    value: float | None
    failure: str | None = None


class Call(NamedTuple):
    """The arguments of one call, and what Python's `random` is seeded with before it."""

    arguments: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class Target:
    """The function to call, where its module is looked for, and the limits of each call.

    `memory_limit_bytes` bounds the process's address space, libraries included (RLIMIT_AS).
    """

    module: str
    function: str
    search_path: Sequence[str]
    options: Mapping[str, Any]
    time_limit_s: float
    memory_limit_bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


class Ended(Exception):
    """The process closed its socket, or said something that is not a reply."""


class Connection:
    """A child process at the other end of a socket. `pid` leads its own process group."""

    def __init__(self, ours: socket.socket, pid: int):
        self.socket, self.pid = ours, pid
        ours.setblocking(False)

    def exchange(self, message: Mapping[str, Any], limit_s: float, passed: tuple = ()) -> dict:
        """Sends one line and reads one. TimeoutError, or Ended where no reply can come."""
        unsent = memoryview(json.dumps(message).encode() + b"\n")
        if passed:
            # A short message, to a process that waits for one.
            sent = self._attempt(socket.send_fds, self.socket, [unsent], passed)
            unsent = unsent[sent:]
        return self._reply(unsent, time.monotonic() + limit_s)

    def read(self, limit_s: float) -> dict:
        """Reads one line. TimeoutError, or Ended where none can come."""
        return self._reply(memoryview(b""), time.monotonic() + limit_s)

    def is_spoiled(self) -> bool:
        """Whether the process ended, or spoke, since its last reply."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            return bool(selector.select(0))

    def kill(self) -> None:
        """Ends the process and all of its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _reply(self, unsent: memoryview, deadline: float) -> dict:
        received = b""
        with selectors.DefaultSelector() as selector:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            selector.register(self.socket, both if unsent else selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError
                events = ready[0][1]
                if events & selectors.EVENT_WRITE:
                    unsent = unsent[self._attempt(self.socket.send, unsent) :]
                    if not unsent:
                        selector.modify(self.socket, selectors.EVENT_READ)
                if events & selectors.EVENT_READ:
                    received += self._received()
        return _parsed(received)

    def _received(self) -> bytes:
        received = self._attempt(self.socket.recv, LARGEST_REPLY_BYTES)
        if not received or len(received) == LARGEST_REPLY_BYTES:
            raise Ended
        return received

    def _attempt(self, function, *arguments):
        try:
            return function(*arguments)
        except OSError:
            raise Ended from None


class Mould:
    """Where the processes of one target come from. It starts when it is first asked for one."""

    def __init__(self, target: Target, offered: Sequence[str]):
        self.target, self.offered = target, offered
        self.lock = threading.Lock()
        self.connection: Connection | None = None
        self.wanted: list[str] = []
        self.can_fork = True
        self.is_abandoned = False

    def worker(self) -> Connection:
        """A new process that has imported the module.

        MeshdialError if the module cannot be imported or the function cannot be called.
        """
        with self.lock:
            for _ in range(2):
                if self.is_abandoned:
                    break
                if self.connection is None:
                    self.connection = self._start()
                if not self.can_fork:
                    process, self.connection = self.connection, None
                    return process
                with suppress(Ended, TimeoutError):
                    return self._fork()
                self._end()
        raise MeshdialError(f"reward function {self.target}: its process ends again and again")

    def collect(self, process: Connection, grace_s: float) -> int | None:
        """Ends a process with its group; its exit status, if it had ended by itself."""
        process.socket.close()
        if not self.can_fork:
            return collect(process.pid, grace_s)
        with self.lock:
            request = {"collect": process.pid, "grace_s": grace_s}
            with suppress(Ended, TimeoutError, AttributeError):
                return self.connection.exchange(request, MOULD_LIMIT_S).get("status")
        process.kill()
        return None

    def kill(self) -> None:
        """Ends the mould for good, also while it imports; its forks are the caller's to end."""
        self.is_abandoned = True
        connection = self.connection
        if connection is not None:
            connection.kill()

    def end(self) -> None:
        """Ends the mould and whatever the function has left behind."""
        with self.lock:
            self._end()

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                # -P: the folder of child.py must not hide modules of the same names.
                [sys.executable, "-P", str(CHILD)],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=ONE_THREAD | os.environ | ENVIRONMENT,
            )
        process.returncode = 0  # It is waited for by collect().
        self.connection = Connection(ours, process.pid)
        if self.is_abandoned:
            self.kill()
        reply = self._set_up()
        if "wanted" not in reply:
            self._end()
            raise MeshdialError(f"reward function {self.target}: {reply.get('error')}")
        self.wanted, self.can_fork = reply["wanted"], reply["is_mould"]
        return self.connection

    def _set_up(self) -> dict:
        setup = {
            "module": self.target.module,
            "function": self.target.function,
            "search_path": list(self.target.search_path),
            "options": dict(self.target.options),
            "memory_limit_bytes": self.target.memory_limit_bytes,
            "offered": list(self.offered),
        }
        try:
            return self.connection.exchange(setup, STARTUP_LIMIT_S)
        except TimeoutError:
            return {"error": f"its module was not imported within {STARTUP_LIMIT_S:g} s"}
        except Ended:
            status = collect(self.connection.pid, CRASH_GRACE_S)
            return {"error": f"while its module was imported, {told_end(status)}"}

    def _fork(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                passed = (theirs.fileno(),)
                pid = self.connection.exchange({"fork": True}, MOULD_LIMIT_S, passed)["pid"]
                process = Connection(ours, pid)
                process.read(MOULD_LIMIT_S)
            except BaseException:
                ours.close()
                raise
        return process

    def _end(self) -> None:
        """Hanging up makes it end what the function left behind, and then itself."""
        if self.connection is not None:
            self.connection.socket.close()
            collect(self.connection.pid, grace_s=2.0)
            self.connection = None


def told_end(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "the process broke off its answer"
    if status < 0:
        return f"the process was ended by signal {-status} ({signal.strsignal(-status)})"
    return f"the process ended with exit status {status}"


def _parsed(line: bytes) -> dict:
    try:
        reply = json.loads(line)
    except ValueError:
        raise Ended from None
    if not isinstance(reply, dict):
        raise Ended
    return reply
