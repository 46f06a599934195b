"""What the config says of reward functions, as checked records; and what code they stand for."""

import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from rl.errors import MeshdialError
from rl.rewards.built_in import BUILT_INS, BuiltIn

NORMALISE = ("none", "group", "batch")
INSTALL = "pip install 'meshdial[verifiers]', or from a checkout pip install -e '.[verifiers]'"


@dataclass(frozen=True)
class RewardFunction:
    """One term of the reward: `weight` times a built-in, or a function `module:function`."""

    name: str
    function: str
    weight: float
    options: Mapping[str, Any]
    normalise: str = "none"

    @property
    def is_built_in(self) -> bool:
        return self.function in BUILT_INS

    @property
    def is_trusted(self) -> bool:
        """Whether it may be called in this process."""
        return self.is_built_in and BUILT_INS[self.function].is_trusted

    @property
    def module_and_function(self) -> tuple[str, str]:
        module, _, function = self.function.partition(":")
        return module, function


@dataclass(frozen=True)
class RewardModel:
    """One term of the reward: `weight` times the score of a reward model."""

    name: str
    weight: float
    normalise: str = "none"


def parse_functions(functions: Sequence[Mapping[str, Any]]) -> list[RewardFunction]:
    """The records of the config's list `reward.functions`."""
    parsed = [_parse(number, spec) for number, spec in enumerate(functions)]
    names = [function.name for function in parsed]
    for name in names:
        if names.count(name) > 1:
            raise MeshdialError(
                f"reward.functions: two are called {name}; give one of them a name of its own"
            )
    return parsed


def parse_models(models: Sequence[Mapping[str, Any]]) -> list[RewardModel]:
    """The records of a list of {name, weight, normalise}; the name may not be missing here."""
    return [
        RewardModel(spec["name"], *_weighing(f"reward.models.{number}", spec))
        for number, spec in enumerate(models)
    ]


def scorer_hash(
    functions: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]] = ()
) -> str:
    """A hash of everything that decides the rewards: `sha256:` and hex.

    That is the config's lists, the versions of the built-ins and of the packages they call, and the
    source of each user's module (not of what it imports in turn).
    """
    parts = [
        {
            "name": function.name,
            "function": function.function,
            "weight": function.weight,
            "options": dict(function.options),
            "normalise": function.normalise,
            "code": _code_identity(function),
        }
        for function in parse_functions(functions)
    ]
    parts += [dict(model) for model in models]
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
    weight, normalise = _weighing(where, spec)
    options = spec.get("options") or {}
    if text in OPTION_CHECKS:
        OPTION_CHECKS[text](f"{where}.options", options)
    if text in BUILT_INS:
        _check_package(text, BUILT_INS[text])
    name = spec.get("name") or function or text
    return RewardFunction(name, text, weight, options, normalise)


def _weighing(where: str, spec: Mapping[str, Any]) -> tuple[float, str]:
    weight, normalise = spec.get("weight", 1.0), spec.get("normalise", "none")
    if not isinstance(weight, int | float) or not math.isfinite(weight):
        raise MeshdialError(f"{where}.weight is {weight!r}, expected a finite number")
    if normalise not in NORMALISE:
        raise MeshdialError(f"{where}.normalise is {normalise!r}, expected {', '.join(NORMALISE)}")
    return float(weight), normalise


def _check_package(function: str, built_in: BuiltIn) -> None:
    package = built_in.package
    if package and importlib.util.find_spec(package.replace("-", "_")) is None:
        raise MeshdialError(
            f"reward function {function} needs the package {package}, which is not installed: "
            f"{INSTALL}"
        )


def _check_pattern(where: str, options: Mapping[str, Any]) -> None:
    try:
        re.compile(options["pattern"])
    except KeyError:
        raise MeshdialError(f"{where}.pattern is missing: regex matches it") from None
    except (TypeError, re.error) as error:
        raise MeshdialError(f"{where}.pattern is no regular expression: {error}") from None


def _check_tags(where: str, options: Mapping[str, Any]) -> None:
    tags = options.get("tags", ["think", "answer"])
    is_list = isinstance(tags, list | tuple) and len(tags) > 0
    if not is_list or not all(isinstance(t, str) and re.fullmatch(r"[\w-]+", t) for t in tags):
        raise MeshdialError(f"{where}.tags is {tags!r:.60}, expected a list of names of tags")
    if len(set(tags)) < len(tags):
        raise MeshdialError(f"{where}.tags is {tags!r:.60}, where one stands twice")


def _check_schema(where: str, options: Mapping[str, Any]) -> None:
    schema = options.get("schema")
    if schema is None:
        return
    try:
        jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator).check_schema(
            schema
        )
    except (jsonschema.SchemaError, TypeError) as error:
        why = " ".join(str(getattr(error, "message", error)).split())
        raise MeshdialError(f"{where}.schema is no JSON schema: {why:.200}") from None


OPTION_CHECKS = {"regex": _check_pattern, "format_tags": _check_tags, "json_schema": _check_schema}


def _code_identity(function: RewardFunction) -> str:
    if function.is_built_in:
        built_in = BUILT_INS[function.function]
        package = built_in.package
        needed = [f"{package} {importlib.metadata.version(package)}"] if package else []
        return ", ".join([f"version {built_in.version}", *needed])
    module, _ = function.module_and_function
    return hashlib.sha256(module_file(module).read_bytes()).hexdigest()
