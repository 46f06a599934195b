"""Messages between a client and a worker: one JSON object a line, over a connected socket.

A client sends one message and keeps the connection open; its end tells the worker that the client
has gone. The worker answers `run` with `accepted`, `progress` lines, `started`, and one of `done`,
`failed` or `retiring` (ask again: this worker is leaving). `status`, `stop` and `yield` get one
answer.

Two kinds of address serve: the path of a Unix socket, which only its owner can reach, and for a
worker on another node a TCP port, where both ends first show that they know the same secret.
"""

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from rl.processes.liveness import TICK_S

CONNECT_S = 5.0
SEND_S = 10.0  # a receiver that has not read for this long counts as gone
MAX_MESSAGE_BYTES = 64 << 20
BACKLOG = 64
MAX_STRANGERS = 32  # connections that have not yet shown that they know the secret
KEEPALIVE_S, MAX_LOST_KEEPALIVES = 15, 4  # so a node that is lost is missed after about a minute


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

        TimeoutError after `wait_s` seconds, ValueError for what is no message.
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
            except OSError:
                return None
            if not chunk:
                return None
            self._unread += chunk
            if len(self._unread) > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
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


def connect_tcp(host: str, port: int, secret: bytes) -> Channel | None:
    """A channel to the one who listens there and knows `secret`; None if nobody does."""
    from rl.processes import authentication

    try:
        connection = socket.create_connection((host, port), CONNECT_S)
    except OSError:
        return None
    if not authentication.call(connection, secret):
        connection.close()
        return None
    _notice_lost_peers(connection)
    return Channel(connection)


def _notice_lost_peers(connection: socket.socket) -> None:
    """Have the kernel ask a silent peer whether it is there; it ends the connection if not."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MAX_LOST_KEEPALIVES)


class Listener:
    """Takes the connections of a listening socket that only its owner can reach."""

    def __init__(self, listener: socket.socket):
        listener.listen(BACKLOG)
        listener.settimeout(TICK_S)
        self._listener = listener

    def accept(self) -> socket.socket | None:
        """The next connection, or None if there is none for a while."""
        try:
            return self._listener.accept()[0]
        except (TimeoutError, ConnectionError):
            return None

    def admit(self, connection: socket.socket) -> Channel | None:
        """A channel over the connection; None for one that has no business here."""
        return Channel(connection)

    def close(self) -> None:
        self._listener.close()


def listen_at(path: str) -> Listener:
    """Listen at `path`; whatever lies there must be a dead process's."""
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    return Listener(listener)


class TcpListener(Listener):
    """Listens at a free port of `host` for those who know `secret`.

    Of the others at most `MAX_STRANGERS` are connected at a time, each for `CONNECT_S` at most;
    one more ends the oldest, so that they cannot keep out who knows the secret and is quick.
    """

    def __init__(self, host: str, secret: bytes):
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        super().__init__(socket.create_server((host, 0), family=family))
        self.port = self._listener.getsockname()[1]
        self._secret = secret
        self._strangers: list[socket.socket] = []
        self._changing = threading.Lock()

    def accept(self) -> socket.socket | None:
        connection = super().accept()
        with self._changing:
            if connection is not None:
                self._strangers.append(connection)
            if len(self._strangers) > MAX_STRANGERS:
                _hang_up(self._strangers.pop(0))
        return connection

    def admit(self, connection: socket.socket) -> Channel | None:
        from rl.processes import authentication

        is_known = authentication.answer(connection, self._secret)
        with self._changing:
            if connection in self._strangers:
                self._strangers.remove(connection)
        if not is_known:
            connection.close()
            return None
        _notice_lost_peers(connection)
        return Channel(connection)


def _hang_up(connection: socket.socket) -> None:
    """End a connection in whose hands another thread waits; it is left to that thread to close."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other end was quicker


def ask(path: str, message: dict, wait_s: float = CONNECT_S) -> dict | None:
    """The one answer to `message` of who listens at `path`; None if nobody does, or in time."""
    return ask_over(connect(path), message, wait_s)


def ask_over(channel: Channel | None, message: dict, wait_s: float = CONNECT_S) -> dict | None:
    """The one answer to `message`, after which the channel is closed."""
    if channel is None:
        return None
    try:
        return channel.receive(wait_s) if channel.send(message) else None
    except TimeoutError:
        return None
    finally:
        channel.close()
