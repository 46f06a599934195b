"""Questions behind a few worked examples, as plain text that a base model continues.

The prompt of 7+5 with one example is `Q: 2+6?\nA: 8\n\nQ: 7+5?\nA:`; a right completion is ` 12\n`.
The worked examples of each task are the fixed list below, used in order; none of them is ever
asked, whatever their number, so that the held-out questions are the same with and without them.
Training and held-out questions are told apart by a hash of what makes them the same question.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement, product

from rl.errors import MeshdialError
from rl.tasks.prompt_table import Prompt, hash64

NUM_HELDOUT_ADDITION = 28
NUM_HELDOUT_SERIES = 26

ADDITION_SHOTS = ((7, 5), (1, 2), (3, 3), (9, 4), (8, 8), (1, 6), (5, 2), (4, 6))
# First term and difference.
SERIES_SHOTS = ((4, 3), (10, 5), (7, 1), (2, 2), (15, 4), (1, 9), (12, 6), (20, 8))
# The larger number stands second, first, first, second, ...: every even number is balanced.
LARGER_SHOTS = ((18, 52), (73, 40), (95, 61), (27, 84), (36, 39), (66, 58), (91, 12), (45, 70))


@dataclass(frozen=True)
class Question:
    """`key` names the question in its prompt id; questions of one `kin` are never split up."""

    key: str
    kin: Hashable
    text: str
    answer: str


Tables = tuple[list[Prompt], list[Prompt]]


def addition(*, num_few_shot: int) -> Tables:
    """Sums of two digits. A pair and its mirror fall on the same side of the split."""
    pairs = combinations_with_replacement(range(10), 2)
    questions = [_sum(*ordered) for a, b in pairs for ordered in dict.fromkeys([(a, b), (b, a)])]
    shots = [_sum(a, b) for a, b in ADDITION_SHOTS]
    train, heldout = split_by_kin("addition", questions, shots, NUM_HELDOUT_ADDITION)
    return _prompts("addition", shots[:num_few_shot], train, heldout)


def next_number(*, num_few_shot: int) -> Tables:
    """The fourth number of an arithmetic series: first term 1 to 20, difference 1 to 9."""
    questions = [_series(*series) for series in product(range(1, 21), range(1, 10))]
    shots = [_series(*series) for series in SERIES_SHOTS]
    train, heldout = split_by_kin("next_number", questions, shots, NUM_HELDOUT_SERIES)
    return _prompts("next_number", shots[:num_few_shot], train, heldout)


def larger(*, num_few_shot: int, num_train: int, num_heldout: int) -> Tables:
    """The larger of two two-digit numbers.

    Each pair is asked in both orders, so the larger number stands first exactly as often as
    second, in training and held out; an odd number of questions is rounded up.
    """
    pairs = combinations(range(10, 100), 2)
    questions = [_larger(*ordered) for a, b in pairs for ordered in ((a, b), (b, a))]
    shots = [_larger(*pair) for pair in LARGER_SHOTS]
    train, heldout = split_by_kin("larger", questions, shots, num_heldout, num_train)
    return _prompts("larger", shots[:num_few_shot], train, heldout)


def split_by_kin(
    task: str,
    questions: Sequence[Question],
    shots: Sequence[Question],
    num_heldout: int,
    num_train: int | None = None,
) -> tuple[list[Question], list[Question]]:
    """Training and held-out questions; both hold whole kins, in the order of the kins' hashes.

    Each side takes kins until it has at least as many questions as asked for; without `num_train`,
    training takes all the rest. The kins of the shots are on neither side.
    """
    taken = {shot.kin for shot in shots}
    kins: dict[Hashable, list[Question]] = {}
    for question in questions:
        if question.kin not in taken:
            kins.setdefault(question.kin, []).append(question)
    ranked = [kins[kin] for kin in sorted(kins, key=lambda kin: hash64(f"{task}/{kin}"))]
    heldout: list[Question] = []
    train: list[Question] = []
    for kin in ranked:
        if len(heldout) < num_heldout:
            heldout += kin
        elif num_train is None or len(train) < num_train:
            train += kin
    if len(train) < (num_train or 1):
        total = len(train) + len(heldout)
        raise MeshdialError(
            f"task {task}: {num_train or 1} training and {num_heldout} held-out prompts were asked "
            f"for, but there are only {total} questions"
        )
    return train, heldout


def _sum(a: int, b: int) -> Question:
    return Question(f"{a}+{b}", tuple(sorted((a, b))), f"{a}+{b}?", str(a + b))


def _series(first: int, difference: int) -> Question:
    *shown, answer = range(first, first + 4 * difference, difference)
    key = ",".join(map(str, shown))
    return Question(key, (first, difference), f"{key.replace(',', ', ')}, ?", str(answer))


def _larger(a: int, b: int) -> Question:
    key = f"{a},{b}"
    return Question(key, tuple(sorted((a, b))), f"larger of {a} and {b}?", str(max(a, b)))


def _prompts(task: str, shots, train, heldout) -> Tables:
    head = "".join(f"Q: {shot.text}\nA: {shot.answer}\n\n" for shot in shots)
    return (
        [_prompt(task, head, question) for question in train],
        [_prompt(task, head, question) for question in heldout],
    )


def _prompt(task: str, head: str, question: Question) -> Prompt:
    return Prompt(
        prompt_id=f"{task}/{question.key}",
        ground_truth=question.answer,
        text=f"{head}Q: {question.text}\nA:",
        info={"target": f" {question.answer}\n"},
    )
