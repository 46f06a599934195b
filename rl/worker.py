"""The resident worker: one process that keeps a device, its weights and its compiled programs.

1. A client starts it with the lock of a results folder and layout, and it listens at their socket.
2. Requests queue in the order of their arrival; the main thread runs one at a time.
3. Before the first it takes the lock of each device, asking whoever holds one to leave when idle.
4. A stage may stop early, and does not publish, once its client or workflow has died.
5. It retires when told, when idle, when its workflows have ended, when its code has changed, or
   when its files were removed; requests not yet taken up are sent back, to find another worker.

What it holds is only a cache: killed at any moment, it leaves nothing that anyone would trust.
"""

import argparse
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from rl import liveness, runtime
from rl.context import Context
from rl.devices import Devices
from rl.errors import ClientGone, MeshdialError
from rl.job import Job
from rl.launch import run_stage
from rl.liveness import TICK_S
from rl.runtime import Place
from rl.wire import SEND_S, Channel

FIRST_REQUEST_S = 30.0  # a worker that nobody ever asked ends after this
FIRST_MATCH_S = 2.0  # a new worker lets clients of other code wait this long for its own client
CHANGED = "its code, layout, Python or JAX settings are not this client's"


class Worker:
    """What the main thread (stages), the listener and the watch share; `changed` guards it."""

    def __init__(self, place: Place, lock: int, fingerprint: str):
        self.place, self.lock, self.fingerprint = place, lock, fingerprint
        self.identity = {**liveness.identify(os.getpid()), "root": place.root}
        self.devices = Devices({**self.identity, "socket": place.socket})
        self.memory: dict = {}
        self.changed = threading.Condition()
        self.queue: list[Job] = []
        self.running: Job | None = None
        self.num_served = 0
        self.notice = ""
        self.reason = ""  # why it retires; empty while it does not
        self.workflows: list[dict] = []
        self.workflows_ended: float | None = None
        self.started = self.active = time.monotonic()
        self.idle_s = runtime.seconds("MESHDIAL_WORKER_IDLE_S")
        self.linger_s = runtime.seconds("MESHDIAL_WORKER_LINGER_S")
        self.yield_s = runtime.seconds("MESHDIAL_WORKER_YIELD_S")
        self.grace_s = runtime.seconds("MESHDIAL_WORKER_GRACE_S")
        self.listener = _listen(place.socket)
        self.socket_file = os.stat(place.socket)

    # The main thread: one stage at a time.
    def serve(self) -> None:
        """Run stages until it is time to retire."""
        listening = _start_thread(self._accept)
        _start_thread(self._watch)
        say(f"ready for {self.place.root}, {self.place.layout}")
        while (job := self._next_job()) is not None:
            try:
                self._finish(job, self._perform(job))
            except ClientGone as reason:
                self._finish(job, {"event": "failed", "message": str(reason)})
            finally:
                with self.changed:
                    self.running, self.active = None, time.monotonic()
                job.is_over.set()
        listening.join()

    def _next_job(self) -> Job | None:
        with self.changed:
            while not self.reason:
                job = self._choose()
                if job is not None:
                    self.queue.remove(job)
                    self.running = job
                    return job
                self.changed.wait(TICK_S)
        return None

    def _choose(self) -> Job | None:
        """The first in the queue; but a new worker serves one of its own code before it retires
        for another's, or two clients of different code could replace workers for ever."""
        if self.num_served == 0:
            own = [job for job in self.queue if self._is_own(job)]
            if own or time.monotonic() - self.started < FIRST_MATCH_S:
                return own[0] if own else None
        return self.queue[0] if self.queue else None

    def _is_own(self, job: Job) -> bool:
        return job.request["fingerprint"] == self.fingerprint

    def _perform(self, job: Job) -> dict:
        if not self._is_own(job):
            self.retire(CHANGED)
            return self._sent_back()
        try:
            if not self._take_devices(job):
                return self._sent_back()
        except MeshdialError as error:
            return {"event": "failed", "message": str(error)}
        job.check_alive()
        self.num_served += 1
        job.tell("started", pid=os.getpid(), log_size=os.path.getsize(self.place.log))
        os.chdir(self.place.root)
        try:
            return run_stage(job.request, Context(self.memory, job.show, job.check_alive))
        except SystemExit as error:
            self.memory.clear()
            return {"event": "failed", "message": f"the stage tried to end the worker ({error})"}

    def _take_devices(self, job: Job) -> bool:
        def wait(line: str) -> bool:
            job.check_alive()
            self._announce(line)
            time.sleep(TICK_S)
            return not self.reason

        is_taken = self.devices.take(wait, {"op": "yield", "workflows": list(self.workflows)})
        self.notice = ""
        return is_taken

    def _announce(self, line: str) -> None:
        with self.changed:
            is_new, self.notice = line != self.notice, line
            listeners = [job for job in (self.running, *self.queue) if job]
        for job in listeners if is_new and line else []:
            job.show(line)

    def _sent_back(self) -> dict:
        return {"event": "retiring", "reason": self.reason}

    def _finish(self, job: Job, reply: dict) -> None:
        job.tell(**reply)
        outcome = reply.get("traceback") or reply.get("message") or reply["event"]
        say(f"{job.request['stage']} {job.request['run']} {job.request['iteration']}: {outcome}")

    # The listener's thread, and one for each connection.
    def _accept(self) -> None:
        """Take connections until retirement, then leave the lock to a successor."""
        while not self.reason:
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=self._talk, args=(Channel(connection),), daemon=True).start()
        self.listener.close()
        os.close(self.lock)

    def _talk(self, channel: Channel) -> None:
        try:
            message = channel.receive(SEND_S)
        except (TimeoutError, ValueError):
            message = None
        if message is not None and message["op"] == "run":
            self._attend(Job(message, channel))
        elif message is not None:
            channel.send(self._answer(message))
        channel.close()

    def _attend(self, job: Job) -> None:
        """Queue a job and stay until it is over, or until its client goes before its turn."""
        job.tell("accepted")
        if not self._enqueue(job):
            job.tell(**self._sent_back())
            return
        if self.notice:
            job.show(self.notice)
        while not job.is_over.wait(TICK_S):
            if job.is_gone() and self._withdraw(job):
                return

    def _enqueue(self, job: Job) -> bool:
        with self.changed:
            if self.reason:
                return False
            self.queue.append(job)
            self.active = time.monotonic()
            if job.workflow is not None and job.workflow not in self.workflows:
                self.workflows.append(job.workflow)
            self.changed.notify_all()
        return True

    def _withdraw(self, job: Job) -> bool:
        """Take a waiting job out of the queue; False if it is not waiting."""
        with self.changed:
            is_waiting = job in self.queue
            if is_waiting:
                self.queue.remove(job)
        return is_waiting

    def _answer(self, message: dict) -> dict:
        """To `status`, `stop`, and `yield` of a worker that wants this one's device."""
        with self.changed:
            if message["op"] == "stop":
                self.retire("it was told to stop")
            elif message["op"] == "yield" and self._can_yield(message["workflows"]):
                self.retire("another worker needs its device")
            return {
                "event": "retiring" if self.reason else "busy",
                **self.identity,
                "layout": self.place.layout,
                "stage": self.running.request["stage"] if self.running else "",
                "num_waiting": len(self.queue),
                "idle_s": 0.0 if self.running else time.monotonic() - self.active,
                "memory_bytes": liveness.resident_bytes(),
            }

    def _can_yield(self, theirs: list[dict]) -> bool:
        """When idle: for long, or with no workflow of its own but those that wait for it."""
        if self.running or self.queue:
            return False
        own = [workflow for workflow in self.workflows if liveness.is_alive(workflow)]
        is_long_idle = time.monotonic() - self.active >= self.yield_s
        return is_long_idle or all(workflow in theirs for workflow in own)

    # Retirement.
    def retire(self, reason: str) -> None:
        """Take up nothing more: the running stage is finished, the waiting ones are sent back."""
        with self.changed:
            if self.reason:
                return
            self.reason = reason
            waiting, self.queue = self.queue, []
            self.changed.notify_all()
            if self._is_socket_own():
                os.unlink(self.place.socket)  # so that those sent back do not come here again
        self.devices.announce_retirement()
        for job in waiting:
            job.tell(**self._sent_back())
            job.is_over.set()

    def _watch(self) -> None:
        while True:
            time.sleep(TICK_S)
            with self.changed:
                reason = self._reason_to_leave(time.monotonic())
                if reason:
                    self.retire(reason)
            self._cut_off_abandoned()

    def _reason_to_leave(self, now: float) -> str:
        if not (self._is_socket_own() and self.devices.are_in_place()):
            return "its files in the runtime folder were removed"
        self._forget_ended_workflows(now)
        is_busy = self.running is not None and not self.running.is_gone()
        if is_busy or self.queue:
            return ""
        if self.workflows_ended is not None and now - self.workflows_ended >= self.linger_s:
            return "its workflow has ended"
        limit = self.idle_s if self.num_served else min(self.idle_s, FIRST_REQUEST_S)
        is_idle = self.running is None and now - self.active >= limit
        return f"it was idle for {limit:.0f} s" if is_idle else ""

    def _forget_ended_workflows(self, now: float) -> None:
        """Note since when there has been none, if there was one."""
        had_any = bool(self.workflows)
        self.workflows = [workflow for workflow in self.workflows if liveness.is_alive(workflow)]
        if self.workflows:
            self.workflows_ended = None
        elif had_any:
            self.workflows_ended = now

    def _is_socket_own(self) -> bool:
        try:
            return os.path.samestat(self.socket_file, os.stat(self.place.socket))
        except FileNotFoundError:
            return False

    def _cut_off_abandoned(self) -> None:
        """End at once if a stage for which nobody waits does not stop: others may be waiting."""
        job = self.running
        if job and job.gone_since and time.monotonic() - job.gone_since > self.grace_s:
            say(f"{job.request['stage']} goes on though nobody waits for it; this worker ends")
            faulthandler.dump_traceback()
            os._exit(1)


