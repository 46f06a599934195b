"""The user's own tables: both layouts, both formats, the split, and what a bad row says."""

import datetime
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl.errors import MeshdialError
from rl.tasks import make_prompts
from rl.tasks.user_table import read_prompts

VERL_ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "system", "content": "Think."},
            {"role": "user", "content": "What is 6 times 7?"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"index": 0, "split": "train"},
    },
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 1, "split": "train"},
    },
]


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def made(train_file, heldout_file=None, heldout_fraction=0.1, column=None, bounds=(0, 1)):
    task = {"name": "table", "train_file": train_file, "heldout_file": heldout_file}
    rates = {"pass_rate_column": column, "pass_rate": bounds}
    train, heldout = make_prompts(task | {"heldout_fraction": heldout_fraction} | rates)
    return train.to_pylist(), heldout.to_pylist()


def numbered(count, start=0):
    return [{"prompt": f"{n} + 1 =", "answer": n + 1} for n in range(start, start + count)]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_verl_layout_is_read_unchanged(tmp_path, suffix):
    first, second = read_prompts(write(tmp_path / f"train{suffix}", VERL_ROWS))
    assert first.text is None
    assert list(first.messages) == VERL_ROWS[0]["prompt"]
    assert (first.ground_truth, second.ground_truth) == ("42", "2")
    assert first.prompt_id == "openai/gsm8k/f0384a6c68e0954e"
    assert first.info == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_plain_layout(tmp_path, suffix):
    rows = [
        {"prompt": "Q: 1+1?\nA:", "answer": "2", "level": 1, "note": None},
        {"prompt": "Größe?", "answer": "null", "level": 2, "note": "ünicode"},
    ]
    first, second = read_prompts(write(tmp_path / f"sums{suffix}", rows))
    assert (first.text, first.messages, first.ground_truth) == ("Q: 1+1?\nA:", None, "2")
    assert first.info == {"level": 1, "note": None}
    assert (second.text, second.ground_truth) == ("Größe?", "null")
    assert re.fullmatch(r"sums/[0-9a-f]{16}", first.prompt_id)


def test_plain_layout_may_hold_messages(tmp_path):
    row = {"prompt": [{"role": "user", "content": "Hi", "name": "x"}], "answer": "Hello"}
    (prompt,) = read_prompts(write(tmp_path / "chat.jsonl", [row]))
    assert list(prompt.messages) == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "answer, ground_truth",
    [
        (7, "7"),
        (0, "0"),
        (0.5, "0.5"),
        ("", ""),
        (False, "false"),
        ({"b": [1], "a": 2}, '{"a": 2, "b": [1]}'),
    ],
)
def test_answers_that_are_not_text(tmp_path, answer, ground_truth):
    (prompt,) = read_prompts(write(tmp_path / "a.jsonl", [{"prompt": "x", "answer": answer}]))
    assert prompt.ground_truth == ground_truth


def test_tables_have_the_schema_and_the_rows_in_order(tmp_path):
    train, heldout = made(
        write(tmp_path / "train.jsonl", numbered(3)), write(tmp_path / "test.parquet", VERL_ROWS)
    )
    assert [row["prompt"] for row in train] == ["0 + 1 =", "1 + 1 =", "2 + 1 ="]
    assert [row["ground_truth"] for row in train] == ["1", "2", "3"]
    assert json.loads(heldout[0]["messages"]) == VERL_ROWS[0]["prompt"]
    assert heldout[0]["prompt"] is None
    assert json.loads(heldout[0]["info"])["extra_info"] == {"index": 0, "split": "train"}


def test_values_that_json_cannot_hold(tmp_path):
    row = {"prompt": "x", "answer": "y", "day": datetime.date(2024, 5, 6), "loss": float("nan")}
    (prompt,) = read_prompts(write(tmp_path / "a.parquet", [row]))
    assert prompt.info == {"day": "2024-05-06", "loss": None}


def test_a_fraction_is_held_out_by_hash(tmp_path):
    train, heldout = made(write(tmp_path / "a.jsonl", numbered(1000)))
    prompts = [{row["prompt"] for row in side} for side in (train, heldout)]
    assert not prompts[0] & prompts[1]
    assert len(train) + len(heldout) == 1000
    assert 70 <= len(heldout) <= 130  # 100 expected, standard deviation 9.5


