"""The resident worker: one process that keeps a device, its weights and its compiled programs.

1. A client starts it with the lock of a results folder and layout, and it listens at their socket.
2. Requests queue in the order of their arrival; the main thread runs one at a time.
3. Before the first it takes the lock of each device, asking whoever holds one to leave when idle.
4. Each stage may stop early, and does not publish, once its client or workflow has died.
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

from rl import liveness, runtime
from rl.context import Context
from rl.errors import ClientGone, MeshdialError
from rl.launch import import_stages, run_stage
from rl.liveness import TICK_S
from rl.runtime import Place
from rl.wire import Channel, ask

FIRST_REQUEST_S = 30.0  # a worker that nobody asks anything ends after this
FIRST_MATCH_S = 2.0  # how long it lets clients of other code wait for the client that started it
SILENT_HOLDER_S = 60.0  # a device's holder that never answers for this long is an error


class Job:
    """One request, from its arrival to its answer."""

    def __init__(self, request: dict, channel: Channel):
        self.request = request
        self.workflow = request["parent"]
        self.is_over = threading.Event()
        self.gone_since: float | None = None
        self._channel = channel
        self._sending = threading.Lock()

    def tell(self, event: str, **more) -> None:
        """Send one message, whole, from any thread; a client that cannot take it counts as gone."""
        with self._sending:
            if self.gone_since is None and not self._channel.send({"event": event, **more}):
                self.gone_since = time.monotonic()

    def show(self, line: str) -> None:
        self.tell("progress", line=line)

    def check_alive(self) -> None:
        """Raises ClientGone once nobody waits for this job."""
        if self.gone_since is None and not self._is_wanted():
            self.gone_since = time.monotonic()
        if self.gone_since is not None:
            raise ClientGone(f"nobody waits for {self.request['stage']} any more")

    def _is_wanted(self) -> bool:
        is_client_alive = self._channel.is_open() and liveness.is_alive(self.request["client"])
        return is_client_alive and (self.workflow is None or liveness.is_alive(self.workflow))

    def is_gone(self) -> bool:
        try:
            self.check_alive()
        except ClientGone:
            return True
        return False


class Worker:
    """The state that the main thread (stages), the listener and the watch share, under one lock."""

    def __init__(self, place: Place, lock: int):
        self.place, self.lock = place, lock
        self.layout = runtime.parse_layout(place.layout)
        self.fingerprint = runtime.fingerprint(place.layout)
        self.memory: dict = {}
        self.devices: dict[str, int | None] = dict.fromkeys(runtime.device_locks())
        self.identity = liveness.identify(os.getpid())
        self.queue: list[Job] = []
        self.running: Job | None = None
        self.num_served = 0
        self.workflows: dict[tuple, dict] = {}
        self.workflows_gone_since: float | None = None
        self.started = self.active = time.monotonic()
        self.notice = ""
        self.is_retiring = False
        self.changed = threading.Condition()
        self.idle_s = runtime.seconds("MESHDIAL_WORKER_IDLE_S")
        self.linger_s = runtime.seconds("MESHDIAL_WORKER_LINGER_S")
        self.yield_s = runtime.seconds("MESHDIAL_WORKER_YIELD_S")
        self.grace_s = runtime.seconds("MESHDIAL_WORKER_GRACE_S")
