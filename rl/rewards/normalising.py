"""Components of a reward on one scale, so that their weights compare."""

import math
from collections.abc import Hashable, Sequence

from rl.rewards.processes import Score


def normalised(scores: Sequence[Score], keys: Sequence[Hashable]) -> list[Score]:
    """Mean 0 and population deviation 1 over the scored samples with the same key.

    Where they are all equal each is 0. What was not scored stays as it is.
    """
    members: dict[Hashable, list[int]] = {}
    for number, (score, key) in enumerate(zip(scores, keys, strict=True)):
        if score.value is not None:
            members.setdefault(key, []).append(number)
    result = list(scores)
    for numbers in members.values():
        values = _standardised([scores[number].value for number in numbers])
        for number, value in zip(numbers, values, strict=True):
            result[number] = Score(value)
    return result


def _standardised(values: Sequence[float]) -> list[float]:
    """Values in units of their population deviation, counted from their mean."""
    if min(values) == max(values):
        return [0.0] * len(values)
    # Between -1 and 1 neither their squares nor their sum can overflow.
    _, exponent = math.frexp(max(map(abs, values)))
    scaled = [math.ldexp(value, -exponent) for value in values]
    mean = math.fsum(scaled) / len(scaled)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in scaled) / len(scaled))
    return [(value - mean) / deviation if deviation else 0.0 for value in scaled]
