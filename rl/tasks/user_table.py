"""Prompts from the user's own tables, parquet or JSONL, in one of two layouts.

* `prompt, answer`: a prompt is text or a list of {role, content} messages; further columns go to
  `info`.
* verl's: `data_source, prompt, ability, reward_model {style, ground_truth}, extra_info`, unchanged;
  everything but the prompt and the ground truth goes to `info`.

Rows count from 1; in JSONL a row's number is its line's.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from rl.errors import MeshdialError
from rl.tasks.prompt_table import Prompt, hash64

ROWS_PER_BATCH = 512


def table(
    *,
    train_file: str | None,
    heldout_file: str | None,
    heldout_fraction: float,
    pass_rate_column: str | None,
    pass_rate: Sequence[float],
) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts in the order of their rows.

    With `pass_rate_column`, the training rows whose share of right answers, as it stands in that
    column, lies outside the bounds `pass_rate` are left out; held-out rows all stay.

    With `heldout_file`, a training prompt that stands in it too is left out of training. Without,
    about `heldout_fraction` of the prompts are held out, by a hash of the prompt: a row added to
    the file moves no other to the other side.
    """
    if train_file is None:
        raise MeshdialError("task table: task.train_file is missing")
    prompts = read_prompts(train_file)
    if heldout_file is not None:
        heldout = read_prompts(heldout_file)
        seen = {_content(prompt) for prompt in heldout}
        train = [prompt for prompt in prompts if _content(prompt) not in seen]
    else:
        bound = math.ceil(heldout_fraction * 2**64)
        heldout = [prompt for prompt in prompts if hash64(_content(prompt)) < bound]
        train = [prompt for prompt in prompts if hash64(_content(prompt)) >= bound]
    if pass_rate_column is not None:
        rates = _pass_rates(train_file, pass_rate_column)
        low, high = pass_rate
        train = [prompt for prompt in train if low <= rates[prompt.prompt_id] <= high]
    for side, rows in (("training", train), ("held-out", heldout)):
        if not rows:
            files = f"{train_file} and {heldout_file}" if heldout_file else train_file
            within = ""
            if pass_rate_column is not None and side == "training":
                within = f" with {pass_rate_column} from {low:g} to {high:g}"
            raise MeshdialError(f"{files}: no {side} prompt{within} among the {len(prompts)} rows")
    return train, heldout


def read_prompts(path: str) -> list[Prompt]:
    """The prompts of one file. A row that does not fit is an error that names file, row, column.

    A prompt's id is the file's stem or the row's `data_source`, and a hash of prompt and answer;
    where the same row stands there again, `-2`, `-3`, ... follow.
    """
    prompts = [prompt for prompt, _ in _identified(path)]
    if not prompts:
        raise MeshdialError(f"{path}: the file has no rows")
    return prompts


def _identified(path: str) -> Iterator[tuple[Prompt, "_Row"]]:
    times_seen: dict[str, int] = {}
    for number, values in _rows(Path(path)):
        row = _Row(path, number, values)
        prompt = row.prompt()
        times = times_seen[prompt.prompt_id] = times_seen.get(prompt.prompt_id, 0) + 1
        if times > 1:
            prompt = replace(prompt, prompt_id=f"{prompt.prompt_id}-{times}")
        yield prompt, row


def _pass_rates(path: str, column: str) -> dict[str, float]:
    """The pass rate of each row, by its prompt's id."""
    return {prompt.prompt_id: row.pass_rate(column) for prompt, row in _identified(path)}


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if not path.is_file():
        raise MeshdialError(f"{path}: no such file")
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix == ".jsonl":
        return _jsonl_rows(path)
    raise MeshdialError(f"{path}: the name ends in {path.suffix!r}, expected .parquet or .jsonl")


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError, ValueError) as error:
        raise MeshdialError(f"{path}: not a readable parquet file ({_line(error)})") from None


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise MeshdialError(f"{path}, row {number}: not JSON ({_line(error)})") from None
            if not isinstance(row, dict):
                raise MeshdialError(f"{path}, row {number}: expected an object, found {_show(row)}")
            yield number, row


