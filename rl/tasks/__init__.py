"""Prompts and their ground truth: what a run trains on and what it is judged by.

A task is a pure function of its options that gives training and held-out prompts, disjoint. To add
one, write such a function and name it in `TASKS`; its keyword arguments are keys of `task` in the
config.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from rl.errors import MeshdialError
from rl.tasks.few_shot import addition, larger, next_number
from rl.tasks.order import iteration_window
from rl.tasks.procedural import reasoning_gym
from rl.tasks.prompt_table import Prompt, prompt_table
from rl.tasks.sort_digits import sort_digits
from rl.tasks.user_table import table

__all__ = ["TASKS", "Prompt", "iteration_window", "make_prompts", "task_files"]

TASKS: dict[str, Callable[..., tuple[list[Prompt], list[Prompt]]]] = {
    "addition": addition,
    "next_number": next_number,
    "larger": larger,
    "sort_digits": sort_digits,
    "reasoning_gym": reasoning_gym,
    "table": table,
}


def make_prompts(task: Mapping[str, Any]) -> tuple[pa.Table, pa.Table]:
    """The training and the held-out prompts of a task, as tables of kind `prompts`.

    `task` is the config's block: `name` and every option that the task of that name reads.
    """
    name = task["name"]
    if name not in TASKS:
        raise MeshdialError(f"task.name is {name!r}, expected one of {', '.join(TASKS)}")
    builder = TASKS[name]
    options = list(inspect.signature(builder).parameters)
    missing = [option for option in options if option not in task]
    if missing:
        raise MeshdialError(f"task {name}: the key task.{missing[0]} is missing")
    train, heldout = builder(**{option: task[option] for option in options})
    return prompt_table(train), prompt_table(heldout)


def task_files(task: Mapping[str, Any]) -> list[str]:
    """The user's files that a task reads."""
    if task["name"] != "table":
        return []
    return [path for path in (task["train_file"], task["heldout_file"]) if path is not None]