def main() -> None:
    """Serve the current directory and one layout, with a lock that the starting client took."""
    parser = argparse.ArgumentParser(prog="python -m rl.worker", description=__doc__)
    parser.add_argument("--lock", type=int, required=True, help="open descriptor of the lock")
    parser.add_argument("--mesh", required=True, help="the device layout")
    parser.add_argument("--fingerprint", required=True, help="of the client that starts it")
    arguments = parser.parse_args()
    faulthandler.enable(all_threads=False)
    os.set_inheritable(arguments.lock, False)
    sys.path.append(os.getcwd())
    place = runtime.place_of(os.getcwd(), arguments.mesh)
    try:
        worker = Worker(place, arguments.lock, arguments.fingerprint)
        runtime.write_holder(arguments.lock, worker.identity)
        runtime.configure_jax(runtime.parse_layout(arguments.mesh))
    except MeshdialError as error:
        sys.exit(str(error))
    worker.serve()
    say(f"leaves: {worker.reason}")
    os._exit(0)  # what its stages left running must not keep the device


def _listen(path: str) -> socket.socket:
    """Listen at `path`; whatever lies there is a dead worker's, since this one has the lock."""
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    listener.settimeout(TICK_S)
    return listener


def _start_thread(target: Callable[[], None]) -> threading.Thread:
    """A thread without which the worker is of no use: if it breaks, the process ends."""

    def work() -> None:
        try:
            target()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def say(text: str) -> None:
    """A line in the worker's log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} worker {os.getpid()}: {text}", flush=True)


if __name__ == "__main__":
    main()