def test_more_rows_move_none_to_the_other_side(tmp_path):
    few = made(write(tmp_path / "few.jsonl", numbered(100)))
    many = made(write(tmp_path / "many.jsonl", numbered(100, start=-100) + numbered(100)))
    for before, after in zip(few, many, strict=True):
        assert {row["prompt"] for row in before} <= {row["prompt"] for row in after}


def test_copies_of_a_row_stay_together_with_ids_of_their_own(tmp_path):
    rows = numbered(40)
    sides = made(write(tmp_path / "a.jsonl", [*rows, *rows, *rows]))
    for side in sides:
        ids = [row["prompt_id"] for row in side]
        assert len(set(ids)) == len(ids)
        originals = [name for name in ids if "-" not in name]
        assert sorted(ids) == sorted(i + end for i in originals for end in ("", "-2", "-3"))


def test_a_held_out_prompt_is_never_trained_on(tmp_path):
    train, heldout = made(
        write(tmp_path / "train.jsonl", numbered(10)),
        write(tmp_path / "test.jsonl", numbered(3, start=8)),
    )
    assert [row["ground_truth"] for row in train] == [str(n + 1) for n in range(8)]
    assert len(heldout) == 3


def test_ids_do_not_depend_on_the_row_or_on_the_format(tmp_path):
    rows = numbered(5)
    ids = [row.prompt_id for row in read_prompts(write(tmp_path / "a.jsonl", rows))]
    again = [row.prompt_id for row in read_prompts(write(tmp_path / "a.parquet", rows[::-1]))]
    assert ids == again[::-1]


def test_many_rows_in_several_batches(tmp_path):
    prompts = read_prompts(write(tmp_path / "a.parquet", numbered(1300)))
    assert [int(prompt.ground_truth) for prompt in prompts] == list(range(1, 1301))


def without(row, *path):
    row = json.loads(json.dumps(row))
    inner = row
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return row


GOOD = {"prompt": "x", "answer": "y"}
MISSING_ROLE = GOOD | {"prompt": [{"content": "x"}]}
IMAGE = GOOD | {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}


@pytest.mark.parametrize(
    "row, column, why",
    [
        (without(GOOD, "answer"), "answer", "the column is missing; found prompt"),
        (without(GOOD, "prompt"), "prompt", "the column is missing; found answer"),
        (without(VERL_ROWS[0], "prompt"), "prompt", "the column is missing"),
        (
            without(VERL_ROWS[0], "reward_model", "ground_truth"),
            "reward_model",
            "expected a ground_truth in it",
        ),
        (VERL_ROWS[0] | {"reward_model": "42"}, "reward_model", "found '42'"),
        (GOOD | {"answer": None}, "answer", "the value is missing"),
        (GOOD | {"prompt": None}, "prompt", "expected text or a list of messages, found None"),
        (GOOD | {"prompt": ""}, "prompt", "found ''"),
        (GOOD | {"prompt": []}, "prompt", "found []"),
        (GOOD | {"prompt": ["x"]}, "prompt", "expected {role, content} as text, found 'x'"),
        (MISSING_ROLE, "prompt", "expected {role, content} as text"),
        (IMAGE, "prompt", "expected {role, content} as text"),
        (GOOD | {"prompt": "\ud800"}, "prompt", "not valid Unicode"),
    ],
)
def test_a_bad_row_is_named_by_file_row_and_column(tmp_path, row, column, why):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(row)}\n")
    with pytest.raises(MeshdialError) as error:
        read_prompts(str(path))
    assert str(error.value).startswith(f"{path}, row 3, column {column}: ")
    assert why in str(error.value)


def test_a_bad_parquet_row_is_named(tmp_path):
    rows = [*numbered(600), {"prompt": "x", "answer": None}]
    path = write(tmp_path / "bad.parquet", rows)
    with pytest.raises(MeshdialError, match="row 601, column answer: the value is missing"):
        read_prompts(path)


def test_bytes_are_refused(tmp_path):
    path = write(tmp_path / "a.parquet", [GOOD | {"images": [b"\x89PNG"]}])
    with pytest.raises(MeshdialError, match="row 1, column images: found bytes"):
        read_prompts(path)


