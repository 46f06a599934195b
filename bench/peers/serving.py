"""The contender's side of a measurement: one contender, alone in a process.

1. It reads its job, a line of JSON on standard input, and prepares.
2. It runs once, which compiles and warms up, and says that it is ready and what that took.
3. For each further line it runs once more and answers with seconds, CPU-seconds and tokens.

Answers are lines of JSON on standard output; whatever libraries print goes to standard error.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable

Repeat = Callable[[], dict]
"""Does the work once, to its end; returns {"tokens": how many} and figures of its own."""


def serve(prepare: Callable[[dict], tuple[str, Repeat]]) -> None:
    """`prepare` returns what runs, with its version, and the work itself."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    version, repeat = prepare(job)
    prepared = time.perf_counter() - began
    first = timed(repeat)
    answers.write(json.dumps(first | {"version": version, "prepare_seconds": prepared}) + "\n")
    for _ in sys.stdin:
        answers.write(json.dumps(timed(repeat)) + "\n")


def timed(repeat: Repeat) -> dict:
    """The CPU-seconds are those of all threads of this process."""
    began, cpu_began = time.perf_counter(), time.process_time()
    figures = repeat()
    return figures | {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
