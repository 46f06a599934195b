"""What a lag saves: rollouts and updates on two pools of one core each, with lag 0 and with lag 1.

    python bench/lag.py
    python bench/lag.py --rounds 3 --iterations 12

Both pools are CPU processes held to one thread, so that neither takes the other's core; the sizes
are chosen to keep them about equally busy. The two settings run in turns, in empty folders. An
iteration's seconds are the mean between the checks of the third iteration and the last, when
everything is compiled. Lag 1 also computes the log-probabilities that its weights need, on the
update's pool.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from rl.report.timeline import Span, collect_spans, timeline_lines
from rl.stage_table import STAGES

ROOT = Path(__file__).parents[1]
WARM_UP = 3  # iterations
SHOWN = 3  # iterations of a Gantt chart
CONFIG = {
    "model": {
        "source": "scratch",
        "architecture": {"layers": 4, "width": 256, "heads": 4, "kv_heads": 4, "ffn": 768},
    },
    "task": {"name": "sort_digits", "num_train": 512, "num_heldout": 8},
    "reward": {"functions": [{"function": "random"}]},
    "algorithm": {"kl": {"coefficient": 0}},
    "evaluation": {"every": 0},
    "keep": "last",
    "cluster": {
        "meshes": {"train": {"devices": 1}, "decode": {"devices": 1}},
        "roles": {"actor": "train", "reference": "train", "rollout": "decode", "reward": "decode"},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="how often each setting runs")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--max-rows", type=int, default=4, help="decoded at once; sets the balance")
    parser.add_argument("--width", type=int, default=100, help="of the Gantt chart, in characters")
    arguments = parser.parse_args()
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for number in range(arguments.rounds):
        for lag, found in seconds.items():
            spans = measure(lag, arguments)
            found.append(seconds_per_iteration(spans))
            print(f"\nround {number + 1}, lag {lag}: {found[-1]:.2f} s an iteration")
            print("\n".join(timeline_lines(last(spans), arguments.width)), flush=True)
    print("\n| lag | seconds per iteration |\n|---|---|")
    for lag, found in seconds.items():
        print(f"| {lag} | {', '.join(f'{value:.2f}' for value in found)} |")
    ratio = statistics.median(seconds[1]) / statistics.median(seconds[0])
    print(f"\nlag 1 takes {ratio:.2f} of the time of lag 0 (medians)")


def measure(lag: int, arguments: argparse.Namespace) -> list[Span]:
    """When each stage of a run ran."""
    rollout = {"prompts_per_iteration": arguments.prompts, "group_size": arguments.group_size}
    rollout |= {"max_tokens": arguments.max_tokens, "max_rows": arguments.max_rows}
    config = CONFIG | {"run": "bench", "lag": lag, "iterations": arguments.iterations}
    config |= {"rollout": rollout}
    with tempfile.TemporaryDirectory(prefix="md-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "runtime").mkdir(mode=0o700)
        subprocess.run(command(folder), env=environment(folder), check=True, capture_output=True)
        run = folder / "results" / "bench"
        return collect_spans(
            {
                n: {stage: run / f"{n:04d}" / "timings" / f"{stage}.json" for stage in STAGES}
                for n in range(arguments.iterations + 1)
            }
        )


def command(folder: Path) -> list[str]:
    return [
        *(str(Path(sys.executable).parent / "snakemake"), "--snakefile", str(ROOT / "Snakefile")),
        *("--workflow-profile", str(ROOT / "profiles" / "default"), "--cores", "2"),
        *("--directory", str(folder), "--configfile", str(folder / "config.yaml")),
    ]


def environment(folder: Path) -> dict[str, str]:
    one_thread = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    return os.environ | {
        "MESHDIAL_RUNTIME_DIR": str(folder / "runtime"),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {one_thread}".strip(),
        "OMP_NUM_THREADS": "1",
    }


def seconds_per_iteration(spans: list[Span]) -> float:
    ends = {span.iteration: span.ended for span in spans if span.stage == "check_iteration"}
    return (ends[max(ends)] - ends[WARM_UP]) / (max(ends) - WARM_UP)


def last(spans: list[Span]) -> list[Span]:
    """The spans of the last iterations."""
    newest = max(span.iteration for span in spans)
    return [span for span in spans if span.iteration > newest - SHOWN]


if __name__ == "__main__":
    main()
