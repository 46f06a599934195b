"""Rewards of structure, mathematics and reasoning-gym by value, and what completions cannot do."""

import json
import time

import pytest

from rl.errors import MeshdialError
from rl.rewards import score, scorer_hash
from rl.rewards.functions import parse_functions
from rl.rewards.structure import format_tags, json_schema
from tests.test_rewards import rollouts
from tests.verifiers import needs_verifiers

pytestmark = needs_verifiers

SCHEMA = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "additionalProperties": False,
}
MATHS = {"function": "math_verify"}
JSON = {"function": "json_schema"}


def scored(spec, completions, ground_truths=None, info=None, time_limit_s=10.0, **more):
    table = score(rollouts(completions, ground_truths, info), [spec], 0, time_limit_s, **more)
    return [(row["reward"], row["failure"]) for row in table.to_pylist()]


@pytest.mark.parametrize(
    "completion, reward",
    [
        ("<think>1+1</think><answer>2</answer>", 1.0),
        ("\n <think>a\nb</think>\n\n<answer></answer>\n", 1.0),
        ("<think>1 < 2 </ think></think> <answer>2</answer>", 1.0),
        ("<answer>2</answer><think>1+1</think>", 0.0),
        ("<think>1+1</think>", 0.0),
        ("so <think>1+1</think><answer>2</answer>", 0.0),
        ("<think>1+1</think> so <answer>2</answer>", 0.0),
        ("<think>1+1</think><answer>2</answer>.", 0.0),
        ("<think>1</think><think>1</think><answer>2</answer>", 0.0),
        ("<think>1<answer>2</answer></think>", 0.0),
        ("<think>1</think><answer>2", 0.0),
        ("</think><think><answer>2</answer>", 0.0),
        ("<Think>1</Think><answer>2</answer>", 0.0),
        ("<think>" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_format_tags(completion, reward):
    assert format_tags(completion) == reward


def test_format_tags_are_an_option():
    spec = {"function": "format_tags", "options": {"tags": ["plan", "code", "test"]}}
    right = "<plan>x</plan><code>y</code>\n<test>z</test>"
    assert scored(spec, [right, "<think>1</think><answer>2</answer>"]) == [(1.0, None), (0.0, None)]


@pytest.mark.parametrize(
    "completion, reward",
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        ('\n```json\n{"name": "Ada",\n "age": 36}\n```\n', 1.0),
        ('```\n{"name": "Ada", "age": 36}\n```', 1.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada", "age": 36, "born": 1815}', 0.0),
        ('{"name": "Ada"}', 0.0),
        ('Here: {"name": "Ada", "age": 36}', 0.0),
        ('```json\n{"name": "Ada", "age": 36}', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ("[" * 200_000, 0.0),
        ("9" * 200_000, 0.0),
        ("\0", 0.0),
        ("", 0.0),
    ],
)
def test_json_schema(completion, reward):
    assert json_schema(completion, {}, schema=SCHEMA) == reward


def test_a_json_schema_may_come_with_the_row():
    expected = [(1.0, None), (0.0, None)]
    for schema in ({"type": "array"}, json.dumps({"type": "array"})):
        assert scored(JSON, ["[1]", "1"], info={"schema": schema}) == expected
    assert scored(JSON | {"options": {"schema": SCHEMA}}, ["1"]) == [(0.0, None)]


@pytest.mark.parametrize(
    "schema, why",
    [
        (None, "json_schema: ValueError: neither options.schema nor the row's info.schema is a "),
        ({"type": "nonsense"}, "json_schema: SchemaError"),
        ({"$ref": "https://example.com/schema.json"}, "json_schema: "),
        ({"pattern": "(a+)+b"}, "json_schema: no answer within 1 s"),
    ],
)
def test_a_row_whose_schema_is_of_no_use_is_not_scored(schema, why):
    info = {} if schema is None else {"schema": schema}
    ((reward, failure),) = scored(JSON, [f'"{"a" * 60}"'], info=info, time_limit_s=1.0)
    assert reward is None and failure.startswith(why)


@pytest.mark.parametrize(
    "function, options, sentence",
    [
        ("format_tags", {"tags": []}, "options.tags is [], expected a list of names of tags"),
        ("format_tags", {"tags": "think"}, "options.tags is 'think', expected a list"),
        ("format_tags", {"tags": ["a", "a"]}, "where one stands twice"),
        ("format_tags", {"tags": ["a>"]}, "expected a list of names of tags"),
        ("json_schema", {"schema": {"type": "text"}}, "options.schema is no JSON schema: 'text'"),
        ("json_schema", {"schema": "x"}, "options.schema is no JSON schema: "),
    ],
)
def test_a_wrong_option_is_one_sentence(function, options, sentence):
    with pytest.raises(MeshdialError) as error:
        parse_functions([{"function": function, "options": options}])
    assert str(error.value).startswith("reward.functions.0.options.")
    assert sentence in str(error.value)


@pytest.mark.parametrize("function", ["math_verify", "reasoning_gym"])
def test_a_missing_package_is_one_sentence(function, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MeshdialError, match=rf"{function} needs the package .* not installed: pip"):
        parse_functions([{"function": function}])


EQUAL = [
    ("\\boxed{42}", "42"),
    ("so it is $\\frac{1}{2}$", "0.5"),
    ("0.5", "\\frac{1}{2}"),
    ("1/2", "\\frac12"),
    ("x=3", "3"),
    ("$x^2+2x+1$", "(x+1)^2"),
    ("1,234", "$1234$"),
    ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}"),
    ("\\boxed{\\{1,2\\}}", "\\{2,1\\}"),
    ("\\boxed{(1, 2]}", "(1,2]"),
]
UNEQUAL = [
    ("13, I think", "12"),
    ("", "12"),
    ("\\boxed{x+1}", "x+2"),
    ("1/3", "0.3"),
    ("\\frac{1}{{{2", "0.5"),
    ("\0001\0002\000", "7"),
    ("$" * 1_000_000, "12"),
    ("x" * 1_000_000, "12"),
    ("\N{SNOWMAN}", "12"),
    ("__import__('os')._exit(0)", "12"),
]


def test_mathematics_is_compared_by_value():
    pairs = EQUAL + UNEQUAL
    outcomes = scored(MATHS, [found for found, _ in pairs], [wanted for _, wanted in pairs])
    assert outcomes == [(1.0, None)] * len(EQUAL) + [(0.0, None)] * len(UNEQUAL)


def test_a_ground_truth_without_mathematics_is_not_scored():
    ((reward, failure),) = scored(MATHS, ["12"], [""])
    assert reward is None
    assert failure.startswith("math_verify: ValueError: the ground truth '' holds no mathematics")


HOSTILE = [
    "$9^{9^{9^{9^{9}}}}$",
    "\\boxed{10^{10^{10}}}",
    "9**9**9**9",
    "$((((9!)!)!)!)$",
    "\\boxed{" * 100_000,
    "$" + "(" * 5000 + "1" + ")" * 5000 + "$",
]


def test_completions_that_hold_up_the_checker_cost_one_sample_each():
    scored(MATHS, ["12"], ["12"])  # The package is imported, once in a program.
    completions = [word for hostile in HOSTILE[:4] for word in (hostile, *["12"] * 15)]
    started = time.monotonic()
    outcomes = scored(MATHS, completions, ["12"] * 64, time_limit_s=1.0, memory_limit_bytes=8 << 30)
    assert time.monotonic() - started < 3.0
    assert outcomes[::16] == [(None, "math_verify: no answer within 1 s")] * 4
    assert [outcome for n, outcome in enumerate(outcomes) if n % 16] == [(1.0, None)] * 60


@pytest.mark.parametrize("completion", HOSTILE[4:])
def test_a_completion_that_is_endlessly_nested_is_wrong_or_costs_its_sample(completion):
    first, second = scored(MATHS, [completion, "12"], ["12", "12"], time_limit_s=1.0)
    assert first[0] != 1.0 and second == (1.0, None)


def row(answer="3", **more):
    entry = {"question": "1 + 2 =", "answer": answer, "metadata": {"source_dataset": "chain_sum"}}
    return {"dataset": "chain_sum", "options": {"max_terms": 2}, "entry": entry} | more


def test_reasoning_gym_scores_the_answer_as_its_dataset_does():
    completions = [" 3\n", "<answer> 3 </answer>", "<answer>4</answer><answer>3</answer>", "4", ""]
    spec = {"function": "reasoning_gym"}
    rewards = [reward for reward, _ in scored(spec, completions, info=row())]
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0]
    # The dataset's own: the share of the answer in a text that contains it.
    assert scored(spec, ["so 3"], info=row()) == [(0.25, None)]


def test_reasoning_gym_needs_a_row_of_its_task():
    ((reward, failure),) = scored({"function": "reasoning_gym"}, ["3"], info={"dataset": "gcd"})
    assert reward is None
    assert failure.startswith("reasoning_gym: ValueError: info has no options; the row is not of")


def test_scorer_hash_follows_the_package_and_the_normalisation(monkeypatch):
    before = scorer_hash([MATHS])
    assert scorer_hash([MATHS | {"normalise": "group"}]) != before
    assert scorer_hash([MATHS], [{"name": "judge", "weight": 1.0}]) != before
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0")
    assert scorer_hash([MATHS]) != before
