"""How the C++ attention kernel is built once for a machine, and what happens where it cannot be."""

import os
import shutil
import subprocess
import sys

import pytest

from rl.rollout.attention import build, cpu


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, in a process that has not tried yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "_outcome", [])
    return tmp_path


def _script(folder, text: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_fails_leaves_no_kernel(cache, monkeypatch):
    script = "echo 'x.cc:1: warning: w' >&2; echo 'x.cc:2: error: no such thing' >&2; exit 1"
    monkeypatch.setenv("CXX", _script(cache, script))
    lines = []
    assert cpu.why_not(lines.append)
    assert "does not compile: x.cc:2: error: no such thing" in cpu.why_not(lines.append)
    assert len(lines) == 2 and lines[0].startswith("compiling the attention kernel with")
    assert lines[1] == f"attention runs without the C++ kernel: {cpu.why_not()}"
    assert not list((cache / "meshdial" / "kernels").glob("*/*"))


def test_a_compiler_that_makes_no_library(cache, monkeypatch):
    script = 'while [ "$1" != -o ] && [ $# -gt 1 ]; do shift; done; echo no library > "$2"'
    monkeypatch.setenv("CXX", _script(cache, script))
    assert "the attention kernel cannot be loaded" in cpu.why_not()


def test_no_compiler(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O9")
    assert "no C++ compiler: $CXX is 'no-such-compiler -O9'" in cpu.why_not()
    monkeypatch.setattr(cpu, "_outcome", [])
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(cache))
    assert "no C++ compiler: c++, g++, clang++ are missing" in cpu.why_not()


def test_switched_off(monkeypatch):
    monkeypatch.setenv("MESHDIAL_CPU_KERNEL", "0")
    assert cpu.why_not() == "MESHDIAL_CPU_KERNEL is 0"


def test_a_folder_of_others_is_refused(cache, monkeypatch):
    monkeypatch.setenv("CXX", _script(cache, "exit 1"))
    kernels = cache / "meshdial" / "kernels"
    kernels.mkdir(parents=True)
    kernels.chmod(0o777)
    assert "kernels has mode 0777, expected 0700" in cpu.why_not()
    kernels.chmod(0o700)
    monkeypatch.setattr(cpu, "_outcome", [])
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert f"kernels belongs to user {kernels.stat().st_uid}, not to you" in cpu.why_not()


@pytest.fixture(scope="module")
def library_path():
    return build.load(lambda line: None)._name


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is installed"
)
def test_processes_that_build_at_once_and_a_library_that_is_damaged(
    library_path, cache, monkeypatch
):
    script = 'while [ "$1" != -o ] && [ $# -gt 1 ]; do shift; done; [ "$2" ] || exit 0; sleep 3'
    monkeypatch.setenv("CXX", _script(cache, f'{script}; cp {library_path} "$2"'))
    code = "import sys; from rl.rollout.attention import build; build.load(sys.stdout.write)"
    racers = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [racer.communicate(timeout=120)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert any(text.startswith("compiling the attention kernel with") for text in said)
    (folder,) = (cache / "meshdial" / "kernels").iterdir()
    assert {path.suffix for path in folder.iterdir()} == {".so", ".sha256"}
    (library,) = folder.glob("*.so")
    assert folder.stat().st_mode & 0o777 == library.stat().st_mode & 0o777 == 0o700

    whole, lines = library.stat().st_size, []
    content = library.read_bytes()
    library.unlink()  # and not overwritten: it is loaded here
    library.write_bytes(content[: whole // 2])  # which would kill whoever loads it
    library.chmod(0o700)
    build.load(lines.append)
    assert len(lines) == 1 and library.stat().st_size == whole
    build.load(lines.append)
    assert len(lines) == 1
