"""The scorers that the datasets of reasoning-gym bring along."""

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from reasoning_gym import create_dataset

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym(completion: str, info: Mapping[str, Any]) -> float:
    """The dataset's own score of the completion's answer, from 0 to 1.

    `info` is that of the task reasoning_gym: `dataset`, `options` and the `entry` that was asked.
    The answer is the last `<answer>` element of the completion, or all of it, stripped. ValueError
    if the row is not of that task.
    """
    missing = [key for key in ("dataset", "options", "entry") if key not in info]
    if missing:
        raise ValueError(f"info has no {missing[0]}; the row is not of the task reasoning_gym")
    dataset = _dataset(info["dataset"], json.dumps(info["options"], sort_keys=True))
    return dataset.score_answer(answer=answer_in(completion), entry=info["entry"])


def answer_in(completion: str) -> str:
    """What the completion answers: its last `<answer>` element, or all of it, stripped."""
    found = _ANSWER.findall(completion)
    return (found[-1] if found else completion).strip()


@functools.cache
def _dataset(name: str, options: str):
    return create_dataset(name, seed=0, size=1, **json.loads(options))
