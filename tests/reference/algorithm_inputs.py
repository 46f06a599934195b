"""What the algorithms are given behind algorithm_numbers.json: N sequences of T tokens."""

import numpy as np

N, T, GROUP = 12, 9, 4
MAX_TOKENS = 16
LOW, HIGH, DUAL = 0.2, 0.28, 3.0
CISPO_LOW, CISPO_HIGH = 0.3, 0.6
SEQUENCE_LOW, SEQUENCE_HIGH = 0.05, 0.08
VALUE_CLIP = 0.2
GAMMA, LAM = 0.97, 0.9


def inputs() -> dict[str, np.ndarray]:
    """Float64 arrays by name, [N, T] or [N]: the same on every machine.

    The mask has holes inside of sequences (an environment's tokens) besides their padding. The last
    group has no spread in its rewards.
    """
    draw = np.random.RandomState(7)  # its stream is frozen
    lengths = draw.randint(3, T + 1, N)
    mask = np.arange(T) < lengths[:, None]
    mask[[0, 3, 7], [1, 0, 1]] = False
    policy = -np.abs(draw.standard_normal((N, T))) - 0.1
    rewards = draw.standard_normal(N)
    rewards[-GROUP:] = 0.25
    return {
        "mask": mask.astype(float),
        "policy": policy,
        "proximal": policy - 0.8 * draw.standard_normal((N, T)),
        "reference": policy - 0.5 * draw.standard_normal((N, T)),
        "advantages": draw.standard_normal((N, T)),
        "sequence_advantages": draw.standard_normal(N),
        "rewards": rewards,
        "penalties": 0.1 * draw.standard_normal((N, T)),
        "old_values": draw.standard_normal((N, T)),
        "values": draw.standard_normal((N, T)),
        "returns": draw.standard_normal((N, T)),
    }


def near(given: dict[str, np.ndarray]) -> np.ndarray:
    """Proximal log-probabilities whose mean over a sequence stays near the policy's."""
    return given["policy"] - 0.15 * (given["policy"] - given["proximal"])


def token_rewards(given: dict[str, np.ndarray]) -> np.ndarray:
    """Minus the penalties, and a sequence's reward at the last token of its mask; [N, T]."""
    rewards = -given["penalties"] * given["mask"]
    last = T - 1 - np.argmax(given["mask"][:, ::-1], axis=1)
    rewards[np.arange(N), last] += given["rewards"]
    return rewards


def with_an_empty_sequence(given: dict[str, np.ndarray]) -> np.ndarray:
    mask = given["mask"].copy()
    mask[5] = 0.0
    return mask
