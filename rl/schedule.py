"""Which iterations evaluate their policy, and which policy versions stay on disk."""


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
