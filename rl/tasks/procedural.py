"""A mix of the procedural datasets of reasoning-gym, with questions behind worked examples.

A dataset's items are taken in the order of their index, the seed being 0, each question once: first
the worked examples, then the held-out questions, then those to train on. So the held-out questions
stay the same when more are trained on or fewer examples shown.
"""

import importlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl.errors import MeshdialError
from rl.rewards.functions import INSTALL
from rl.tasks.prompt_table import Prompt, hash64

NUM_SHOTS = 8
ITEMS = 1_000_000
# Items in a row that bring no new question, or none that can be scored.
LONGEST_DROUGHT = 2000
TIME_LIMIT_S = 300.0
TRIAL_S = 5.0


def reasoning_gym(
    *, datasets: Sequence[Mapping[str, Any]], num_few_shot: int, num_train: int, num_heldout: int
) -> tuple[list[Prompt], list[Prompt]]:
    """Questions of `datasets`, a list of {name, options, weight}; weights share out both numbers.

    Worked examples come from the question's own dataset, which trains on all it has where that is
    less than its share. `info` has what its scorer needs: the dataset's name and options, and the
    `entry`. An item whose own answer does not score 1 is left out. MeshdialError where a dataset
    cannot be made, is too slow, or has too few questions.
    """
    gym = _package()
    names = [dataset["name"] for dataset in datasets]
    for name in names:
        if names.count(name) > 1:
            raise MeshdialError(f"task.datasets: {name} stands there twice")
    if not names:
        raise MeshdialError("task.datasets is empty, expected at least one {name, options, weight}")
    weights = [dataset.get("weight", 1) for dataset in datasets]
    train: list[Prompt] = []
    heldout: list[Prompt] = []
    shares = zip(_shares(num_train, weights), _shares(num_heldout, weights), strict=True)
    for dataset, (share_train, share_heldout) in zip(datasets, shares, strict=True):
        source = _Source(gym, dataset["name"], dict(dataset.get("options") or {}))
        entries = source.entries(NUM_SHOTS + share_heldout, share_train)
        head = "".join(
            f"Q: {_question(shot)}\nA: {shot['answer']}\n\n" for shot in entries[:num_few_shot]
        )
        prompts = [source.prompt(head, entry) for entry in entries[NUM_SHOTS:]]
        heldout += prompts[:share_heldout]
        train += prompts[share_heldout:]
    return train, heldout


def _package() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise MeshdialError(
            f"task reasoning_gym needs the package reasoning-gym, and {error.name} is not "
            f"installed: {INSTALL}"
        ) from None


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in proportion to `weights`, by largest remainders; the first win ties."""
    exact = [total * weight / math.fsum(weights) for weight in weights]
    shares = [math.floor(share) for share in exact]
    ranked = sorted(range(len(exact)), key=lambda n: (shares[n] - exact[n], n))
    for number in ranked[: total - sum(shares)]:
        shares[number] += 1
    return shares


def _question(entry: Mapping[str, Any]) -> str:
    return entry["question"].strip()


class _Source:
    """One dataset, and how to say what is wrong with it."""

    def __init__(self, gym: Any, name: str, options: dict[str, Any]):
        self.name, self.options = name, options
        for option in ("seed", "size"):
            if option in options:
                self.refuse(f"the option {option} is the task's own, not yours to set")
        if name not in gym.factory.DATASETS:
            raise MeshdialError(f"task.datasets: reasoning-gym has no dataset {name}")
        try:
            self.dataset = gym.create_dataset(name, seed=0, size=ITEMS, **options)
        except Exception as error:  # The package's checks are asserts and errors of any kind.
            self.refuse(_line(error))

    def entries(self, num_fixed: int, num_train: int) -> list[dict[str, Any]]:
        """The first different questions that can be scored, `num_fixed` + `num_train` of them.

        There are fewer where the dataset has no more, but at least one to train on.
        """
        num_wanted = num_fixed + num_train
        started = time.monotonic()
        entries: dict[str, dict[str, Any]] = {}
        reason, drought = "it repeats itself", 0
        for entry in self._items():
            if len(entries) == num_wanted:
                break
            drought += 1
            why = self._fault(entry)
            if why is None and _question(entry) not in entries:
                entries[_question(entry)] = entry
                drought = 0
            reason = why or reason
            if drought >= LONGEST_DROUGHT:
                break
            self._check_time(time.monotonic() - started, len(entries), num_wanted)
        if len(entries) < num_fixed + min(num_train, 1):
            self.refuse(
                f"it has only {len(entries)} different questions that can be used, and {num_fixed} "
                f"are worked examples or held out, which leaves none to train on ({reason})"
            )
        return list(entries.values())

    def prompt(self, head: str, entry: Mapping[str, Any]) -> Prompt:
        question = _question(entry)
        return Prompt(
            prompt_id=f"reasoning_gym/{self.name}/{hash64(question):016x}",
            ground_truth=entry["answer"],
            text=f"{head}Q: {question}\nA:",
            info={
                "target": f" {entry['answer']}\n",
                "dataset": self.name,
                "options": self.options,
                "entry": entry,
            },
        )

    def refuse(self, why: str) -> None:
        raise MeshdialError(f"task.datasets: {self.name}: {why}")

    def _items(self) -> Iterator[dict[str, Any]]:
        for index in range(ITEMS):
            try:
                # As the scorer will see it: without tuples, with text as keys.
                yield json.loads(json.dumps(self.dataset[index], default=str))
            except Exception as error:
                self.refuse(f"item {index} cannot be made: {_line(error)}")

    def _fault(self, entry: Mapping[str, Any]) -> str | None:
        """Why an item cannot be used."""
        if not isinstance(entry["answer"], str) or not entry["answer"].strip():
            return "an item has no answer"
        try:
            score = self.dataset.score_answer(answer=entry["answer"].strip(), entry=entry)
        except Exception as error:
            return f"the scorer of an item fails: {_line(error)}"
        return None if score >= 1.0 else f"an item's own answer scores {score:.3g}"

    def _check_time(self, elapsed_s: float, num_made: int, num_wanted: int) -> None:
        expected_s = elapsed_s * num_wanted / max(num_made, 1)
        if elapsed_s > TRIAL_S and expected_s > TIME_LIMIT_S:
            self.refuse(
                f"{num_made} of {num_wanted} questions took {elapsed_s:.0f} s, so that all would "
                f"take more than {TIME_LIMIT_S:.0f} s; ask for fewer or choose easier options"
            )


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200].removesuffix(": ")
