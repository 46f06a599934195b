"""What an iteration samples and with which policy, which versions it needs, and which stay."""

import math
from collections.abc import Mapping


def behaviour_version(lag: int, iteration: int) -> int:
    """The version of the policy that iteration n samples with: n - 1 - lag, and at first 0."""
    return max(0, iteration - 1 - lag)


def reference_version(refresh_every: int | None, iteration: int) -> int:
    """The policy that is iteration n's reference, 0 the base: the latest of every k-th version
    that the iteration does not itself come before."""
    return 0 if refresh_every is None else (iteration - 1) // refresh_every * refresh_every


def num_sampled_prompts(rollout: Mapping) -> int:
    """How many prompts an iteration samples, so as to train on `prompts_per_iteration`."""
    # 100 * 1.1 is a little more than 110 in floating point.
    return math.ceil(rollout["prompts_per_iteration"] * rollout["oversampling"] - 1e-9)


def penalises_reward(config: Mapping) -> bool:
    """Whether the divergence from the reference is part of the reward."""
    kl = config["algorithm"]["kl"]
    return kl["place"] == "reward" and kl["coefficient"] > 0


def is_anchored(config: Mapping) -> bool:
    """Whether the log-probabilities of the policy that an update starts from are needed at any
    lag: for the reward, or since that policy does not stay through several updates a batch, or
    samples in another dtype."""
    learner = config["learner"]
    is_cast = config["rollout"]["dtype"] not in ("same", config["model"]["dtype"])
    has_several = learner["epochs"] * learner["updates_per_batch"] > 1
    return has_several or is_cast or penalises_reward(config)


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
