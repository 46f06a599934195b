"""Reward functions that cannot be trusted to return, each call in a process that can be ended.

A call that takes too long, crashes or answers with anything but a number costs that one sample. The
process is then ended with all that it started (its process group) and replaced by a new one.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rl.errors import MeshdialError

CHILD = Path(__file__).with_name("child.py")
STARTUP_LIMIT_S = 120.0
LARGEST_REPLY_BYTES = 1 << 16
CHECK_INTERVAL_S = 0.5


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


def score_in_processes(
    target: Target,
    calls: Sequence[Call],
    num_processes: int,
    check_alive: Callable[[], None] = lambda: None,
) -> list[Score]:
    """One score for each call, in their order; all calls offer the same arguments.

    Which process serves a call depends on its place alone. `check_alive` is called now and then,
    and an exception from it ends the processes. MeshdialError if the module cannot be imported or
    the function asks for an argument that is not there.
    """
    if not calls:
        return []
    scores: list[Score | None] = [None] * len(calls)
    num_processes = min(num_processes, len(calls))
    processes = [ScorerProcess(target, list(calls[0].arguments)) for _ in range(num_processes)]
    stop = threading.Event()

    def serve(first: int) -> None:
        with processes[first] as process:
            for number in range(first, len(calls), num_processes):
                if stop.is_set():
                    return
                scores[number] = process.call(calls[number])

    with ThreadPoolExecutor(num_processes, thread_name_prefix="scorer") as threads:
        running = {threads.submit(serve, first) for first in range(num_processes)}
        try:
            while running:
                done, running = wait(running, timeout=CHECK_INTERVAL_S)
                for future in done:
                    future.result()
                check_alive()
        except BaseException:
            stop.set()
            for process in processes:
                process.kill()
            raise
    return scores


class _Ended(Exception):
    """The process closed its pipe, or said something that is not a reply."""


class ScorerProcess:
    """One child process at a time, started when first needed and again after it was ended."""

    def __init__(self, target: Target, offered: Sequence[str]):
        self.target, self.offered = target, offered
        self.process: subprocess.Popen | None = None
        self.wanted: list[str] = []
        self.number = 0

    def __enter__(self) -> "ScorerProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def call(self, call: Call) -> Score:
        """Calls the function once, within the time limit."""
        if self.process is not None and self._is_spoiled():
            self._end()
        if self.process is None:
            self._start()
        limit = self.target.time_limit_s
        self.number += 1
        request = {
            "number": self.number,
            "arguments": {name: call.arguments[name] for name in self.wanted},
            "seed": call.seed,
            "alarm_s": 2 * limit + 1,
        }
        try:
            reply = self._exchange(request, limit)
            return _score(reply, self.number)
        except TimeoutError:
            self._end()
            return Score(None, f"no answer within {limit:g} s")
        except _Ended:
            return Score(None, self._end())

    def kill(self) -> None:
        """Ends the process and all that it started; a call in progress then returns a failure."""
        process = self.process
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _start(self) -> None:
        self.process = subprocess.Popen(
            # -P: the folder of child.py must not hide modules of the same names.
            [sys.executable, "-P", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            # Sets and dicts in the same order in every process; no bytecode in the user's folder.
            env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        os.set_blocking(self.process.stdin.fileno(), False)
        os.set_blocking(self.process.stdout.fileno(), False)
        setup = {
            "module": self.target.module,
            "function": self.target.function,
            "search_path": list(self.target.search_path),
            "options": dict(self.target.options),
            "memory_limit_bytes": self.target.memory_limit_bytes,
            "offered": list(self.offered),
        }
        try:
            reply = self._exchange(setup, STARTUP_LIMIT_S)
        except TimeoutError:
            reply = {"error": f"its module was not imported within {STARTUP_LIMIT_S:g} s"}
        except _Ended:
            reply = {"error": f"while its module was imported, {self._end()}"}
        if "wanted" not in reply:
            raise MeshdialError(f"reward function {self.target}: {reply.get('error')}")
        self.wanted = reply["wanted"]

    def _exchange(self, message: Mapping[str, Any], limit_s: float) -> dict:
        """Sends one line and reads one. TimeoutError, or _Ended where no reply can come."""
        deadline = time.monotonic() + limit_s
        unsent = memoryview(json.dumps(message).encode() + b"\n")
        received = b""
        stdin, stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            selector.register(stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError
                for key, _ in ready:
                    if key.fd == stdout:
                        received += self._receive(stdout)
                    else:
                        unsent = unsent[self._send(stdin, unsent) :]
                        if not unsent:
                            selector.unregister(stdin)
                if len(received) > LARGEST_REPLY_BYTES:
                    raise _Ended
        return _parsed(received)

    def _send(self, stdin: int, unsent: memoryview) -> int:
        try:
            return os.write(stdin, unsent)
        except BrokenPipeError:
            raise _Ended from None

    def _receive(self, stdout: int) -> bytes:
        received = os.read(stdout, LARGEST_REPLY_BYTES)
        if not received:
            raise _Ended
        return received

    def _is_spoiled(self) -> bool:
        """Whether the process ended, or spoke, since its last reply."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout.fileno(), selectors.EVENT_READ)
            return bool(selector.select(0))

    def _end(self) -> str:
        """Ends the process, if there is one, and says how it had ended by itself."""
        process = self.process
        if process is None:
            return ""
        if self._is_spoiled():
            # It may be crashing: give it the time to say how.
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.2)
        status = process.poll()
        self.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        self.process = None
        if status is None:
            return "the process broke off its answer"
        if status < 0:
            return f"the process was ended by signal {-status} ({signal.strsignal(-status)})"
        return f"the process ended with exit status {status}"


def _parsed(line: bytes) -> dict:
    try:
        reply = json.loads(line)
    except ValueError:
        raise _Ended from None
    if not isinstance(reply, dict):
        raise _Ended
    return reply


def _score(reply: Mapping[str, Any], number: int) -> Score:
    value, failure = reply.get("value"), reply.get("failure")
    is_answer = isinstance(value, float) if failure is None else isinstance(failure, str)
    if reply.get("number") != number or not is_answer:
        raise _Ended
    return Score(value, None) if failure is None else Score(None, failure)
