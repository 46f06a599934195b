"""Where the time of an iteration goes: an experiment is run in an empty folder and measured.

    python bench/iteration.py --config configs/addition.yaml
    python bench/iteration.py --without-kl --without-evaluation

The first run fills the compile cache, the second one is measured. An iteration's wall time is that
between two `checks.json`; medians are over iterations 2 to the last. CPU-seconds are those of
Snakemake, its clients and the worker together, start-up included.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
STAGES = (
    *("sync_weights", "generate_rollouts", "score_rewards", "reference_logprobs"),
    *("estimate_advantages", "update_actor", "check_iteration"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "addition.yaml")
    parser.add_argument("--without-kl", action="store_true", help="no reference in the run")
    parser.add_argument("--without-evaluation", action="store_true")
    parser.add_argument("--cold-cache", action="store_true", help="measure a first run too")
    parser.add_argument("--cores", default="2")
    arguments = parser.parse_args()
    config = variant(arguments)
    with tempfile.TemporaryDirectory(prefix="md-", dir="/tmp") as folder:
        cache = Path(folder) / "cache" if arguments.cold_cache else None
        first = measure(config, Path(folder) / "first", arguments.cores, cache)
        if arguments.cold_cache:
            print(f"first run, nothing compiled: {told(first)}")
        report(measure(config, Path(folder) / "second", arguments.cores, cache), config)


def variant(arguments: argparse.Namespace) -> dict:
    config = yaml.safe_load(arguments.config.read_text())
    if arguments.without_kl:
        config.setdefault("algorithm", {})["kl"] = {"coefficient": 0}
    if arguments.without_evaluation:
        config["evaluation"] = {"every": 0}
    return config


def measure(config: dict, folder: Path, cores: str, cache: Path | None) -> dict:
    """{wall, cpu, timings by iteration, wall seconds of iterations} of one run."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    environment = os.environ | {
        "MESHDIAL_RUNTIME_DIR": str(runtime),
        "MESHDIAL_WORKER_LINGER_S": "600",
    }
    if cache is not None:
        environment["XDG_CACHE_HOME"] = str(cache)
    before = children_seconds()
    command = [
        *(str(Path(sys.executable).parent / "snakemake"), "--snakefile", str(ROOT / "Snakefile")),
        *("--workflow-profile", str(ROOT / "profiles" / "default"), "--cores", cores),
        *("--directory", str(folder), "--configfile", str(folder / "config.yaml")),
    ]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    snakemake_cpu = children_seconds() - before
    worker_cpu = stop_worker(runtime, folder, environment)
    run = folder / "results" / config["run"]
    iterations = sorted(path for path in run.iterdir() if path.name.isdigit())
    ends = [(path / "checks.json").stat().st_mtime for path in iterations[1:]]
    return {
        "cpu": snakemake_cpu + worker_cpu,
        "snakemake_cpu": snakemake_cpu,
        "walls": [end - start for start, end in itertools.pairwise(ends)],
        "timings": [timings(path) for path in iterations[2:]],
        "tokens": [json.loads((path / "update.json").read_text()) for path in iterations[2:]],
    }


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def stop_worker(runtime: Path, folder: Path, environment: dict) -> float:
    """CPU-seconds of the worker over its life; it is stopped."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or b"rl.worker" not in (entry / "cmdline").read_bytes():
            continue
        if str(runtime).encode() in (entry / "environ").read_bytes():
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    meshdial = str(Path(sys.executable).parent / "meshdial")
    subprocess.run(
        [meshdial, "worker", "stop"], cwd=folder, env=environment, check=True, capture_output=True
    )
    return total


def timings(iteration: Path) -> dict:
    found = {}
    for stage in STAGES:
        path = iteration / "timings" / f"{stage}.json"
        if path.exists():
            found[stage] = json.loads(path.read_text())
    return found


def told(measured: dict) -> str:
    return (
        f"{measured['cpu']:.0f} CPU-seconds in all, {measured['snakemake_cpu']:.0f} of them in "
        f"Snakemake and clients"
    )


def report(measured: dict, config: dict) -> None:
    """The table of the README, in Markdown."""
    wall = statistics.median(measured["walls"])
    compute = statistics.median(
        sum(stage.get("compute_seconds", 0.0) for stage in iteration.values())
        for iteration in measured["timings"]
    )
    print("| stage | seconds, median | CPU-seconds, median |\n|---|---|---|")
    for stage in STAGES:
        rows = [iteration[stage] for iteration in measured["timings"] if stage in iteration]
        if rows:
            seconds = statistics.median(row["seconds"] for row in rows)
            cpu = statistics.median(row["cpu_seconds"] for row in rows)
            print(f"| {stage} | {seconds:.2f} | {cpu:.2f} |")
    print(f"| a whole iteration | {wall:.2f} | |")
    print(f"\nnot in the model's programs: {1 - compute / wall:.1%} of an iteration")
    rollout = [i["generate_rollouts"]["rollout"] for i in measured["timings"]]
    rate = statistics.median(r["num_tokens"] / r["seconds"] for r in rollout)
    print(f"rollout: {rate:.0f} completion tokens per second")
    rate = statistics.median(
        figures["num_tokens"] / i["update_actor"]["compute_seconds"]
        for figures, i in zip(measured["tokens"], measured["timings"], strict=True)
    )
    print(f"update: {rate:.0f} completion tokens per second")
    peak = max(stage["peak_memory_bytes"] for i in measured["timings"] for stage in i.values())
    print(f"peak memory of the worker: {peak / 2**30:.2f} GiB")
    print(f"{config['iterations']} iterations: {told(measured)}")


if __name__ == "__main__":
    main()