@pytest.mark.parametrize(
    "name, content, why",
    [
        ("a.jsonl", b'{"prompt": "x", "answer": "y"}\n{"prompt": \n', "row 2: not JSON"),
        ("a.jsonl", b'{"prompt": "\xff", "answer": "y"}\n', "row 1: not JSON"),
        ("a.jsonl", b'["x", "y"]\n', "row 1: expected an object, found ['x', 'y']"),
        ("a.jsonl", b"\n", "the file has no rows"),
        ("a.parquet", b"PAR1 not really", "not a readable parquet file"),
        ("a.csv", b"prompt,answer\nx,y\n", "the name ends in '.csv', expected .parquet or .jsonl"),
    ],
)
def test_unreadable_files(tmp_path, name, content, why):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(MeshdialError, match=re.escape(why)) as error:
        read_prompts(str(path))
    assert str(path) in str(error.value)


def test_a_missing_file_and_a_missing_option(tmp_path):
    with pytest.raises(MeshdialError, match=r"nowhere.jsonl: no such file"):
        made(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(MeshdialError, match=r"task.train_file is missing"):
        made(None)


def test_an_empty_side_is_an_error(tmp_path):
    train = write(tmp_path / "train.jsonl", numbered(3))
    with pytest.raises(MeshdialError, match=r"train.jsonl: no held-out prompt among the 3 rows"):
        made(train, heldout_fraction=1e-9)
    with pytest.raises(MeshdialError, match="no training prompt among the 3 rows"):
        made(train, heldout_file=train)


def rated(*rates):
    return [{"prompt": f"{n}?", "answer": n, "rate": rate} for n, rate in enumerate(rates)]


def test_training_rows_outside_the_pass_rate_are_left_out(tmp_path):
    train = write(tmp_path / "train.jsonl", [*rated(0.0, 0.2, 0.5, 0.8, 1), *rated(0.0, 0.2)])
    heldout = write(tmp_path / "heldout.jsonl", [{"prompt": "9?", "answer": 9, "rate": 1.0}])
    kept, held = made(train, heldout, column="rate", bounds=(0.2, 0.8))
    assert [row["prompt"] for row in kept] == ["1?", "2?", "3?", "1?"]
    assert [row["prompt"] for row in held] == ["9?"]
    assert len(made(train, heldout, column="rate", bounds=(0, 1))[0]) == 7
    assert len(made(train, heldout)[0]) == 7


def test_a_pass_rate_may_stand_inside_a_column(tmp_path):
    rows = [row | {"extra_info": {"rate": n / 2}} for n, row in enumerate(VERL_ROWS)]
    train = write(tmp_path / "train.parquet", rows)
    heldout = write(tmp_path / "heldout.jsonl", numbered(1))
    kept, _ = made(train, heldout, column="extra_info.rate", bounds=(0.5, 1))
    assert [row["ground_truth"] for row in kept] == ["2"]


@pytest.mark.parametrize(
    "rate, found", [(1.5, "1.5"), (-0.1, "-0.1"), ("0.5", "'0.5'"), (None, "None"), (True, "True")]
)
def test_a_bad_pass_rate_names_file_row_and_column(tmp_path, rate, found):
    train = write(tmp_path / "train.jsonl", rated(0.5, rate))
    heldout = write(tmp_path / "heldout.jsonl", numbered(1))
    expected = f"{train}, row 2, column rate: expected a pass rate from 0 to 1, found {found}"
    with pytest.raises(MeshdialError, match=re.escape(expected)):
        made(train, heldout, column="rate")


def test_a_missing_pass_rate_and_bounds_that_leave_nothing(tmp_path):
    train = write(tmp_path / "train.jsonl", rated(0.5, 0.5))
    heldout = write(tmp_path / "heldout.jsonl", numbered(1))
    with pytest.raises(MeshdialError, match="row 1, column share: the column is missing; found"):
        made(train, heldout, column="share")
    with pytest.raises(
        MeshdialError, match=r"no training prompt with rate from 0\.6 to 1 among the"
    ):
        made(train, heldout, column="rate", bounds=(0.6, 1))
