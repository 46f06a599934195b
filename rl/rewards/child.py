"""The process in which a user's reward function runs, to be ended at any moment from outside.

It is run as a file, and imports nothing but the standard library and the function's module.
Messages are JSON lines on the socket that is its standard input; the function itself reads and
writes the null device. First it is told what to call, and replies which arguments it wants. Then it
answers one call after another; or it makes no call itself, but is a mould: asked for it, it forks
processes that have imported the module already, each with a socket of its own, and says how they
ended.
"""

import ctypes
import importlib
import inspect
import json
import math
import numbers
import os
import random
import re
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

# What a function that takes **kwargs is given.
USUAL_ARGUMENTS = ("completion", "ground_truth", "prompt", "info")
LONGEST_FAILURE = 300
RECEIVED_BYTES = 1 << 20
CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl


class Channel:
    """Messages of one socket, and the file descriptors that came with them."""

    def __init__(self, file_number: int):
        os.set_inheritable(file_number, False)
        self.socket = socket.socket(fileno=file_number)
        self.socket.settimeout(None)
        self.received = bytearray()
        self.passed: list[int] = []

    def receive(self) -> dict | None:
        """The next message; None when there will be no more."""
        while b"\n" not in self.received[-RECEIVED_BYTES:]:
            chunk, passed, *_ = socket.recv_fds(self.socket, RECEIVED_BYTES, 1)
            if not chunk:
                return None
            self.received += chunk
            self.passed += passed
        line, _, self.received = self.received.partition(b"\n")
        return json.loads(line)

    def send(self, message: Mapping[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        os.close(self.socket.detach())


class Server(NamedTuple):
    """The function, its options and the arguments that it wants."""

    function: Callable
    options: Mapping[str, Any]
    wanted: list[str]


def main() -> None:
    channel = _private_channel()
    setup = channel.receive()
    _limit_resources(setup["memory_limit_bytes"])
    _adopt_orphans()
    try:
        function = _load(setup["search_path"], setup["module"], setup["function"])
        wanted = wanted_arguments(function, setup["offered"], setup["options"])
    except BaseException as error:
        channel.send({"error": described(error)})
        return
    # A fork of a process with threads may find their locks held for ever.
    channel.send({"wanted": wanted, "is_mould": _num_threads() == 1})
    serve(channel, Server(function, setup["options"], wanted))
    for pid in _children():
        collect(pid)


def serve(channel: Channel, server: Server) -> None:
    """Answers messages until there are no more."""
    # A fork by the function must neither take a message nor hold the socket open.
    _OPEN[:] = [channel]
    while (request := channel.receive()) is not None:
        if request.get("fork"):
            channel.send({"pid": _fork(channel.passed.pop(), server)})
        elif "collect" in request:
            channel.send({"status": collect(request["collect"], request["grace_s"])})
        else:
            outcome = _call(server.function, request["arguments"] | server.options, request)
            channel.send({"number": request["number"]} | outcome)


def wanted_arguments(
    function: Callable, offered: Collection[str], options: Mapping[str, Any]
) -> list[str]:
    """The arguments that `function` names among those offered, besides its options.

    TypeError if it needs one that is not offered, or cannot be given one of the options.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for option in options:
        if option in offered:
            raise TypeError(f"the option {option} has the name of an argument that it is given")
        if option not in names and not takes_any:
            raise TypeError(f"it takes no option {option}")
    for parameter in parameters:
        if _is_needed(parameter) and parameter.name not in {*names} & {*offered, *options}:
            choice = ", ".join(offered)
            raise TypeError(f"it asks for {parameter.name}; it can have {choice} and its options")
    return [n for n in offered if n in names or (takes_any and n in USUAL_ARGUMENTS)]


def _is_needed(parameter: inspect.Parameter) -> bool:
    is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_variadic


def as_reward(value: Any) -> float:
    """`value` as a finite float. A number of another library counts, text does not."""
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"returned {type(value).__name__}, expected a float")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, expected a finite number")
    return number


def described(error: BaseException) -> str:
    """An exception in one line, with the place in the function's own file where it was raised."""
    # Addresses differ from run to run, and this text is stored.
    message = re.sub(r"\b0x[0-9a-fA-F]{6,}", "0x...", " ".join(str(error).split()))
    text = f"{type(error).__name__}: {message}".removesuffix(": ")[:LONGEST_FAILURE]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = frame.filename == __file__ or frame.filename.startswith("<")
    return text if is_ours else f"{text} ({os.path.basename(frame.filename)}, line {frame.lineno})"


def collect(pid: int, grace_s: float = 0.0) -> int | None:
    """Ends a child of this process with its process group.

    Its exit status (negative: the signal), if it ended by itself within `grace_s`, else None.
    """
    deadline = time.monotonic() + grace_s
    peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_PID, pid, peek)) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        return None if ended is None else os.waitstatus_to_exitcode(status)
    return None


_OPEN: list[Channel] = []


def _private_channel() -> Channel:
    """The socket under another number; the standard ones lead to the null device."""
    channel = Channel(os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    _OPEN.append(channel)
    os.register_at_fork(after_in_child=lambda: _OPEN.pop().close() if _OPEN else None)
    return channel


def _limit_resources(memory_limit_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))


def _adopt_orphans() -> None:
    """What the function starts stays below this process, whatever session it moves to."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> Iterator[int]:
    """The children that are left, and those that ending one of them leaves to this process."""
    own = os.getpid()
    with suppress(OSError):
        while found := open(f"/proc/{own}/task/{own}/children").read().split():
            yield from map(int, found)


def _num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 2  # Not Linux: unknown, so never forked.


def _load(search_path: list[str], module: str, name: str) -> Callable:
    sys.path[:] = search_path
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{module}:{name} is not a function")
    return function


def _fork(file_number: int, server: Server) -> int:
    pid = os.fork()
    if pid:
        os.close(file_number)
        return pid
    try:
        os.setsid()
        channel = Channel(file_number)
        channel.send({"is_ready": True})
        serve(channel, server)
    finally:
        os._exit(0)


def _call(function: Callable, arguments: Mapping[str, Any], request: Mapping[str, Any]) -> dict:
    own_pid = os.getpid()
    random.seed(request["seed"])
    # The parent ends a call that takes too long; should it be gone, the kernel's alarm does.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["alarm_s"])
    try:
        outcome = {"value": as_reward(function(**arguments))}
    except BaseException as error:
        outcome = {"failure": described(error)}
    signal.setitimer(signal.ITIMER_REAL, 0)
    if os.getpid() != own_pid:
        os._exit(0)  # The function forked, and this is the fork returning from it.
    return outcome


if __name__ == "__main__":
    main()
    os._exit(0)  # Not to wait for threads that the function left behind.
