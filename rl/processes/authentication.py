"""Two ends of a TCP connection show each other that they know one secret, before anything else.

1. The listener sends a greeting and 32 random bytes.
2. The caller answers with 32 random bytes of its own and an HMAC-SHA256 over both.
3. The listener checks it, and answers with an HMAC of its own, which the caller checks.

Neither proof can be replayed, since both ends choose part of what is signed, nor sent back to whom
it came from, since the two differ. Everything has a fixed size and must arrive within seconds. What
follows is neither encrypted nor signed: the secret keeps other users of a cluster out, and the
network between its nodes is trusted to deliver what was sent.
"""

import hmac
import os
import socket
import time

from rl.errors import MeshdialError
from rl.processes import runtime

GREETING = b"meshdial 1\n"
SIZE = 32  # bytes of a secret, of a random number, of a proof
PATIENCE_S = 5.0


def call(connection: socket.socket, secret: bytes) -> bool:
    """The caller's part: whether the listener knows the secret."""
    deadline = time.monotonic() + PATIENCE_S
    greeting = _read(connection, len(GREETING) + SIZE, deadline)
    if not greeting.startswith(GREETING):
        return False
    theirs, own = greeting[len(GREETING) :], os.urandom(SIZE)
    _write(connection, own + _proof(secret, b"caller", theirs, own))
    return _is_proof(_read(connection, SIZE, deadline), secret, b"listener", theirs, own)


def answer(connection: socket.socket, secret: bytes) -> bool:
    """The listener's part: whether the caller knows the secret."""
    deadline = time.monotonic() + PATIENCE_S
    own = os.urandom(SIZE)
    _write(connection, GREETING + own)
    reply = _read(connection, 2 * SIZE, deadline)
    theirs, proof = reply[:SIZE], reply[SIZE:]
    if not _is_proof(proof, secret, b"caller", own, theirs):
        return False
    _write(connection, _proof(secret, b"listener", own, theirs))
    return True


def _proof(secret: bytes, side: bytes, of_listener: bytes, of_caller: bytes) -> bytes:
    return hmac.digest(secret, GREETING + side + b"\n" + of_listener + of_caller, "sha256")


def _is_proof(found: bytes, secret: bytes, side: bytes, *numbers: bytes) -> bool:
    return hmac.compare_digest(found, _proof(secret, side, *numbers))


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly `size` bytes; fewer if the other end stops or has not sent them by `deadline`."""
    received = b""
    while len(received) < size and (left_s := deadline - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            chunk = connection.recv(size - len(received))
        except OSError:
            break
        if not chunk:
            break
        received += chunk
    return received


def _write(connection: socket.socket, message: bytes) -> None:
    """A peer that is gone shows when it is next read from."""
    connection.settimeout(PATIENCE_S)
    try:
        connection.sendall(message)
    except OSError:
        pass


def secret_of(folder: str) -> bytes:
    """The secret in `folder`, which is made where it is missing; MeshdialError if others could
    know it."""
    path = os.path.join(folder, "secret")
    if not os.path.lexists(path):
        _make_secret(path)
    runtime.require_private(path, "file", 0o600)
    with open(path, "rb") as file:
        secret = file.read(SIZE + 1)
    if len(secret) != SIZE:
        raise MeshdialError(f"{path} has not {SIZE} bytes; remove it, so that it is made anew")
    return secret


def _make_secret(path: str) -> None:
    """Whole at once and never replaced: of several that make it, all use the first one's."""
    draft = f"{path}.{os.urandom(8).hex()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, os.urandom(SIZE))
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        os.close(descriptor)
        os.unlink(draft)
