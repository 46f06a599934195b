"""Who may talk to a worker over TCP: those who know the secret, and nobody else for long."""

import os
import socket
import threading
import time

import pytest

from rl.errors import MeshdialError
from rl.processes import authentication, wire

SECRET = b"s" * authentication.SIZE


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


class Server:
    """Answers each message with itself, like a worker's listener and its threads."""

    def __init__(self):
        self.listener = wire.TcpListener("127.0.0.1", SECRET)
        self.port = self.listener.port
        self.strangers = []
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while not self.is_over.is_set():
            connection = self.listener.accept()
            if connection is not None:
                threading.Thread(target=self.talk, args=(connection,), daemon=True).start()

    def talk(self, connection):
        channel = self.listener.admit(connection)
        if channel is None:
            return
        message = channel.receive(2.0)
        if message is not None:
            channel.send(message)
        channel.close()

    def ask(self, message, secret=SECRET):
        return wire.ask_over(wire.connect_tcp("127.0.0.1", self.port, secret), message, 2.0)

    def dial(self):
        """A connection of someone who speaks by himself."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.settimeout(5.0)
        self.strangers.append(connection)
        return connection


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(authentication, "PATIENCE_S", 0.5)
    server = Server()
    yield server
    server.is_over.set()
    server.thread.join()
    server.listener.close()
    for connection in server.strangers:
        connection.close()


def read(connection, size):
    received = b""
    while len(received) < size and (chunk := connection.recv(size - len(received))):
        received += chunk
    return received


def is_ended(connection):
    """Whether the server has hung up without another word."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def greeted(server):
    connection = server.dial()
    greeting = read(connection, len(authentication.GREETING) + authentication.SIZE)
    return connection, greeting[len(authentication.GREETING) :]


def test_who_knows_the_secret_is_answered(server):
    assert server.ask({"n": 1}) == {"n": 1}
    assert server.ask({"n": "x" * 200_000}) == {"n": "x" * 200_000}


def test_another_secret_is_refused(server):
    assert server.ask({"n": 1}, b"t" * authentication.SIZE) is None


def test_nothing_is_read_from_a_stranger(server):
    connection, _ = greeted(server)
    connection.sendall(b'{"n": 1}\n' + b"x" * 55)
    assert is_ended(connection)


def test_a_stranger_with_much_to_say_is_cut_off(server):
    connection, _ = greeted(server)
    with pytest.raises(OSError):
        for _ in range(10_000):
            connection.sendall(b"x" * 100_000)
    assert server.ask({"n": 1}) == {"n": 1}


def test_a_proof_is_of_no_use_a_second_time(server):
    """What a listener overheard of an honest caller does not open another connection."""
    first, theirs = greeted(server)
    own = b"o" * authentication.SIZE
    words = own + authentication._proof(SECRET, b"caller", theirs, own)
    first.sendall(words)
    proof = read(first, authentication.SIZE)
    assert proof == authentication._proof(SECRET, b"listener", theirs, own)
    second, _ = greeted(server)
    second.sendall(words)
    assert is_ended(second)


def test_a_proof_is_of_no_use_to_whom_it_came_from(server):
    connection, theirs = greeted(server)
    connection.sendall(theirs + authentication._proof(SECRET, b"listener", theirs, theirs))
    assert is_ended(connection)


def test_a_slow_stranger_has_its_time(server):
    """A byte now and then does not prolong it."""
    connection, _ = greeted(server)
    began = time.monotonic()
    with pytest.raises(OSError):
        for _ in range(64):
            connection.sendall(b"x")
            time.sleep(0.1)
    assert time.monotonic() - began < 3.0


def test_many_strangers_do_not_keep_others_out(server, monkeypatch):
    monkeypatch.setattr(authentication, "PATIENCE_S", 20.0)
    strangers = [server.dial() for _ in range(3 * wire.MAX_STRANGERS)]
    assert server.ask({"n": 1}) == {"n": 1}
    assert len(server.listener._strangers) <= wire.MAX_STRANGERS
    read(strangers[0], len(authentication.GREETING) + authentication.SIZE)
    assert is_ended(strangers[0])


def test_a_listener_that_does_not_know_the_secret_is_left():
    """The port may be another program's by now: it learns nothing and is told nothing."""
    heard = []

    def pretend(listener):
        connection, _ = listener.accept()
        connection.sendall(authentication.GREETING + b"n" * authentication.SIZE)
        heard.append(read(connection, 2 * authentication.SIZE))
        connection.sendall(b"p" * authentication.SIZE)
        heard.append(read(connection, 1))
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        assert wire.connect_tcp("127.0.0.1", listener.getsockname()[1], SECRET) is None
        thread.join()
    assert heard[1] == b""
    assert SECRET not in heard[0]


def test_a_silent_listener_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(authentication, "PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert wire.connect_tcp("127.0.0.1", port, SECRET) is None
    assert wire.connect_tcp("127.0.0.1", port, SECRET) is None


def test_the_secret_is_made_once_and_private(folder):
    secrets = []
    together = threading.Barrier(8)

    def find():
        together.wait()
        secrets.append(authentication.secret_of(str(folder)))

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(secrets) == 8
    assert set(secrets) == {authentication.secret_of(str(folder))}
    assert len(secrets[0]) == 32
    assert secrets[0] != b"\0" * 32
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == ["secret"]


def test_a_secret_that_others_may_know_is_refused(folder, monkeypatch):
    authentication.secret_of(str(folder))
    (folder / "secret").chmod(0o640)
    with pytest.raises(MeshdialError, match="secret has mode 0640, expected 0600"):
        authentication.secret_of(str(folder))
    (folder / "secret").chmod(0o600)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(MeshdialError, match=f"belongs to user {own}, not to you"):
        authentication.secret_of(str(folder))


def test_a_secret_of_another_size_or_a_link_is_refused(folder):
    path = folder / "secret"
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(MeshdialError, match="has not 32 bytes"):
        authentication.secret_of(str(folder))
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")
    with pytest.raises(MeshdialError, match="is not a file"):
        authentication.secret_of(str(folder))
