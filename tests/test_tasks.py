"""The built-in tasks: right answers, an honest split, and the order that prompts are used in."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.artifacts import table_content_id
from rl.errors import MeshdialError
from rl.tasks import TASKS, iteration_window, make_prompts, task_files
from rl.tasks.few_shot import ADDITION_SHOTS, LARGER_SHOTS, SERIES_SHOTS

OPTIONS = {
    "num_few_shot": 3,
    "num_digits": 5,
    "num_train": 500,
    "num_heldout": 60,
    "train_file": None,
    "heldout_file": None,
    "heldout_fraction": 0.1,
    "pass_rate_column": None,
    "pass_rate": [0, 1],
}


def made(name, **options):
    train, heldout = make_prompts(OPTIONS | {"name": name} | options)
    return train.to_pylist(), heldout.to_pylist()


def keys(rows):
    return [row["prompt_id"].partition("/")[2] for row in rows]


def pairs(rows, separator):
    return [tuple(map(int, key.split(separator))) for key in keys(rows)]


def unordered(ordered_pairs):
    return {frozenset(pair) for pair in ordered_pairs}


def test_addition_prompt_is_three_worked_examples_and_the_question():
    train, heldout = made("addition")
    row = next(row for row in train + heldout if row["prompt_id"] == "addition/5+9")
    assert row == {
        "prompt_id": "addition/5+9",
        "prompt": "Q: 7+5?\nA: 12\n\nQ: 1+2?\nA: 3\n\nQ: 3+3?\nA: 6\n\nQ: 5+9?\nA:",
        "messages": None,
        "ground_truth": "14",
        "info": '{"target": " 14\\n"}',
    }


def test_addition_without_examples_is_the_bare_question():
    assert all(row["prompt"].count("Q:") == 1 for row in made("addition", num_few_shot=0)[0])


def test_addition_answers_are_sums():
    train, heldout = made("addition")
    for row, (a, b) in zip(train + heldout, pairs(train + heldout, "+"), strict=True):
        assert int(row["ground_truth"]) == a + b
        assert row["prompt"].endswith(f"\n\nQ: {a}+{b}?\nA:")


def test_addition_holds_out_whole_pairs_and_never_asks_an_example():
    train, heldout = (pairs(rows, "+") for rows in made("addition"))
    assert len(heldout) >= 25 and len(train) > len(heldout)
    assert len(set(train + heldout)) == len(train) + len(heldout)
    for side in (train, heldout):
        assert all(pair[::-1] in side for pair in side), "a pair and its mirror were split up"
        assert not unordered(side) & unordered(ADDITION_SHOTS)
    assert len(unordered(train + heldout)) == 55 - len(ADDITION_SHOTS)


def test_next_number_continues_an_arithmetic_series():
    train, heldout = made("next_number")
    for row in train + heldout:
        a, b, c = map(int, row["prompt_id"].removeprefix("next_number/").split(","))
        assert b - a == c - b > 0
        assert row["ground_truth"] == str(c + b - a)
        assert row["prompt"].endswith(f"Q: {a}, {b}, {c}, ?\nA:")
    assert train[0]["prompt"].startswith("Q: 4, 7, 10, ?\nA: 13\n\nQ: 10, 15, 20, ?\nA: 25\n\n")


def test_next_number_holds_out_26_series():
    train, heldout = (keys(rows) for rows in made("next_number"))
    shots = {f"{a},{a + d},{a + 2 * d}" for a, d in SERIES_SHOTS}
    assert (len(train), len(heldout)) == (20 * 9 - 8 - 26, 26)
    assert len(set(train) | set(heldout) | shots) == 20 * 9


@pytest.mark.parametrize("num_train, num_heldout", [(500, 60), (2000, 200), (7, 3)])
def test_larger_is_balanced_by_position(num_train, num_heldout):
    sides = made("larger", num_train=num_train, num_heldout=num_heldout)
    for rows, num_asked in zip(sides, (num_train, num_heldout), strict=True):
        ordered = pairs(rows, ",")
        assert len(ordered) == len(set(ordered)) == num_asked + num_asked % 2
        assert 2 * sum(a > b for a, b in ordered) == len(ordered)
        assert [row["ground_truth"] for row in rows] == [str(max(pair)) for pair in ordered]
        assert rows[0]["prompt"].endswith("Q: larger of {} and {}?\nA:".format(*ordered[0]))
        assert not unordered(ordered) & unordered(LARGER_SHOTS)
    assert not unordered(pairs(sides[0], ",")) & unordered(pairs(sides[1], ","))


@pytest.mark.parametrize("num_shots", [2, 4, 6, 8])
def test_larger_examples_are_balanced_too(num_shots):
    assert 2 * sum(a > b for a, b in LARGER_SHOTS[:num_shots]) == num_shots


def test_sort_digits_by_value():
    train, heldout = made("sort_digits", num_train=5000, num_heldout=100)
    for row in train + heldout:
        digits = row["prompt"].removesuffix(">")
        assert len(digits) == 5 and row["prompt_id"] == f"sort_digits/{digits}"
        assert row["ground_truth"] == "".join(sorted(digits))
        assert row["info"] == f'{{"target": "{row["ground_truth"]}\\n"}}'
    assert (len(train), len(heldout)) == (5000, 100)
    assert len(set(keys(train)) | set(keys(heldout))) == 5100


def test_sort_digits_can_use_every_string():
    train, heldout = made("sort_digits", num_digits=2, num_train=90, num_heldout=10)
    assert sorted(keys(train) + keys(heldout)) == [f"{number:02d}" for number in range(100)]


def test_held_out_prompts_stay_when_training_grows():
    for name in ("larger", "sort_digits"):
        assert made(name, num_train=300)[1] == made(name, num_train=900)[1]


@pytest.mark.parametrize("name", ["addition", "next_number", "larger"])
def test_the_number_of_examples_moves_no_question_to_the_other_side(name):
    for few, many in zip(made(name, num_few_shot=1), made(name, num_few_shot=8), strict=True):
        assert keys(few) == keys(many)


@pytest.mark.parametrize(
    "name, content",
    [
        ("addition", "2c477968e364 474b545cf690"),
        ("next_number", "9ea6e59f27ee 5da8e4af0ea5"),
        ("larger", "3d1768da84c9 9dfeb39b5d12"),
        ("sort_digits", "98c622516bcb 011924bed992"),
    ],
)
def test_prompts_never_change(name, content):
    """A run made again years later, on another machine, has the same prompts."""
    tables = make_prompts(OPTIONS | {"name": name})
    assert [table_content_id(table)[7:19] for table in tables] == content.split()


def test_too_many_prompts_is_an_error():
    with pytest.raises(MeshdialError, match="only 100 strings of 2 digits"):
        made("sort_digits", num_digits=2, num_train=95, num_heldout=10)
    with pytest.raises(
        MeshdialError, match=r"9000 training and 60 held-out .* only 7994 questions"
    ):
        made("larger", num_train=9000)


def test_unknown_task_and_missing_option_are_named():
    with pytest.raises(MeshdialError, match=r"task.name is 'division', expected one of addition"):
        make_prompts({"name": "division"})
    with pytest.raises(MeshdialError, match=r"task.num_few_shot is missing"):
        make_prompts({"name": "addition"})


def test_only_a_table_reads_files():
    for name in TASKS:
        files = {"train_file": "a.jsonl", "heldout_file": None}
        assert task_files({"name": name} | files) == (["a.jsonl"] if name == "table" else [])
    assert task_files({"name": "table", "train_file": "a", "heldout_file": "b"}) == ["a", "b"]


def used(num_prompts, per_iteration, seed, num_iterations):
    return [
        row
        for iteration in range(1, num_iterations + 1)
        for row in iteration_window(num_prompts, per_iteration, seed, iteration)
    ]


@given(st.integers(1, 12), st.data())
@settings(max_examples=60, deadline=None)
def test_every_epoch_uses_every_prompt_once_and_no_window_one_twice(num_prompts, data):
    per_iteration = data.draw(st.integers(1, num_prompts))
    seed = data.draw(st.integers(0, 2**32 - 1))
    num_epochs = 4
    num_iterations = -(-num_epochs * num_prompts // per_iteration)
    for iteration in range(1, num_iterations + 1):
        window = iteration_window(num_prompts, per_iteration, seed, iteration)
        assert len(window) == len(set(window)) == per_iteration
    rows = used(num_prompts, per_iteration, seed, num_iterations)
    for epoch in range(num_epochs):
        counts = Counter(rows[epoch * num_prompts : (epoch + 1) * num_prompts])
        assert counts == dict.fromkeys(range(num_prompts), 1)


def test_windows_depend_on_the_seed_and_differ_by_epoch():
    assert used(20, 5, 0, 4) != used(20, 5, 1, 4)
    assert used(20, 5, 0, 8)[:20] != used(20, 5, 0, 8)[20:]


def test_windows_never_change():
    assert iteration_window(10, 4, seed=7, iteration=1) == [8, 5, 4, 6]
    assert iteration_window(10, 4, seed=7, iteration=3) == [2, 9, 7, 6]


def test_windows_are_spread_evenly():
    """Over many seeds, each prompt opens the run about equally often (20 expected, sd 4.2)."""
    first = Counter(iteration_window(10, 3, seed, 1)[0] for seed in range(200))
    assert len(first) == 10 and max(first.values()) < 40


@pytest.mark.parametrize("per_iteration", [0, 11])
def test_a_window_larger_than_the_table_is_an_error(per_iteration):
    with pytest.raises(MeshdialError, match=r"an iteration samples .* expected 1 to 10"):
        iteration_window(10, per_iteration, 0, 1)


def test_iterations_count_from_one():
    with pytest.raises(MeshdialError, match="iteration is 0"):
        iteration_window(10, 2, 0, 0)


def test_tasks_and_rewards_import_nothing_heavy():
    check = "import rl.tasks, rl.rewards, sys; print({'jax', 'flax', 'torch'} & {*sys.modules})"
    command = [sys.executable, "-c", check]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
