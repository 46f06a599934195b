"""Contenders side by side: each in a process of its own, all on the same cores, taking turns.

1. Every contender starts, prepares and runs once; one that cannot is named and left out.
2. In each round every contender runs once, while the others wait: noise hits all alike.
3. The table gives medians with their spread, and how many times ours is each of the others.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "peers"
ENVIRONMENTS = ROOT / ".peers"
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


@dataclass(frozen=True)
class Contender:
    """`script` is a module of bench/peers; `environment` the one that it runs in, None for ours."""

    name: str
    script: str
    environment: str | None = None
    options: dict = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.environment is None

    def python(self, environments: Path) -> Path:
        if self.is_ours:
            return Path(sys.executable)
        return environments / self.environment / "bin" / "python"


@dataclass
class Worker:
    """A contender's process. `first` is its answer to the warm-up."""

    contender: Contender
    process: subprocess.Popen
    errors: tempfile.SpooledTemporaryFile
    first: dict = field(default_factory=dict)
    repetitions: list[dict] = field(default_factory=list)

    def ask(self, line: str) -> dict:
        """Send a line and wait for the answer; EOFError where the process has ended."""
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise EOFError
        return json.loads(answer)

    def said(self) -> str:
        """The last line of what it printed."""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every measurement has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--contenders", nargs="+", help="only these (default: all)")
    options.add_argument("--repetitions", type=int, default=5)
    options.add_argument("--cores", type=int, default=1, help="how many, the same for all")
    options.add_argument("--first-core", type=int, help="default: the first that is allowed")
    options.add_argument("--peers", type=Path, default=ENVIRONMENTS, help="their environments")
    options.add_argument("--json", type=Path, help="a file for every single figure")
    return options


def pin(arguments: argparse.Namespace) -> list[int]:
    """Hold this process, and so every contender, to the same cores."""
    allowed = sorted(os.sched_getaffinity(0))
    start = allowed.index(arguments.first_core) if arguments.first_core is not None else 0
    cores = allowed[start : start + arguments.cores]
    if len(cores) < arguments.cores:
        sys.exit(f"--cores {arguments.cores}: only the cores {allowed} are allowed here")
    os.sched_setaffinity(0, cores)
    return cores


def chosen(contenders: Sequence[Contender], names: list[str] | None) -> list[Contender]:
    known = {contender.name: contender for contender in contenders}
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        sys.exit(f"no contender {unknown[0]!r}, expected some of {', '.join(known)}")
    return [known[name] for name in names or known]


def take_turns(
    contenders: Sequence[Contender], job: dict, arguments: argparse.Namespace
) -> list[Worker]:
    """Those that ran, with their figures."""
    workers = []
    try:
        for contender in contenders:
            worker = started(contender, job, arguments)
            if worker is not None:
                workers.append(worker)
        for number in range(arguments.repetitions):
            for worker in list(workers):
                try:
                    worker.repetitions.append(worker.ask("again"))
                except EOFError:
                    print(f"{worker.contender.name} ended: {worker.said()}", flush=True)
                    workers.remove(worker)
                    worker.stop()
            print(f"round {number + 1} of {arguments.repetitions}", file=sys.stderr, flush=True)
    finally:
        for worker in workers:
            worker.stop()
    return workers


def started(contender: Contender, job: dict, arguments: argparse.Namespace) -> Worker | None:
    """A worker that has run once; None, said aloud, where it is not installed or fails."""
    python = contender.python(arguments.peers)
    if not python.exists():
        install = f"python bench/install_peers.py {contender.environment}"
        print(f"{contender.name} is not installed: {install} --into {arguments.peers}")
        return None
    errors = tempfile.TemporaryFile()
    process = subprocess.Popen(
        [str(python), str(SCRIPTS / f"{contender.script}.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment(arguments.cores),
    )
    worker = Worker(contender, process, errors)
    try:
        worker.first = worker.ask(json.dumps(job | contender.options | {"cores": arguments.cores}))
    except EOFError:
        print(f"{contender.name} failed: {worker.said()}", flush=True)
        worker.stop()
        return None
    print(f"{contender.name} is ready: {worker.first['version']}", file=sys.stderr, flush=True)
    return worker


def environment(cores: int) -> dict[str, str]:
    """As few threads as cores, nothing looked up on a hub, no compile cache."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "OMP_NUM_THREADS": str(cores),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    if cores == 1:
        settings["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()
    return os.environ | settings


def table(workers: Sequence[Worker]) -> list[str]:
    """Markdown: a row for each contender, and a column for how many times each of ours is it."""
    ours = [worker for worker in workers if worker.contender.is_ours]
    heads = ["", "tokens per CPU-second", "spread", "CPU-seconds"]
    heads += [f"{worker.contender.name} is, CPU (wall)" for worker in ours]
    heads += ["first run, more by", "peak memory"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for worker in workers:
        rates = [rate(figures, "cpu_seconds") for figures in worker.repetitions]
        cpu_seconds = statistics.median(figures["cpu_seconds"] for figures in worker.repetitions)
        cells = [worker.contender.name, short(statistics.median(rates)), spread(rates)]
        cells.append(short(cpu_seconds))
        cells += ["" if our is worker else times(our, worker) for our in ours]
        cells.append(f"{max(worker.first['cpu_seconds'] - cpu_seconds, 0):.1f} s")
        cells.append(f"{max(f['peak_bytes'] for f in worker.repetitions) / 2**30:.2f} GiB")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def times(our: Worker, their: Worker) -> str:
    """Ratio of medians, the spread of the rounds' own ratios, and the ratio of wall clocks."""
    cpu, wall = (
        statistics.median(rate(figures, clock) for figures in our.repetitions)
        / statistics.median(rate(figures, clock) for figures in their.repetitions)
        for clock in ("cpu_seconds", "seconds")
    )
    pairs = zip(our.repetitions, their.repetitions, strict=True)
    each = [rate(a, "cpu_seconds") / rate(b, "cpu_seconds") for a, b in pairs]
    return f"{cpu:.2f} times, {spread(each)} ({wall:.2f})"


def rate(figures: dict, clock: str) -> float:
    return figures["tokens"] / figures[clock]


def spread(values: Sequence[float]) -> str:
    return f"{short(min(values))} to {short(max(values))}"


def short(value: float) -> str:
    """Three digits, and never an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def write(path: Path | None, workers: Sequence[Worker], **about) -> None:
    """Every figure of every round, with what was run."""
    if path is None:
        return
    found = {
        worker.contender.name: {"first": worker.first, "repetitions": worker.repetitions}
        for worker in workers
    }
    path.write_text(json.dumps(about | {"contenders": found}, indent=1) + "\n")


def extras() -> dict[str, list[str]]:
    """What each environment of peers holds: the extras of pyproject.toml that begin with bench-."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    return {k.removeprefix("bench-"): v for k, v in optional.items() if k.startswith("bench-")}
