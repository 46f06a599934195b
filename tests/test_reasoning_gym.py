"""Prompts from reasoning-gym: right answers by its own scorers, an honest split, clear refusals."""

import json
from collections import Counter

import pytest

from rl.artifacts import table_content_id
from rl.errors import MeshdialError
from rl.rewards import score
from rl.tasks import make_prompts
from rl.tasks.procedural import NUM_SHOTS, _shares
from tests.test_rewards import rollouts
from tests.verifiers import needs_verifiers

pytestmark = needs_verifiers

SUMS = {"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}
SUMS["options"] |= {"min_digits": 1}
GCD = {"name": "gcd", "options": {"max_value": 30}}
SMALL = {"name": "gcd", "options": {"max_value": 5}}


def made(*datasets, num_few_shot=2, num_train=20, num_heldout=10):
    sizes = {"num_few_shot": num_few_shot, "num_train": num_train, "num_heldout": num_heldout}
    tables = make_prompts({"name": "reasoning_gym", "datasets": list(datasets)} | sizes)
    return [table.to_pylist() for table in tables]


def questions(rows):
    return {row["prompt"].rpartition("Q: ")[2].removesuffix("\nA:") for row in rows}


def test_a_prompt_is_worked_examples_and_the_question():
    _, heldout = made(SUMS)
    row = heldout[0]
    ask = "State the final answer to the following arithmetic problem:"
    *shots, asked = row["prompt"].split("\n\n")
    assert len(shots) == 2 and all(shot.startswith(f"Q: {ask} ") for shot in shots)
    assert asked.startswith(f"Q: {ask} ") and asked.endswith(" =\nA:")
    answered = [(shot, shot.rpartition("A: ")[2]) for shot in shots]
    for text, answer in [*answered, (asked, row["ground_truth"])]:
        a, sign, b = text.partition("problem: ")[2].split(" =")[0].split()
        assert int(answer) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
    info = json.loads(row["info"])
    assert (info["dataset"], info["options"]) == ("chain_sum", SUMS["options"])
    assert info["target"] == f" {row['ground_truth']}\n"
    assert info["entry"]["answer"] == row["ground_truth"]
    assert row["prompt_id"].startswith("reasoning_gym/chain_sum/")


def test_a_mix_follows_its_weights_and_never_asks_a_question_twice():
    train, heldout = made(SUMS | {"weight": 3}, GCD, num_train=40, num_heldout=20)
    for rows, counts in ((train, (30, 10)), (heldout, (15, 5))):
        by_dataset = Counter(row["prompt_id"].split("/")[1] for row in rows)
        assert by_dataset == dict(zip(("chain_sum", "gcd"), counts, strict=True))
    assert len(questions(train) | questions(heldout)) == 60
    assert len({row["prompt_id"] for row in train + heldout}) == 60
    shown = {part for row in train for part in row["prompt"].split("\n\n")[:-1]}
    assert len(shown) == 4  # Two of each dataset, and always the same.
    assert not {shot.removeprefix("Q: ").partition("\nA:")[0] for shot in shown} & (
        questions(train) | questions(heldout)
    )


def test_held_out_questions_do_not_depend_on_training_or_examples():
    base = made(SUMS, GCD)
    assert made(SUMS, GCD, num_train=60)[1] == base[1]
    more = made(SUMS, GCD, num_few_shot=8)
    assert [questions(rows) for rows in more] == [questions(rows) for rows in base]


def test_prompts_never_change():
    sizes = {"num_few_shot": 2, "num_train": 20, "num_heldout": 10}
    tables = make_prompts({"name": "reasoning_gym", "datasets": [SUMS, GCD]} | sizes)
    assert [table_content_id(table)[7:19] for table in tables] == ["5f4a382f760a", "2214c33e5b2a"]


def test_the_reward_function_scores_what_the_task_made():
    train, _ = made(SUMS, GCD, num_train=6)
    infos = [json.loads(row["info"]) for row in train]
    table = rollouts([f" {row['ground_truth']}\n" for row in train])
    column = table.schema.get_field_index("info")
    table = table.set_column(column, "info", [[json.dumps(info) for info in infos]])
    rewards = score(table, [{"function": "reasoning_gym"}], 0, 5.0)
    assert rewards["reward"].to_pylist() == [1.0] * 6


def test_a_small_dataset_trains_on_all_it_has():
    train, heldout = made(SMALL, num_train=1000)
    assert len(heldout) == 10 and 0 < len(train) < 100
    assert len(questions(train) | questions(heldout)) == len(train) + 10
    with pytest.raises(MeshdialError, match=r"gcd: it has only \d+ different questions that can"):
        made(SMALL, num_heldout=100)


def test_shares_add_up():
    assert _shares(10, [1, 1, 1]) == [4, 3, 3]
    assert _shares(7, [0.5, 0.25, 0.25]) == [3, 2, 2]
    assert _shares(1, [1, 2]) == [0, 1]


@pytest.mark.parametrize(
    "datasets, sentence",
    [
        ([], "task.datasets is empty"),
        ([{"name": "chain_sums"}], "reasoning-gym has no dataset chain_sums"),
        ([SUMS, SUMS], "chain_sum stands there twice"),
        ([{"name": "gcd", "options": {"size": 3}}], "gcd: the option size is the task's own"),
        ([{"name": "gcd", "options": {"values": 3}}], "gcd: TypeError: "),
        ([{"name": "gcd", "options": {"min_value": 9, "max_value": 3}}], "gcd: AssertionError"),
        ([{"name": "graph_color"}], "(an item has no answer)"),
    ],
)
def test_what_cannot_be_made_is_one_sentence(datasets, sentence):
    with pytest.raises(MeshdialError) as error:
        made(*datasets)
    assert sentence in str(error.value)


def test_a_slow_dataset_is_refused(monkeypatch):
    monkeypatch.setattr("rl.tasks.procedural.TRIAL_S", -1.0)
    monkeypatch.setattr("rl.tasks.procedural.TIME_LIMIT_S", 0.0)
    with pytest.raises(MeshdialError, match=r"gcd: 1 of 38 questions took 0 s, so that all would"):
        made(GCD)
    assert NUM_SHOTS == 8


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(MeshdialError, match="needs the package reasoning-gym, and reasoning_gym"):
        made(GCD)
