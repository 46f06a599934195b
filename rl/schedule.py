"""Which policy an iteration samples with, which it evaluates, and which versions stay on disk."""

from collections.abc import Mapping


def behaviour_version(lag: int, iteration: int) -> int:
    """The version of the policy that iteration n samples with: n - 1 - lag, and at first 0."""
    return max(0, iteration - 1 - lag)


def is_anchored(config: Mapping) -> bool:
    """Whether an update needs the log-probabilities of the policy it starts from at any lag: that
    policy does not stay through several updates a batch, or samples in another dtype."""
    is_cast = config["rollout"]["dtype"] not in ("same", config["model"]["dtype"])
    return config["learner"]["updates_per_batch"] > 1 or is_cast


def is_evaluated(every: int, iteration: int, iterations: int) -> bool:
    """Every k-th iteration and the last; `every` = 0 evaluates none."""
    return every > 0 and (iteration % every == 0 or iteration == iterations)


def is_kept(keep: int | str, version: int, iterations: int) -> bool:
    """`keep` is `all`, `last`, or k for every k-th version and the last.

    Version 0 always stays: what iteration 1 sampled then survives a change of its update.
    """
    if keep == "all" or version in (0, iterations):
        return True
    return keep != "last" and version % keep == 0


def are_weights_kept(keep: int | str, version: int, iterations: int, lag: int) -> bool:
    """As `is_kept`, for what is sampled from: with a lag, raising the iterations later reads the
    weights of the last versions before the last too."""
    return version >= iterations - lag or is_kept(keep, version, iterations)
