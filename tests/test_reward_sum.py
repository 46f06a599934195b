"""Components on one scale: normalised over group or batch, functions and models in one sum."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.artifacts import make_table
from rl.errors import MeshdialError
from rl.rewards import Score, score
from rl.rewards.normalising import normalised
from tests.test_rewards import EXACT, rollouts

JUDGE = {"name": "judge", "weight": 2.0, "normalise": "none"}


def values(scores):
    return [score.value for score in scores]


def of(*numbers):
    return [Score(number, None if number is not None else "why") for number in numbers]


def test_group_and_batch_by_hand():
    scores = of(1.0, 3.0, 10.0, 10.0, 5.0, None)
    by_group = normalised(scores, ["a", "a", "b", "b", "c", "a"])
    assert values(by_group) == [-1.0, 1.0, 0.0, 0.0, 0.0, None]
    assert by_group[5] == Score(None, "why")
    # Mean 5.8, squares 23.04 + 7.84 + 17.64 + 17.64 + 0.64 = 66.8, deviation sqrt(13.36).
    by_batch = normalised(scores, [None] * 6)
    expected = [x / math.sqrt(13.36) for x in (-4.8, -2.8, 4.2, 4.2, -0.8)]
    assert values(by_batch)[:5] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("number", [0.0, 0.1, 1e308, -5e-324])
def test_no_spread_is_zero(number):
    assert values(normalised(of(number, number, number), "ggg")) == [0.0, 0.0, 0.0]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=9))
def test_any_finite_values_have_mean_0_and_deviation_1_or_0(numbers):
    found = values(normalised(of(*numbers), [0] * len(numbers)))
    assert math.fsum(found) / len(found) == pytest.approx(0.0, abs=1e-9)
    deviation = math.sqrt(math.fsum(x * x for x in found) / len(found))
    assert deviation == pytest.approx(1.0) or found == [0.0] * len(found)


def grouped(completions, groups):
    table = rollouts(completions)
    column = table.schema.get_field_index("group_id")
    rows = table.set_column(column, table.schema.field(column), [groups])
    return make_table("rollouts", rows.to_pydict())


def test_the_sum_is_of_normalised_values_and_the_columns_are_raw():
    table = score(
        grouped(["2", "x", "2", "2"], ["a", "a", "b", "b"]),
        [EXACT | {"normalise": "group", "weight": 0.5}],
        0,
        1.0,
        models=[JUDGE | {"normalise": "batch"}],
        model_scores={"judge": of(1.0, 3.0, 1.0, 3.0)},
    )
    assert table["component:exact_match"].to_pylist() == [1.0, 0.0, 1.0, 1.0]
    assert table["component:judge"].to_pylist() == [1.0, 3.0, 1.0, 3.0]
    assert table["reward"].to_pylist() == [0.5 - 2, -0.5 + 2, -2.0, 2.0]


def test_models_alone_are_enough():
    scores = [Score(0.25), Score(None, "longer than 64 tokens")]
    options = {"models": [JUDGE], "model_scores": {"judge": scores}}
    rows = score(rollouts(["2", "x"]), [], 0, 1.0, **options).to_pylist()
    assert [row["reward"] for row in rows] == [0.5, None]
    assert rows[1]["failure"] == "judge: longer than 64 tokens"
    assert not rows[1]["scored_ok"]


@pytest.mark.parametrize(
    "functions, models, scores, sentence",
    [
        ([], [], {}, "reward.functions is empty and there is no model"),
        ([EXACT], [JUDGE | {"name": "exact_match"}], {"exact_match": of(1.0)}, "two components"),
        ([EXACT], [JUDGE], {}, "reward models judge are asked for, and there are scores of none"),
        ([EXACT], [], {"judge": of(1.0)}, "models none are asked for, and there are scores of jud"),
        ([], [JUDGE], {"judge": of(1.0, 2.0)}, "reward model judge: 2 scores of 1 rollouts"),
        ([], [JUDGE | {"weight": float("inf")}], {"judge": of(1.0)}, "reward.models.0.weight is"),
        ([EXACT | {"normalise": "all"}], [], {}, "reward.functions.0.normalise is 'all', expected"),
    ],
)
def test_what_does_not_fit_is_one_sentence(functions, models, scores, sentence):
    with pytest.raises(MeshdialError) as error:
        score(rollouts(["2"]), functions, 0, 1.0, models=models, model_scores=scores)
    assert sentence in str(error.value)
