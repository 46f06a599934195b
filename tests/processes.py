"""Several processes of one group on this machine, with CPU devices of their own, for tests."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_group(code: str, *arguments, num_processes=2, num_devices=2, timeout=120) -> list:
    """Runs Python code in each of `num_processes`, which have met; their CompletedProcess.

    `arguments` are `sys.argv[1:]`; JAX has `num_devices` in each process.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from rl import group; group.join()\n" + textwrap.dedent(code)]
    started = [
        subprocess.Popen(
            [*command, *map(str, arguments)],
            cwd=ROOT,
            env=_environment(num_devices)
            | {
                "MESHDIAL_COORDINATOR": f"127.0.0.1:{port}",
                "MESHDIAL_NUM_PROCESSES": str(num_processes),
                "MESHDIAL_PROCESS_ID": str(number),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(num_processes)
    ]
    try:
        said = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *words)
        for process, words in zip(started, said, strict=True)
    ]


def run_alone(code: str, *arguments, num_devices=4, timeout=120) -> subprocess.CompletedProcess:
    """Runs Python code in one process with `num_devices` CPU devices."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=ROOT,
        env=_environment(num_devices),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def _environment(num_devices: int) -> dict[str, str]:
    own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices), "XLA_FLAGS": ""}
    return {**os.environ, **own, "PYTHONPATH": str(ROOT)}
