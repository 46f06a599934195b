"""What the tests of client and worker share: a runtime folder of their own, and its end."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rl import cli

REPOSITORY = Path(__file__).resolve().parent.parent
PATIENCE_S = 20.0


class Field:
    """A results folder, the clients that were started in it, and the workers these started."""

    def __init__(self, root: Path):
        self.root = root
        self.processes: list[subprocess.Popen] = []

    def start(self, *orders, root=None, stage="stub", launcher="warm", options=(), **environment):
        """Start a client whose stage carries out `orders`; returns its process."""
        command = [sys.executable, "-m", "rl.client", stage, "--launcher", launcher]
        command += ["--config", json.dumps({"orders": orders}), "--output", "out=out.txt", *options]
        return self.spawn(command, root, **environment)

    def spawn(self, command, root=None, **environment):
        process = subprocess.Popen(
            command,
            cwd=root or self.root,
            env=os.environ | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    def call(self, *orders, **options):
        """Run a client to its end; returns (exit status, stdout, stderr)."""
        return self.finish(self.start(*orders, **options))

    def finish(self, process):
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        return process.returncode, stdout, stderr

    def until(self, condition):
        """Wait for `condition()` to be true; returns its value."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := condition()):
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.02)
        return value

    def workflow(self):
        """A process to stand for the workflow."""
        return self.spawn(["sleep", "600"])

    def notes(self, root=None):
        """The (worker pid, text) that stages have noted, in order."""
        path = Path(root or self.root, "notes.txt")
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[0]), line.split(maxsplit=1)[1]) for line in lines]

    def until_noted(self, text, root=None):
        """Wait for a note; returns the pid of the worker that wrote it."""
        return self.until(lambda: [pid for pid, said in self.notes(root) if said == text])[-1]

    def workers(self):
        return cli.find_workers()

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        cli.main(["worker", "stop", "--all", "--now"])


@pytest.fixture
def field(tmp_path, monkeypatch):
    """Clients and workers of a runtime folder that no other test uses."""
    folder = tempfile.mkdtemp(prefix="meshdial-test-", dir="/tmp")
    for name in list(os.environ):
        if name.startswith("MESHDIAL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MESHDIAL_RUNTIME_DIR", folder)
    monkeypatch.setenv("MESHDIAL_STAGES_MODULE", "stub_stages")
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "root"
    root.mkdir()
    field = Field(root)
    yield field
    field.close()
    shutil.rmtree(folder)
