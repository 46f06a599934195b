"""Uncertainty of a proportion."""

import math

Z_95 = 1.959963984540054  # the 97.5% point of the standard normal: 95% between -z and z


def wilson_interval(num_correct: int, num_samples: int) -> tuple[float, float]:
    """The 95% score interval of a proportion, which stays inside [0, 1] and is honest at 0 and 1.

    Wilson (1927), "Probable inference, the law of succession, and statistical inference". Samples
    count as independent: repeated samples of one prompt make the interval look narrower than it is.

    Raises ValueError unless 0 <= num_correct <= num_samples and num_samples > 0.
    """
    if not 0 <= num_correct <= num_samples or num_samples == 0:
        raise ValueError(f"{num_correct} correct of {num_samples} is not a proportion")
    proportion = num_correct / num_samples
    z_squared = Z_95**2
    center = (proportion + z_squared / (2 * num_samples)) / (1 + z_squared / num_samples)
    variance = proportion * (1 - proportion) / num_samples + z_squared / (4 * num_samples**2)
    margin = Z_95 * math.sqrt(variance) / (1 + z_squared / num_samples)
    # Exact ends where rounding would leave them an ulp away (or below 0 and above 1).
    low = 0.0 if num_correct == 0 else max(0.0, center - margin)
    high = 1.0 if num_correct == num_samples else min(1.0, center + margin)
    return low, high
