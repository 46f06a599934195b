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
import resource
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
                say(f"{job.request['stage']} is dropped: {reason}")
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
        self.num_served += 1
        job.tell("started", pid=os.getpid(), log_size=os.path.getsize(self.place.log))
        os.chdir(self.place.root)
        try:
            return run_stage(job.request, Context(self.memory, job.show, job.check_alive))
        except SystemExit as error:
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
        for job in listeners if is_new else []:
            job.show(line)

    def _sent_back(self) -> dict:
        return {"event": "retiring", "reason": self.reason}

    def _finish(self, job: Job, reply: dict) -> None:
        job.tell(**reply)
        say(f"{job.request['stage']} {job.request['run']} {job.request['iteration']}: {reply}")

    # The listener's thread, and one for each connection.
    def _accept(self) -> None:
        """Take connections until retirement, then leave socket and lock to a successor."""
        while not self.reason:
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=self._talk, args=(Channel(connection),), daemon=True).start()
        if self._is_socket_own():
            os.unlink(self.place.socket)
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
        """Queue a job and stay until it is over; drop it if its client goes before its turn."""
        job.tell("accepted")
        with self.changed:
            if not self.reason:
                self.queue.append(job)
                self.active = time.monotonic()
                if job.workflow is not None and job.workflow not in self.workflows:
                    self.workflows.append(job.workflow)
                self.changed.notify_all()
        if self.notice:
            job.show(self.notice)
        while not job.is_over.wait(TICK_S):
            with self.changed:
                is_waiting = job in self.queue
                if is_waiting and not self.reason and job.is_gone():
                    self.queue.remove(job)
            if job is not self.running and job not in self.queue:
                break
        if self.reason and not job.is_over.is_set():
            job.tell(**self._sent_back())
