"""What this machine can do: float32 products of matrices, and bytes to and from memory.

python bench/limits.py
python bench/limits.py --cores 2
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence

import alternating
from alternating import Worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--first-core", type=int)
    cores = alternating.pin(parser.parse_args())
    found = measure(len(cores))
    print(f"{found['flops'] / 1e9:.1f} GFLOP/s of {len(cores)} core(s), float32")
    print(f"{found['read_bytes'] / 1e9:.1f} GB/s read by them")
    print(f"{found['copied_bytes'] / 1e9:.1f} GB/s read and written by one of them, in a copy")


def measure(num_cores: int) -> dict[str, float]:
    """{flops, read_bytes, copied_bytes}, all per second, on the cores of this process."""
    # In a process of its own: BLAS takes its number of threads when it is loaded.
    found = subprocess.run(
        [sys.executable, str(alternating.SCRIPTS / "machine.py")],
        env=alternating.environment(num_cores),
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(found.stdout)


def share_lines(
    workers: Sequence[Worker], flops_per_token: float, flops: float, num_cores: int
) -> list[str]:
    """What the tokens of each of ours need at least, as a share of the machine's peak `flops`."""
    lines = [
        f"machine: {flops / 1e9:.1f} GFLOP/s of {num_cores} core(s); a token needs "
        f"{flops_per_token / 1e6:.2f} MFLOP: at most {flops / flops_per_token:.0f} tokens a second"
    ]
    clock = "cpu_seconds" if num_cores == 1 else "seconds"
    for worker in workers:
        if worker.contender.is_ours:
            rates = [alternating.rate(figures, clock) for figures in worker.repetitions]
            share = statistics.median(rates) * flops_per_token / flops
            lines.append(f"{worker.contender.name}: {share:.1%} of that")
    return lines


if __name__ == "__main__":
    main()
