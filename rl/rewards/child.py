"""The process in which a user's reward function runs, to be ended at any moment from outside.

It is run as a file, and imports nothing but the standard library and the user's module. Requests
come as JSON lines on standard input, replies go as JSON lines to what was standard output; the
function itself reads and writes the null device. First it is told what to call and replies which
arguments it wants; then it answers one request after another until its input ends.
"""

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
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, BinaryIO

# What a function that takes **kwargs is given.
USUAL_ARGUMENTS = ("completion", "ground_truth", "prompt", "info")
LONGEST_FAILURE = 300


def main() -> None:
    requests, replies = _private_channels()
    setup = json.loads(requests.readline())
    _limit_resources(setup["memory_limit_bytes"])
    try:
        function = _load(setup["search_path"], setup["module"], setup["function"])
        wanted = wanted_arguments(function, setup["offered"], setup["options"])
    except BaseException as error:
        _reply(replies, {"error": described(error)})
        return
    _reply(replies, {"wanted": wanted})
    for line in requests:
        request = json.loads(line)
        outcome = _call(function, request["arguments"] | setup["options"], request)
        _reply(replies, {"number": request["number"]} | outcome)


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


def _private_channels() -> tuple[BinaryIO, BinaryIO]:
    """Input and output under numbers of their own; the standard ones lead to the null device."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    # A fork of this process must neither take a request nor hold the reply's pipe open.
    os.register_at_fork(after_in_child=lambda: (os.close(requests), os.close(replies)))
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb", buffering=0)


def _limit_resources(memory_limit_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))


def _load(search_path: list[str], module: str, name: str) -> Callable:
    sys.path[:] = search_path
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{module}:{name} is not a function")
    return function


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


def _reply(replies: BinaryIO, message: Mapping[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
    os._exit(0)  # Not to wait for threads that the function left behind.
