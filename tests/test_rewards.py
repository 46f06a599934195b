"""Built-in rewards by value, the weighted sum, and the table: 0.0 is never a missing reward."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.artifacts import make_table
from rl.errors import MeshdialError
from rl.rewards import BUILT_INS, score, scorer_hash
from rl.rewards.built_in import exact_match, numeric_match, random, regex


def rollouts(completions, ground_truths=None, info=None):
    count = len(completions)
    return make_table(
        "rollouts",
        {
            "sample_id": [f"s{n}" for n in range(count)],
            "group_id": ["g"] * count,
            "prompt_id": [f"addition/{n}" for n in range(count)],
            "prompt": ["Q: 1+1?\nA:"] * count,
            "prompt_tokens": [[1, 2]] * count,
            "completion": completions,
            "completion_tokens": [[3, 4, 5]] * count,
            "completion_mask": [[True] * 3] * count,
            "rollout_logprobs": [[-0.5] * 3] * count,
            "sampling_logprobs": [None] * count,
            "policy_version": [0] * count,
            "finish_reason": ["stop"] * count,
            "ground_truth": ground_truths or ["2"] * count,
            "info": [json.dumps(info or {})] * count,
        },
    )


def scored(completions, *functions, ground_truths=None, **options):
    table = score(rollouts(completions, ground_truths), functions, 0, 5.0, **options)
    return table.to_pylist()


EXACT = {"function": "exact_match"}
NUMERIC = {"function": "numeric_match"}
COIN = {"function": "random"}


@pytest.mark.parametrize(
    "completion, ground_truth, reward",
    [
        (" 12\n", "12", 1.0),
        ("12", " 12 ", 1.0),
        ("1 2", "12", 0.0),
        ("", "12", 0.0),
        ("12.", "12", 0.0),
    ],
)
def test_exact_match(completion, ground_truth, reward):
    assert exact_match(completion, ground_truth) == reward


@pytest.mark.parametrize(
    "completion, ground_truth, reward",
    [
        ("12", "12", 1.0),
        ("7+5 is 12.", "12", 1.0),
        ("12, I think; no, 13", "12", 0.0),
        ("the answer is 12.0", "12", 1.0),
        ("x = -3", "-3", 1.0),
        ("x = -3", "3", 0.0),
        ("10-3", "3", 1.0),
        ("(4)-3", "3", 1.0),
        ("\N{MINUS SIGN}3", "-3", 1.0),
        ("$1,234.50", "1234.5", 1.0),
        ("1234", "$1,234", 1.0),
        ("50%", "50", 1.0),
        ("1e3", "1000", 1.0),
        ("1e3", "3", 0.0),
        ("1e99999", "99999", 0.0),
        (".5", "0.5", 1.0),
        ("\\boxed{42}", "42", 1.0),
        ("v2", "2", 0.0),
        ("1.2.3", "3", 0.0),
        ("0.1", "0.1000000000000000000000001", 0.0),
        ("no number", "12", 0.0),
        ("", "12", 0.0),
        ("9" * 50_000, "12", 0.0),
    ],
)
def test_numeric_match(completion, ground_truth, reward):
    assert numeric_match(completion, ground_truth) == reward


@pytest.mark.parametrize("ground_truth", ["", "twelve", "1/2", "1 2", "12 apples"])
def test_numeric_match_needs_a_number_to_compare_with(ground_truth):
    with pytest.raises(ValueError, match="is not a number"):
        numeric_match("12", ground_truth)


@given(st.integers(-(10**12), 10**12))
def test_numeric_match_reads_integers_with_and_without_commas(number):
    assert numeric_match(f"so it is {number:,}", str(number)) == 1.0
    assert numeric_match(f"so it is {number + 1}", f"{number:,}") == 0.0


def test_regex_matches_the_whole_completion():
    assert regex(" <a>1\n2</a>\n", "<a>.*</a>") == 1.0
    assert regex("so: <a>1</a>", "<a>.*</a>") == 0.0


def test_random_is_a_fair_coin_of_seed_and_sample_alone():
    flips = [random(seed, f"sample-{n}") for seed in (0, 1) for n in range(2000)]
    assert set(flips) == {0.0, 1.0}
    assert 1874 < sum(flips) < 2126  # 2000 expected, four standard deviations of 31.6
    assert flips[:2000] != flips[2000:]
    assert [random(3, f"s{n}") for n in range(8)] == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_the_reward_is_the_weighted_sum_of_its_components():
    rows = scored(
        ["2", "so 2", "3"],
        EXACT | {"weight": 2.0},
        NUMERIC | {"weight": -0.5, "name": "number"},
    )
    assert rows == [
        row("s0", 1.5, 1.0, 1.0),
        row("s1", -0.5, 0.0, 1.0),
        row("s2", 0.0, 0.0, 0.0),
    ]


def row(sample_id, reward, exact, number, failure=None):
    return {
        "sample_id": sample_id,
        "reward": reward,
        "scored_ok": failure is None,
        "failure": failure,
        "component:exact_match": exact,
        "component:number": number,
    }


def test_a_component_without_a_value_leaves_the_sample_without_a_reward():
    functions = [EXACT, NUMERIC | {"name": "number"}]
    rows = scored(["3", "x"], *functions, ground_truths=["2", "x"])
    assert rows[0] == row("s0", 0.0, 0.0, 0.0)
    why = rows[1]["failure"]
    assert rows[1] == row("s1", None, 1.0, None, why)
    assert why.startswith("number: ValueError: the ground truth 'x' is not a number")


def test_a_sum_beyond_floats_is_a_failure():
    high, low = {"weight": 1.7e308}, {"weight": -1.7e308}
    (row,) = scored(["2"], EXACT | high, NUMERIC | high)
    assert (row["reward"], row["failure"]) == (None, "the weighted sum is not finite")
    (row,) = scored(["2"], EXACT | high, NUMERIC | low)
    assert (row["reward"], row["failure"]) == (0.0, None)


def test_regex_runs_with_its_pattern():
    spec = {"function": "regex", "options": {"pattern": r"\d+"}, "weight": 0.25}
    assert [row["reward"] for row in scored(["12", "x"], spec)] == [0.25, 0.0]


def test_a_regex_that_never_ends_costs_its_own_sample():
    spec = {"function": "regex", "options": {"pattern": "(a+)+b"}}
    table = score(rollouts(["ab", "a" * 60, "b"]), [spec], 0, 0.5)
    assert table["reward"].to_pylist() == [1.0, None, 0.0]
    assert table["failure"][1].as_py() == "regex: no answer within 0.5 s"


def test_random_rewards_follow_the_seed():
    rewards = [
        score(rollouts(["x"] * 40), [COIN], seed, 1)["reward"].to_pylist() for seed in (0, 0, 1)
    ]
    assert rewards[0] == rewards[1] != rewards[2]


def test_no_rollouts_no_rewards():
    columns = score(rollouts([]), [EXACT, {"function": "regex", "options": {"pattern": "x"}}], 0, 1)
    assert columns.num_rows == 0
    assert "component:regex" in columns.column_names


@pytest.mark.parametrize(
    "functions, sentence",
    [
        ([], "reward.functions is empty"),
        ([{"function": "exact"}], "reward.functions.0.function is 'exact', expected exact_match, "),
        ([EXACT, {"function": "my reward:f"}], "reward.functions.1.function is 'my reward:f'"),
        ([{"function": "m:f:g"}], "function is 'm:f:g'"),
        ([{"function": ":f"}], "function is ':f'"),
        ([EXACT, EXACT], "two are called exact_match"),
        ([EXACT | {"weight": float("nan")}], "reward.functions.0.weight is nan"),
        ([EXACT | {"weight": "1"}], "weight is '1', expected a finite number"),
        (
            [EXACT | {"options": {"strict": True}}],
            "reward function exact_match: it takes no option strict",
        ),
        ([{"function": "regex"}], "reward.functions.0.options.pattern is missing"),
        ([{"function": "regex", "options": {"pattern": "("}}], "pattern is no regular expression"),
        ([{"function": "no_such_module:f"}], "reward module no_such_module: not found"),
    ],
)
def test_a_wrong_config_is_one_sentence(functions, sentence):
    with pytest.raises(MeshdialError) as error:
        score(rollouts(["2"]), functions, 0, 1.0)
    assert sentence in str(error.value)


def test_scorer_hash_of_built_ins_follows_config_and_version(monkeypatch):
    base = scorer_hash([EXACT])
    assert base == scorer_hash(
        [{"function": "exact_match", "weight": 1, "name": None, "options": {}}]
    )
    others = [[NUMERIC], [EXACT | {"weight": 2.0}], [EXACT | {"name": "right"}], [EXACT, COIN]]
    hashes = {base, *map(scorer_hash, others)}
    assert len(hashes) == 5
    monkeypatch.setitem(BUILT_INS, "exact_match", BUILT_INS["exact_match"]._replace(version=2))
    assert scorer_hash([EXACT]) not in hashes


def test_scorer_hash_follows_the_source_of_a_module_without_running_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "my_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "length.py").write_text("raise SystemExit('imported')\n")
    functions = [{"function": "my_rewards.length:reward"}]
    before = scorer_hash(functions)
    assert before == scorer_hash(functions) and before.startswith("sha256:")
    (package / "length.py").write_text("raise SystemExit('imported!')\n")
    assert scorer_hash(functions) != before
