"""Which modules of `rl` import which, read from their source without running it."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((ROOT / "rl").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports_of(name: str) -> frozenset[str]:
    """The modules of `rl` that module `name` imports anywhere in its source."""
    known, found = modules(), set()
    for node in ast.walk(ast.parse(known[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(target for target in found if target in known and target != name)


def reachable(name: str) -> set[str]:
    """`name` and every module of `rl` that importing it brings in."""
    found, ahead = {name}, [name]
    while ahead:
        current = ahead.pop()
        packages = {current.rpartition(".")[0]} if "." in current else set()
        new = (imports_of(current) | packages & modules().keys()) - found
        found |= new
        ahead += new
    return found
