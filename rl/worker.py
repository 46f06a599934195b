"""The resident worker: a process that keeps one mesh or several, with weights and programs.

1. A client starts it with the lock of a results folder and layout, and it listens at their socket;
   in a SLURM allocation `srun` starts it, and it listens to the other nodes too.
2. Requests queue in the order of their arrival; the main thread runs one at a time.
3. Before the first it takes the lock of each device, asking whoever holds one to leave when idle.
4. A stage may stop early, and does not publish, once its client or workflow has died.
5. It retires when told, when idle, when its workflows have ended, when its code has changed, or
   when its files were removed; requests not yet taken up are sent back, to find another worker.
   SIGTERM ends it at once, with a word to those who wait.

What it holds is only a cache: killed at any moment, it leaves nothing that anyone would trust.
"""

import argparse
import faulthandler
import os
import socket
import sys
import threading
import time

from rl.context import Context
from rl.errors import ClientGone, MeshdialError
from rl.processes import accelerators, liveness, pool, runtime, wire
from rl.processes.devices import Devices
from rl.processes.job import Job
from rl.processes.launch import run_stage
from rl.processes.lifetime import Lifetime
from rl.processes.liveness import TICK_S
from rl.processes.runtime import Place
from rl.processes.wire import SEND_S, Listener

FIRST_MATCH_S = 2.0  # a new worker lets clients of other code wait this long for its own client
CHANGED = "its code, layout, Python or JAX settings are not this client's"