class _Row:
    """One row of a user's file, and how to say what is wrong with it."""

    def __init__(self, path: str, number: int, row: Mapping[str, Any]):
        self.path, self.number, self.row = path, number, row

    def prompt(self) -> Prompt:
        is_verl = "reward_model" in self.row
        for column in ("prompt",) if is_verl else ("prompt", "answer"):
            if column not in self.row:
                self.refuse(column, f"the column is missing; found {', '.join(self.row)}")
        text, messages = self.text_or_messages()
        ground_truth = self.verl_answer() if is_verl else self.answer("answer", self.row["answer"])
        info = self.verl_info() if is_verl else self.info("prompt", "answer")
        prompt = Prompt("", ground_truth, text, messages, info)
        source = self.row.get("data_source") if is_verl else None
        key = hash64(json.dumps([_content(prompt), ground_truth]))
        return replace(prompt, prompt_id=f"{source or Path(self.path).stem}/{key:016x}")

    def verl_answer(self) -> str:
        found = self.row["reward_model"]
        if not isinstance(found, Mapping) or "ground_truth" not in found:
            self.refuse("reward_model", f"expected a ground_truth in it, found {_show(found)}")
        return self.answer("reward_model.ground_truth", found["ground_truth"])

    def answer(self, column: str, value: Any) -> str:
        """Text as it is; anything else as JSON: the number 7 is `7`."""
        if value is None:
            self.refuse(column, "the value is missing")
        if isinstance(value, str):
            return self.plain(column, value)
        return json.dumps(self.plain(column, value), sort_keys=True, ensure_ascii=False)

    def text_or_messages(self) -> tuple[str | None, tuple[dict[str, str], ...] | None]:
        value = self.row["prompt"]
        if isinstance(value, str) and value:
            return self.plain("prompt", value), None
        if not isinstance(value, list) or not value:
            self.refuse("prompt", f"expected text or a list of messages, found {_show(value)}")
        return None, tuple(self.message(message) for message in value)

    def message(self, message: Any) -> dict[str, str]:
        fields = ("role", "content")
        is_mapping = isinstance(message, Mapping)
        if not is_mapping or not all(isinstance(message.get(field), str) for field in fields):
            self.refuse("prompt", f"expected {{role, content}} as text, found {_show(message)}")
        return {field: self.plain("prompt", message[field]) for field in fields}

    def pass_rate(self, column: str) -> float:
        """A number from 0 to 1; the column may be inside another: `extra_info.pass_rate`."""
        value: Any = self.row
        for key in [column] if column in self.row else column.split("."):
            if not isinstance(value, Mapping) or key not in value:
                self.refuse(column, f"the column is missing; found {', '.join(self.row)}")
            value = value[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= 1:
            self.refuse(column, f"expected a pass rate from 0 to 1, found {_show(value)}")
        return float(value)

    def verl_info(self) -> dict[str, Any]:
        info = self.info("prompt")
        info["reward_model"].pop("ground_truth")
        return info

    def info(self, *left_out: str) -> dict[str, Any]:
        return {key: self.plain(key, self.row[key]) for key in self.row if key not in left_out}

    def plain(self, column: str, value: Any) -> Any:
        """`value` as JSON can hold it: dates and decimals as text, NaN and infinity as null."""
        match value:
            case None | bool() | int():
                return value
            case str():
                return value if _is_unicode(value) else self.refuse(column, "not valid Unicode")
            case float():
                return value if math.isfinite(value) else None
            case Mapping():
                return {str(key): self.plain(column, inner) for key, inner in value.items()}
            case list() | tuple():
                return [self.plain(column, inner) for inner in value]
            case bytes():
                self.refuse(column, "found bytes; only text and numbers can be read")
            case _:
                return str(value)

    def refuse(self, column: str, why: str) -> NoReturn:
        raise MeshdialError(f"{self.path}, row {self.number}, column {column}: {why}")


def _content(prompt: Prompt) -> str:
    """What makes two prompts the same: the text, or the messages."""
    return prompt.text if prompt.text is not None else json.dumps(prompt.messages)


def _is_unicode(text: str) -> bool:
    """Whether no half of a surrogate pair stands alone, as JSON's escapes allow."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _show(value: Any) -> str:
    return f"{value!r:.60}"
