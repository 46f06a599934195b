"""Messages between a client and a worker: one JSON object a line, over a connected socket.

A client sends one message and keeps the connection open; its end tells the worker that the client
has gone. The worker answers `run` with `accepted`, `progress` lines, `started`, and one of `done`,
`failed` or `retiring` (ask again: this worker is leaving). `status`, `stop` and `yield` get one
answer.
"""

import json
import select
import socket
import time
from collections.abc import Callable

from rl.liveness import TICK_S

CONNECT_S = 5.0
SEND_S = 10.0  # a receiver that has not read for this long counts as gone


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(SEND_S)
        self.connection = connection
        self._unread = b""

    def send(self, message: dict) -> bool:
        """Whether the other end took it, as far as one can know."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(
        self, wait_s: float | None, check: Callable[[], None] = lambda: None
    ) -> dict | None:
        """The next message, or None when the other end is closed; `check` is called meanwhile.

        TimeoutError after `wait_s` seconds.
        """
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while b"\n" not in self._unread:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
            check()
            if not self._is_readable(TICK_S):
                continue
            try:
                chunk = self.connection.recv(1 << 16)
            except ConnectionError:
                return None
            if not chunk:
                return None
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def is_open(self) -> bool:
        """Whether the other end still holds the connection; unread messages are left unread."""
        try:
            return not self._is_readable(0) or self.connection.recv(1, socket.MSG_PEEK) != b""
        except OSError:
            return False

    def _is_readable(self, wait_s: float) -> bool:
        poll = select.poll()  # unlike select, it takes any number of open files
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))

    def close(self) -> None:
        self.connection.close()


def connect(path: str) -> Channel | None:
    """A channel to whoever listens at `path`; None if nobody does, or too many call at once."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(CONNECT_S)
    try:
        connection.connect(path)
    except (FileNotFoundError, ConnectionError, TimeoutError, BlockingIOError):
        connection.close()
        return None
    return Channel(connection)


def ask(path: str, message: dict, wait_s: float = CONNECT_S) -> dict | None:
    """The one answer to `message`; None if nobody listens or answers in time."""
    channel = connect(path)
    if channel is None:
        return None
    try:
        return channel.receive(wait_s) if channel.send(message) else None
    except TimeoutError:
        return None
    finally:
        channel.close()
