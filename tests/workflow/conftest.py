"""A workplace: an empty folder in which Snakemake runs the workflow with workers of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rl.artifacts import artifact_id

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny.yaml"
LIMIT_S = 400


class Workplace:
    """Runs Snakemake in `folder`; its workers live in a private runtime folder until `close`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        # A socket's path has to be short.
        self.runtime = Path(tempfile.mkdtemp(prefix="md-", dir="/tmp"))
        self.environment = os.environ | {
            "MESHDIAL_RUNTIME_DIR": str(self.runtime),
            "MESHDIAL_WORKER_LINGER_S": "120",
            "PYTHONWARNINGS": "default",
        }

    def command(self, *arguments, config: Path = TINY) -> list[str]:
        return [
            *(
                str(Path(sys.executable).parent / "snakemake"),
                "--snakefile",
                str(ROOT / "Snakefile"),
            ),
            *("--workflow-profile", str(ROOT / "profiles" / "default"), "--cores", "2"),
            *("--directory", str(self.folder), "--configfile", str(config), *arguments),
        ]

    def run(self, *arguments, config: Path = TINY, expect: int = 0) -> str:
        """What Snakemake printed; it must exit with `expect`."""
        done = subprocess.run(
            self.command(*arguments, config=config),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == expect, done.stdout[-6000:]
        return done.stdout

    def start(self, *arguments, config: Path = TINY) -> subprocess.Popen:
        """Snakemake in a process group of its own, as a terminal would have it."""
        with (self.folder / "started.log").open("ab") as log:
            return subprocess.Popen(
                self.command(*arguments, config=config),
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def path(self, *parts: str) -> Path:
        return self.folder.joinpath("results", *parts)

    def worker_pids(self) -> list[int]:
        """The processes of this workplace's workers."""
        return pids_where(
            lambda entry: (
                b"rl.worker" in (entry / "cmdline").read_bytes()
                and str(self.runtime).encode() in (entry / "environ").read_bytes()
            )
        )

    def close(self) -> None:
        kill(self.worker_pids())
        shutil.rmtree(self.runtime, ignore_errors=True)


def pids_where(is_wanted) -> list[int]:
    """The processes whose folder below /proc passes."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if is_wanted(entry):
                pids.append(int(entry.name))
    return pids


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for(is_true, limit_s: float = LIMIT_S) -> None:
    """Until `is_true()`; fails after the limit."""
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def content_ids(folder: Path) -> dict[str, str]:
    """The content id of every artifact below a run's folder."""
    ids = {}
    for path in sorted(folder.rglob("*")):
        is_folder = path.is_dir() and (path / "manifest.json").exists()
        is_table = path.suffix == ".parquet"
        is_json = path.name in ("update.json", "checks.json")
        if is_folder or is_table or is_json:
            ids[str(path.relative_to(folder))] = artifact_id(path)
    return ids


@pytest.fixture
def workplace(tmp_path):
    place = Workplace(tmp_path / "place")
    yield place
    place.close()


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A workplace in which the tiny experiment has run undisturbed. Tests must not change it."""
    place = Workplace(tmp_path_factory.mktemp("finished"))
    place.printed = place.run()
    yield place
    place.close()


@pytest.fixture
def copied(finished, workplace):
    """A copy of the finished workplace to change, with Snakemake's records of it."""
    for name in ("results", ".snakemake"):
        shutil.copytree(finished.folder / name, workplace.folder / name, symlinks=True)
    return workplace
