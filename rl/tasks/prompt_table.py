"""The table every task makes: one row a prompt, in the schema of kind `prompts`."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from rl.artifacts import SCHEMAS, make_table


@dataclass(frozen=True)
class Prompt:
    """One prompt: plain text or chat messages (never both), its answer, and whatever rewards need.

    `info["target"]`, where a task gives it, is the text of a perfect completion including the
    newline that stops it: what a supervised warm start learns to write.
    """

    prompt_id: str
    ground_truth: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


def prompt_table(prompts: Iterable[Prompt]) -> pa.Table:
    """The prompts as a table, in their order."""
    columns: dict[str, list] = {name: [] for name in SCHEMAS["prompts"].names}
    for prompt in prompts:
        columns["prompt_id"].append(prompt.prompt_id)
        columns["prompt"].append(prompt.text)
        columns["messages"].append(None if prompt.messages is None else _json(prompt.messages))
        columns["ground_truth"].append(prompt.ground_truth)
        columns["info"].append(_json(prompt.info))
    return make_table("prompts", columns)


def hash64(text: str) -> int:
    """A number below 2**64 that depends on `text` alone, on every machine and Python version."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