class Worker:
    """What the main thread (stages), the listener and the watch share; `changed` guards it."""

    def __init__(self, place: Place, lock: int | None, launcher: str, fingerprint: str):
        self.place, self.lock, self.fingerprint = place, lock, fingerprint
        self.identity = {**liveness.identify(os.getpid()), "root": place.root}
        layouts = runtime.parse_process_layout(place.layout)
        names = accelerators.device_names(layouts, launcher)
        self.devices = Devices(names, {**self.identity, "socket": place.socket})
        meshes = [layout.name for layout in layouts]
        self.facts = {"launcher": launcher, "meshes": meshes, "devices": names}
        self.memory: dict = {}
        self.changed = threading.Condition()
        self.queue: list[Job] = []
        self.running: Job | None = None
        self.notice = ""
        self.reason = ""  # why it retires; empty while it does not
        self.lifetime = Lifetime()
        self.started = time.monotonic()
        self.grace_s = runtime.seconds("MESHDIAL_WORKER_GRACE_S")
        self.listeners = [wire.listen_at(place.socket)]
        self.socket_file = os.stat(place.socket)

    def listen_to_nodes(self, peer: str) -> None:
        """Take connections from the other nodes of the allocation, of which `peer` is one."""
        listener, address = pool.listen(self.place, peer)
        self.listeners.append(listener)
        pool.publish(self.place, listener.port, address, self.identity)

    # The main thread: one stage at a time.
    def serve(self) -> None:
        """Run stages until it is time to retire."""
        listening = [liveness.start_thread(self._accept, listener) for listener in self.listeners]
        liveness.start_thread(self._watch)
        say(f"ready for {self.place.root}, {self.place.layout}")
        while (job := self._next_job()) is not None:
            try:
                self._finish(job, self._perform(job))
            except ClientGone as reason:
                self._finish(job, {"event": "failed", "message": str(reason)})
            finally:
                with self.changed:
                    self.running = None
                    self.lifetime.note_end()
                job.is_over.set()
        for thread in listening:
            thread.join()

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
        if self.lifetime.num_served == 0:
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
        self.lifetime.num_served += 1
        log_size = os.path.getsize(self.place.log) if os.path.exists(self.place.log) else 0
        job.tell("started", pid=os.getpid(), log_size=log_size)
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

        is_taken = self.devices.take(
            wait, {"op": "yield", "workflows": list(self.lifetime.workflows)}
        )
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

    # A thread for each listener, and one for each connection.
    def _accept(self, listener: Listener) -> None:
        """Take connections until retirement, then leave the lock to a successor."""
        while not self.reason:
            connection = listener.accept()
            if connection is not None:
                words = (listener, connection)
                threading.Thread(target=self._talk, args=words, daemon=True).start()
        listener.close()
        if self.lock is not None:
            os.close(self.lock)

    def _talk(self, listener: Listener, connection: socket.socket) -> None:
        channel = listener.admit(connection)
        if channel is None:
            return
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
            self.lifetime.note_request(job.workflow)
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
                self._stop(is_urgent=message.get("is_urgent", False))
            elif message["op"] == "yield" and self._can_yield(message["workflows"]):
                self.retire("another worker needs its device")
            return {
                "event": "retiring" if self.reason else "busy",
                **self.identity,
                **self.facts,
                "stage": self.running.request["stage"] if self.running else "",
                "num_waiting": len(self.queue),
                "idle_s": 0.0 if self.running else self.lifetime.idle_seconds(),
                "memory_bytes": liveness.resident_bytes(),
            }

    def _can_yield(self, theirs: list[dict]) -> bool:
        is_idle = not (self.running or self.queue)
        return is_idle and self.lifetime.can_yield(theirs)

    # Retirement.
    def _stop(self, is_urgent: bool) -> None:
        self.retire("it was told to stop")
        if is_urgent:
            pool.forget(self.place)
            say("ends at once, as it was told")
            os._exit(1)

    def end(self) -> None:
        """Say to all who wait that there is no more time, as at the end of a SLURM job."""
        self.retire("it was told to end (SIGTERM)")
        job = self.running
        if job is not None:
            self._finish(job, {"event": "failed", "message": f"the worker leaves: {self.reason}"})
        pool.forget(self.place)
        say(f"leaves at once: {self.reason}")

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
            if self.place.endpoint:
                pool.retire(self.place)
        self.devices.announce_retirement()
        for job in waiting:
            job.tell(**self._sent_back())
            job.is_over.set()

    def _watch(self) -> None:
        while True:
            time.sleep(TICK_S)
            with self.changed:
                reason = self._reason_to_leave()
                if reason:
                    self.retire(reason)
            self._cut_off_abandoned()

    def _reason_to_leave(self) -> str:
        is_found = not self.place.endpoint or os.path.exists(self.place.endpoint)
        if not (is_found and self._is_socket_own() and self.devices.are_in_place()):
            return "its files in the runtime folder were removed"
        is_wanted = self.running is not None and not self.running.is_gone()
        return self.lifetime.end_reason(is_wanted or bool(self.queue), self.running is not None)

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
    """Serve the current directory and one layout, whose lock the starting client has taken."""
    parser = argparse.ArgumentParser(prog="python -m rl.worker", description=__doc__)
    parser.add_argument("--layout", required=True, help="the mesh, or several joined by +")
    parser.add_argument("--launcher", required=True, help="what started it: warm, shared or pool")
    parser.add_argument("--fingerprint", required=True, help="of the client that starts it")
    parser.add_argument("--lock", type=int, help="open descriptor of the lock")
    parser.add_argument("--peer", help="pool: the node of the client that starts it")
    arguments = parser.parse_args()
    faulthandler.enable(all_threads=False)
    if arguments.lock is not None:
        os.set_inheritable(arguments.lock, False)
    sys.path.append(os.getcwd())
    try:
        worker = make_worker(arguments)
    except MeshdialError as error:
        sys.exit(str(error))
    liveness.end_on_sigterm(worker.end)
    worker.serve()
    pool.forget(worker.place)
    say(f"leaves: {worker.reason}")
    os._exit(0)  # what its stages left running must not keep the device


def make_worker(arguments: argparse.Namespace) -> Worker:
    """A worker that listens; JAX has its settings."""
    find_place = pool.place_of if arguments.peer else runtime.place_of
    place = find_place(os.getcwd(), arguments.layout)
    worker = Worker(place, arguments.lock, arguments.launcher, arguments.fingerprint)
    layouts = runtime.parse_process_layout(arguments.layout)
    accelerators.configure_jax(layouts, arguments.launcher)
    if arguments.peer:
        worker.listen_to_nodes(arguments.peer)
    else:
        runtime.write_holder(arguments.lock, worker.identity)
    return worker


def say(text: str) -> None:
    """A line in the worker's log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} worker {os.getpid()}: {text}", flush=True)


if __name__ == "__main__":
    main()
