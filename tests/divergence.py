"""Are two runs' completions the same, but where a random number fell on a boundary?

Floating point adds up in another order on another mesh, so that free-running completions may part.
They may do so only at a token whose random number lies within TOLERANCE of a boundary of the
distribution that it is drawn from, which is computed here anew, in float64.
"""

import numpy as np

from rl.rollout.sampling import draw_uniforms

from .plain_llama import plain_logits

TOLERANCE = 1e-5


def unexplained(one, other, spec, parameters, seed, iteration, prompt_numbers, temperature):
    """(sample_id, position, distance to the nearest boundary) of each pair of completions that
    part where they may not. `one` and `other` are rollout tables of one policy; groups follow one
    another in the order of `prompt_numbers`."""
    group_size = one.num_rows // len(prompt_numbers)
    found = []
    for row, (a, b) in enumerate(zip(one.to_pylist(), other.to_pylist(), strict=True)):
        assert (a["sample_id"], a["prompt_tokens"]) == (b["sample_id"], b["prompt_tokens"])
        position = first_difference(a["completion_tokens"], b["completion_tokens"])
        if position is None:
            continue
        before = [*a["prompt_tokens"], *a["completion_tokens"][:position]]
        logits = plain_logits(spec.config, spec.lora, parameters, before)[-1] / temperature
        group, sample = divmod(row, group_size)
        number = uniform(seed, iteration, prompt_numbers[group], sample, position)
        distance = boundary_distance(logits, number)
        if distance > TOLERANCE:
            found.append((a["sample_id"], position, distance))
    return found


def unexplained_greedy(one, other, spec, parameters):
    """As `unexplained`, of greedy completions, which may part where two tokens tie."""
    found = []
    for a, b in zip(one.to_pylist(), other.to_pylist(), strict=True):
        position = first_difference(a["completion_tokens"], b["completion_tokens"])
        if position is None:
            continue
        before = [*a["prompt_tokens"], *a["completion_tokens"][:position]]
        logits = np.sort(plain_logits(spec.config, spec.lora, parameters, before)[-1])
        if (gap := float(logits[-1] - logits[-2])) > TOLERANCE:
            found.append((a["sample_id"], position, gap))
    return found


def first_difference(one, other):
    """The first position at which two completions differ; None where they are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    parted = next((t for t, (a, b) in pairs if a != b), None)
    is_prefix = parted is None and len(one) != len(other)
    return min(len(one), len(other)) if is_prefix else parted


def boundary_distance(logits, number):
    """How far `number` is from the nearest boundary between two tokens of the distribution."""
    weights = np.exp(logits - logits.max())
    boundaries = np.cumsum(weights)[:-1] / weights.sum()
    return float(np.abs(boundaries - number).min())


def uniform(seed, iteration, prompt_number, sample, position):
    """The random number that decides one token."""
    names = (np.array([name]) for name in (prompt_number, sample, position))
    return float(draw_uniforms(seed, iteration, *names)[0])
