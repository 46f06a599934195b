"""Which prompts an iteration trains on: a pure function of the run's seed and the iteration."""

import hashlib

import numpy as np

from rl.errors import MeshdialError


def iteration_window(
    num_prompts: int, prompts_per_iteration: int, seed: int, iteration: int
) -> list[int]:
    """Row numbers of the prompts of one iteration, counted from 1.

    The epochs' orders stand one after another, and iteration n takes the n-th window of them, so
    every prompt is used once before any is used twice. A window that reaches into the next epoch
    holds no prompt twice: a prompt it has already waits until after the window.
    """
    if not 1 <= prompts_per_iteration <= num_prompts:
        raise MeshdialError(
            f"an iteration samples {prompts_per_iteration} prompts "
            f"(rollout.prompts_per_iteration x rollout.oversampling), expected 1 to {num_prompts}, "
            f"the number of training prompts"
        )
    if iteration < 1:
        raise MeshdialError(f"iteration is {iteration}, expected at least 1")
    epoch, start = divmod((iteration - 1) * prompts_per_iteration, num_prompts)
    order = _epoch_order(num_prompts, prompts_per_iteration, seed, epoch)
    window = order[start : start + prompts_per_iteration]
    num_missing = prompts_per_iteration - len(window)
    if num_missing:
        following = _epoch_order(num_prompts, prompts_per_iteration, seed, epoch + 1)
        window = np.concatenate([window, following[:num_missing]])
    return window.tolist()


def _epoch_order(num_prompts: int, prompts_per_iteration: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `epoch` after what the windows that cross into it have put back."""
    order = _shuffled(num_prompts, seed, 0)
    for later in range(1, epoch + 1):
        num_carried = later * num_prompts % prompts_per_iteration
        carried = order[num_prompts - num_carried :]
        num_head = prompts_per_iteration - num_carried
        order = _deferring(_shuffled(num_prompts, seed, later), carried, num_head)
    return order


def _deferring(order: np.ndarray, carried: np.ndarray, num_head: int) -> np.ndarray:
    """`order` with the members of `carried` moved out of its first `num_head` places."""
    reach = num_head + len(carried)
    front, back = order[:reach], order[reach:]
    is_carried = np.isin(front, carried)
    kept, deferred = front[~is_carried], front[is_carried]
    return np.concatenate([kept[:num_head], deferred, kept[num_head:], back])


def _shuffled(num_prompts: int, seed: int, epoch: int) -> np.ndarray:
    # NumPy promises the raw stream of a bit generator for good, but not that of a permutation.
    digest = hashlib.sha256(f"prompt order/{seed}/{epoch}".encode()).digest()
    generator = np.random.Philox(key=np.frombuffer(digest[:16], "<u8").astype(np.uint64))
    return np.argsort(generator.random_raw(num_prompts), kind="stable")
