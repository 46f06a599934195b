"""Sorting digits: `31524>` is continued by `12345` and a newline. Made for character models."""

from random import Random

from rl.errors import MeshdialError
from rl.tasks.prompt_table import Prompt


def sort_digits(
    *, num_digits: int, num_train: int, num_heldout: int
) -> tuple[list[Prompt], list[Prompt]]:
    """Distinct strings of `num_digits` digits; the held-out ones depend on `num_heldout` alone."""
    total = num_train + num_heldout
    strings = range(10**num_digits)
    if total > len(strings):
        raise MeshdialError(
            f"task sort_digits: {num_train} training and {num_heldout} held-out prompts were asked "
            f"for, but there are only {len(strings)} strings of {num_digits} digits"
        )
    heldout = Random(f"sort_digits heldout {num_digits}").sample(strings, num_heldout)
    candidates = Random(f"sort_digits train {num_digits}").sample(strings, total)
    is_heldout = set(heldout)
    train = [number for number in candidates if number not in is_heldout][:num_train]
    return [_prompt(n, num_digits) for n in train], [_prompt(n, num_digits) for n in heldout]


def _prompt(number: int, num_digits: int) -> Prompt:
    digits = f"{number:0{num_digits}d}"
    answer = "".join(sorted(digits))
    return Prompt(
        prompt_id=f"sort_digits/{digits}",
        ground_truth=answer,
        text=f"{digits}>",
        info={"target": f"{answer}\n"},
    )
