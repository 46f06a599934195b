"""JSON objects as model folders hold them."""

import json
from pathlib import Path

from rl.errors import MeshdialError


def read_json_object(path: Path) -> dict:
    """The object in a file; MeshdialError where it cannot be read or is another kind of value."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MeshdialError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise MeshdialError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def to_json(value: dict) -> bytes:
    """The form in which we write one: sorted, indented, with a last newline."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
