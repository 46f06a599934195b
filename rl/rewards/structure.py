"""Rewards of how a completion is built, 1.0 or 0.0: tags in their order, JSON of a schema."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import referencing

_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n(?P<body>.*)\n[ \t]*```", re.DOTALL)
# With a registry of its own, a schema's references are never fetched from anywhere.
_NOTHING_REMOTE = referencing.Registry()


def format_tags(completion: str, tags: Sequence[str] = ("think", "answer")) -> float:
    """Whether the completion is `<think>...</think> <answer>...</answer>` and nothing else.

    Each of `tags` is opened and closed exactly once, in their order, with nothing but white space
    before, between and behind them; what stands inside is free.
    """
    rest = completion
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        rest = rest.lstrip()
        if completion.count(opening) != 1 or completion.count(closing) != 1:
            return 0.0
        if not rest.startswith(opening) or closing not in rest:
            return 0.0
        rest = rest[rest.index(closing) + len(closing) :]
    return float(not rest.strip())


def json_schema(
    completion: str, info: Mapping[str, Any], schema: Mapping[str, Any] | None = None
) -> float:
    """Whether the completion is JSON, bare or in a ```json fence, that matches the schema.

    The schema is the option, or else the row's `info["schema"]`, an object or its JSON text (JSON
    Schema draft 2020-12 unless it names another). ValueError if there is none.
    """
    wanted = schema if schema is not None else info.get("schema")
    if isinstance(wanted, str):
        wanted = json.loads(wanted)
    if not isinstance(wanted, Mapping | bool):
        raise ValueError("neither options.schema nor the row's info.schema is a JSON schema")
    validator = jsonschema.validators.validator_for(wanted, jsonschema.Draft202012Validator)
    validator.check_schema(wanted)
    try:
        value = _parsed(completion)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator(wanted, registry=_NOTHING_REMOTE).is_valid(value))


def _parsed(completion: str) -> Any:
    text = completion.strip()
    fenced = _FENCE.fullmatch(text)
    return json.loads(fenced["body"] if fenced else text, parse_constant=_refuse)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
