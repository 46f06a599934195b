"""What the config says of reward functions, as checked records; and what code they stand for."""

import hashlib
import importlib
import importlib.machinery
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.errors import MeshdialError
from rl.rewards.built_in import BUILT_INS


@dataclass(frozen=True)
class RewardFunction:
    """One term of the reward: `weight` times a built-in, or a function `module:function`."""

    name: str
    function: str
    weight: float
    options: Mapping[str, Any]

    @property
    def is_built_in(self) -> bool:
        return self.function in BUILT_INS

    @property
    def module_and_function(self) -> tuple[str, str]:
        module, _, function = self.function.partition(":")
        return module, function


def parse_functions(functions: Sequence[Mapping[str, Any]]) -> list[RewardFunction]:
    """The records of the config's list `reward.functions`."""
    parsed = [_parse(number, spec) for number, spec in enumerate(functions)]
    if not parsed:
        raise MeshdialError("reward.functions is empty, expected at least one function")
    names = [function.name for function in parsed]
    for name in names:
        if names.count(name) > 1:
            raise MeshdialError(
                f"reward.functions: two are called {name}; give one of them a name of its own"
            )
    return parsed


def scorer_hash(functions: Sequence[Mapping[str, Any]]) -> str:
    """A hash of everything that decides the rewards: `sha256:` and hex.

    That is the config's list, the versions of the built-ins, and the source of each user's module
    (not of what it imports in turn).
    """
    parts = [
        {
            "name": function.name,
            "function": function.function,
            "weight": function.weight,
            "options": dict(function.options),
            "code": _code_identity(function),
        }
        for function in parse_functions(functions)
    ]
    return "sha256:" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def search_path() -> list[str]:
    """Where a user's module is looked for: the working directory first."""
    return list(dict.fromkeys([os.getcwd(), *(path or os.getcwd() for path in sys.path)]))


def module_file(module: str) -> Path:
    """The source file of a module, found without running any of it."""
    importlib.invalidate_caches()
    locations: Sequence[str] | None = search_path()
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = None
        if locations is not None:
            spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), locations)
        if spec is None:
            raise MeshdialError(f"reward module {module}: not found in {os.getcwd()} or installed")
        locations = spec.submodule_search_locations
    if spec.origin is None or not Path(spec.origin).is_file():
        raise MeshdialError(f"reward module {module}: it has no source file")
    return Path(spec.origin)


def _parse(number: int, spec: Mapping[str, Any]) -> RewardFunction:
    where = f"reward.functions.{number}"
    text = spec["function"]
    module, _, function = text.partition(":")
    is_reference = function.isidentifier() and all(p.isidentifier() for p in module.split("."))
    if text not in BUILT_INS and not is_reference:
        raise MeshdialError(
            f"{where}.function is {text!r}, expected {', '.join(BUILT_INS)} or module:function"
        )
    weight = spec.get("weight", 1.0)
    if not isinstance(weight, int | float) or not math.isfinite(weight):
        raise MeshdialError(f"{where}.weight is {weight!r}, expected a finite number")
    options = spec.get("options") or {}
    if text == "regex":
        _check_pattern(where, options)
    return RewardFunction(spec.get("name") or function or text, text, float(weight), options)


def _check_pattern(where: str, options: Mapping[str, Any]) -> None:
    try:
        re.compile(options["pattern"])
    except KeyError:
        raise MeshdialError(f"{where}.options.pattern is missing: regex matches it") from None
    except (TypeError, re.error) as error:
        raise MeshdialError(f"{where}.options.pattern is no regular expression: {error}") from None


def _code_identity(function: RewardFunction) -> str:
    if function.is_built_in:
        return f"version {BUILT_INS[function.function].version}"
    module, _ = function.module_and_function
    return hashlib.sha256(module_file(module).read_bytes()).hexdigest()
