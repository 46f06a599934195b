"""Publishing: an output appears under its name whole, or not at all.

1. The writer works in a hidden folder beside the target, which it holds locked.
2. What it wrote is flushed to the disk.
3. Whoever asked for it is checked to be alive still; if not, nothing is published.
4. One rename gives it its name. In a group of processes, the first does that, when all are here.

A killed writer leaves a hidden folder that nothing reads; the kernel frees its lock, and the next
writer of the same target removes it.
"""

import errno
import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl import group
from rl.artifacts.content import plain_number
from rl.errors import MeshdialError

NO_SPACE = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


class Publisher:
    """Writes files and folders atomically; `check_alive` raises if the output is not wanted."""

    def __init__(self, check_alive: Callable[[], None] = lambda: None):
        self._check_alive = check_alive

    @contextmanager
    def file(self, path: str | Path) -> Iterator[Path]:
        """Yields a path to write a file to; it becomes `path` when the block ends well.

        In a group of processes, it is what the first one wrote.
        """
        target = Path(path)
        with self._publish(target) as workspace:
            yield workspace / (target.name if group.is_first() else f"unused-{group.rank()}")

    @contextmanager
    def directory(self, path: str | Path) -> Iterator[Path]:
        """Yields an empty folder to fill; it becomes `path`, replacing what was there, whole.

        A group of processes fills one folder together.
        """
        target = Path(path)
        with self._publish(target) as workspace:
            draft = workspace / target.name
            if group.is_first():
                draft.mkdir()
            group.barrier(f"draft of {target.name}")
            yield draft

    @contextmanager
    def _publish(self, target: Path) -> Iterator[Path]:
        """Yields the folder in which the draft has the target's name."""
        with group.reporting(), _disk_full_told(target):
            with _workspace(target) as workspace:
                yield workspace
                draft = workspace / target.name
                if draft.exists() or group.is_first():
                    _flush(draft)
                self._check_alive()
                group.barrier(f"{target.name} is written")
                if group.is_first():
                    _rename(draft, target)
            group.barrier(f"{target.name} is published")


def _rename(draft: Path, target: Path) -> None:
    if target.is_dir():  # a folder cannot be renamed onto another that has files
        target.rename(draft.parent / "replaced")
    draft.rename(target)
    _flush_one(target.parent)


@contextmanager
def _workspace(target: Path) -> Iterator[Path]:
    """A locked hidden folder beside the target, gone at the end, however that comes.

    The first process of a group makes it for all.
    """
    lock = None
    if group.is_first():
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        workspace, lock = _claim_workspace(target)
    try:
        yield Path(group.agree(str(workspace) if group.is_first() else ""))
    finally:
        if lock is not None:
            shutil.rmtree(workspace, ignore_errors=True)
            os.close(lock)


def _claim_workspace(target: Path) -> tuple[Path, int]:
    while True:
        workspace = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        try:
            lock = os.open(workspace / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # between our two calls a sweep took the folder for a dead writer's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue  # likewise
        except OSError:
            return workspace, lock  # a file system without locks: a sweep leaves all folders there
        if (workspace / "lock").exists():
            return workspace, lock
        os.close(lock)


def _remove_leftovers(target: Path) -> None:
    """Removes the workspaces of this target whose writers died: nobody holds their lock."""
    for leftover in target.parent.glob(glob.escape(_prefix(target)) + "*"):
        try:
            lock = os.open(leftover / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
        except OSError:
            pass  # its writer lives, or this file system cannot tell
        finally:
            os.close(lock)


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _flush(path: Path) -> None:
    """Puts a file, or a folder with all in it, on the disk before it gets its name."""
    for folder, _, files in os.walk(path):
        for name in files:
            _flush_one(Path(folder, name))
        _flush_one(Path(folder))
    if not path.is_dir():
        _flush_one(path)


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_full_told(target: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = _no_space(error)
        if reason is None:
            raise
        raise MeshdialError(f"{target} was not written: {reason}") from error


def _no_space(error: BaseException) -> str | None:
    """Why a write failed for want of room; the array libraries tell it in words only."""
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return NO_SPACE[error.errno]
    for code, reason in NO_SPACE.items():
        if os.strerror(code).lower() in str(error).lower():
            return reason
    return None


def write_json(publisher: Publisher, path: str | Path, value: Any) -> None:
    """Writes JSON with sorted keys and a newline at its end; NaN and infinity are refused."""
    try:
        text = json.dumps(
            value,
            sort_keys=True,
            indent=2,
            ensure_ascii=False,
            allow_nan=False,
            default=plain_number,
        )
    except ValueError as error:
        raise MeshdialError(f"{path} was not written: {error}") from error
    with publisher.file(path) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """Reads a JSON file; MeshdialError if it is missing or is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MeshdialError(f"{path} is missing") from None
    except ValueError as error:
        raise MeshdialError(f"{path} is not JSON: {error}") from None
