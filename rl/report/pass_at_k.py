"""pass@k: how likely it is that at least one of k samples of a prompt is right."""

import math
from collections.abc import Sequence

import numpy as np

from rl.report.intervals import wilson_interval

NUM_RESAMPLES = 2000


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k) of one prompt, unbiased for any n >= k.

    Chen et al. 2021, "Evaluating large language models trained on code" (arXiv:2107.03374),
    equation 1. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def interval_over_prompts(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean over prompts.

    The percentile interval from resampling the prompts (Efron 1979, "Bootstrap methods: another
    look at the jackknife"): samples of one prompt are not independent, and prompts are what is
    drawn. The resampling is seeded, so that the same values give the same interval. Where all
    prompts agree it would be a single number; then it is Wilson's, of as many prompts that are
    right or wrong.
    """
    values_P = np.asarray(values, np.float64)
    if np.ptp(values_P) == 0 and values_P[0] in (0.0, 1.0):
        return wilson_interval(int(values_P.sum()), len(values_P))
    generator = np.random.Generator(np.random.Philox(key=0))
    rows = generator.integers(0, len(values_P), (NUM_RESAMPLES, len(values_P)))
    low, high = np.percentile(values_P[rows].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)
