"""The machine itself: prints {flops, read_bytes, copied_bytes}, each the best of many, as JSON."""

import json
import os
import time
from collections.abc import Callable

import numpy as np

GEMM_SIZE = 1536
STREAM_BYTES = 2**28  # far more than the caches hold


def main() -> None:
    print(json.dumps({"flops": flops(), **bandwidths()}))


def flops() -> float:
    """A second, of matrix products by numpy's BLAS."""
    generator = np.random.default_rng(0)
    left, right = generator.standard_normal((2, GEMM_SIZE, GEMM_SIZE), np.float32)
    out = np.empty_like(left)
    return 2 * GEMM_SIZE**3 / fastest(lambda: np.dot(left, right, out=out), 20)


def bandwidths() -> dict[str, float]:
    """Bytes a second: read by as many threads as BLAS has, and copied, twice the bytes, by one."""
    source = np.ones(STREAM_BYTES // 4, np.float32)
    target = np.empty_like(source)
    return {
        "read_bytes": STREAM_BYTES / fastest(lambda: np.dot(source, source), 10),
        "copied_bytes": 2 * STREAM_BYTES / fastest(lambda: np.copyto(target, source), 10),
    }


def fastest(action: Callable[[], object], repetitions: int) -> float:
    """Seconds of the best repetition: those of the processor, where one thread runs."""
    is_alone = os.environ.get("OMP_NUM_THREADS") == "1"
    clock = time.process_time if is_alone else time.perf_counter
    action()
    seconds = []
    for _ in range(repetitions):
        began = clock()
        action()
        seconds.append(clock() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
