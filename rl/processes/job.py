"""One request to a worker, from its arrival to its answer."""

import threading
import time

from rl.errors import ClientGone
from rl.processes import liveness
from rl.processes.wire import Channel


class Job:
    """A request and the connection of the client that waits for it."""

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
        """Have the client print a line."""
        self.tell("progress", line=line)

    def check_alive(self) -> None:
        """Raises ClientGone once nobody waits for this job."""
        if self.is_gone():
            raise ClientGone(f"nobody waits for {self.request['stage']} any more")

    def is_gone(self) -> bool:
        """Whether the client or its workflow has ended; once true it stays true."""
        if self.gone_since is None and not self._is_wanted():
            self.gone_since = time.monotonic()
        return self.gone_since is not None

    def _is_wanted(self) -> bool:
        is_client_there = self._channel.is_open() and liveness.is_alive(self.request["client"])
        return is_client_there and (self.workflow is None or liveness.is_alive(self.workflow))
