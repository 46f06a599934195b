"""Reward functions that cannot be trusted to return, each call in a process that can be ended.

A call that takes too long, crashes or answers with anything but a number costs that one sample. The
process is then ended with all that it started and replaced by a new one.

Calls stand in as many lanes as there are processes, by their place. A lane does not wait for a call
that takes much longer than the others did: it leaves that call to its time limit and goes on with a
spare process, so that a few calls which hang do so at the same time.
"""

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from rl.rewards.processes import (
    CRASH_GRACE_S,
    Call,
    Connection,
    Ended,
    Mould,
    Score,
    told_end,
)

CHECK_INTERVAL_S = 0.5
NUM_SPARES = 4
# A call is overdue after so long, and after so many times the median of those answered.
PATIENCE_S = 0.25
PATIENCE_FACTOR = 10.0


def score_in_processes(
    mould: Mould,
    calls: Sequence[Call],
    num_processes: int,
    check_alive: Callable[[], None] = lambda: None,
) -> list[Score]:
    """One score for each call, in their order.

    At most `num_processes` + NUM_SPARES calls run at once. `check_alive` is called now and then,
    and an exception from it ends the processes. MeshdialError if the module cannot be imported or
    the function asks for an argument that is not there.
    """
    if not calls:
        return []
    lanes = _Lanes(mould, calls, min(num_processes, len(calls)))
    try:
        running = lanes.start()
        while running:
            done, running = wait(running, timeout=CHECK_INTERVAL_S)
            for future in done:
                future.result()
            check_alive()
    except BaseException:
        lanes.kill()
        raise
    finally:
        lanes.end()
    return lanes.scores


class _Lanes:
    """The calls of one batch, and the processes that are busy with them."""

    def __init__(self, mould: Mould, calls: Sequence[Call], num_lanes: int):
        self.mould, self.calls, self.num_lanes = mould, calls, num_lanes
        self.scores: list[Score | None] = [None] * len(calls)
        self.durations: list[float] = []
        self.processes: list[ScorerProcess] = []
        self.spares = threading.Semaphore(NUM_SPARES)
        self.stop = threading.Event()
        self.threads = ThreadPoolExecutor(2 * num_lanes + NUM_SPARES, thread_name_prefix="scorer")

    def start(self) -> set[Future]:
        return {self.threads.submit(self._serve, lane) for lane in range(self.num_lanes)}

    def kill(self) -> None:
        self.stop.set()
        self.mould.kill()
        for process in list(self.processes):
            process.kill()

    def end(self) -> None:
        self.threads.shutdown()

    def _serve(self, lane: int) -> None:
        """Makes the calls of one lane, and waits for all of them."""
        process, left = self._new_process(), []
        try:
            for number in range(lane, len(self.calls), self.num_lanes):
                if self.stop.is_set():
                    return
                process.start()
                answer = self.threads.submit(self._answer, process, number)
                is_last = number + self.num_lanes >= len(self.calls)
                if self._is_left(answer, is_last):
                    answer.add_done_callback(lambda _, process=process: self._retire(process))
                    left.append(answer)
                    process = self._new_process()
                else:
                    answer.result()
        finally:
            process.end()
        for answer in left:
            answer.result()

    def _answer(self, process: "ScorerProcess", number: int) -> None:
        started = time.monotonic()
        self.scores[number] = process.call(self.calls[number])
        self.durations.append(time.monotonic() - started)

    def _is_left(self, answer: Future, is_last: bool) -> bool:
        """Waits for the answer; True if it is overdue and there is a spare to go on with."""
        started = time.monotonic()
        while True:
            if not wait([answer], timeout=None if is_last else PATIENCE_S / 4).not_done:
                return False
            typical = statistics.median(self.durations) if self.durations else 0.0
            is_overdue = time.monotonic() - started > max(PATIENCE_S, PATIENCE_FACTOR * typical)
            if is_overdue and self.spares.acquire(blocking=False):
                return True

    def _new_process(self) -> "ScorerProcess":
        self.processes.append(ScorerProcess(self.mould))
        return self.processes[-1]

    def _retire(self, process: "ScorerProcess") -> None:
        process.end()
        self.spares.release()


class ScorerProcess:
    """One process at a time, started when first needed and again after it was ended."""

    def __init__(self, mould: Mould):
        self.mould = mould
        self.process: Connection | None = None
        self.number = 0

    def start(self) -> None:
        """Starts a process unless there is one that can be called."""
        if self.process is not None and self.process.is_spoiled():
            self.end()
        if self.process is None:
            self.process = self.mould.worker()

    def call(self, call: Call) -> Score:
        """Calls the function once, within the time limit."""
        self.start()
        limit = self.mould.target.time_limit_s
        self.number += 1
        request = {
            "number": self.number,
            "arguments": {name: call.arguments[name] for name in self.mould.wanted},
            "seed": call.seed,
            "alarm_s": 2 * limit + 1,
        }
        try:
            return _score(self.process.exchange(request, limit), self.number)
        except TimeoutError:
            self.end()
            return Score(None, f"no answer within {limit:g} s")
        except Ended:
            return Score(None, told_end(self.end(CRASH_GRACE_S)))

    def kill(self) -> None:
        """Ends the process and all that it started; a call in progress then returns a failure."""
        process = self.process
        if process is not None:
            process.kill()

    def end(self, grace_s: float = 0.0) -> int | None:
        """Ends the process, if there is one; its exit status, if it had ended by itself."""
        process, self.process = self.process, None
        return None if process is None else self.mould.collect(process, grace_s)


def _score(reply: Mapping, number: int) -> Score:
    value, failure = reply.get("value"), reply.get("failure")
    is_answer = isinstance(value, float) if failure is None else isinstance(failure, str)
    if reply.get("number") != number or not is_answer:
        raise Ended
    return Score(value, None) if failure is None else Score(None, failure)
