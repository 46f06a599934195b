"""A stage whose code has changed says whether its results have.

The versions in `rl/stage_table.py` decide what runs again after an upgrade. `stage_sources.json`
holds, for each stage, its version and a hash of the code that it runs. When the code behind a stage
changes, either raise the stage's version, or state that its results are the same; both by

    python -m tests.test_stage_versions "why the results are the same"

which writes the file anew. The reason is kept beside each stage whose version stayed.
"""

import ast
import hashlib
import json
import sys
from pathlib import Path

from rl.stage_table import STAGES
from rl.stages import MODULES

from .imports import modules, reachable

RECORD = Path(__file__).parent / "stage_sources.json"


def source_hash(module: str) -> str:
    """Of the code alone: comments, formatting and docstrings may change."""
    tree = ast.parse(modules()[module].read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                node.body = body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def stage_hash(stage: str) -> str:
    module = next(name for name, stages in MODULES.items() if stage in stages)
    lines = [f"{name} {source_hash(name)}" for name in sorted(reachable(module))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def current() -> dict:
    return {
        stage: {"version": spec.version, "code": stage_hash(stage)}
        for stage, spec in sorted(STAGES.items())
    }


def test_every_stage_has_a_module():
    assert sorted(STAGES) == sorted(stage for stages in MODULES.values() for stage in stages)


def test_changed_code_has_a_new_version_or_a_note():
    recorded = json.loads(RECORD.read_text())
    changed = [
        stage
        for stage, now in current().items()
        if {key: recorded.get(stage, {}).get(key) for key in now} != now
    ]
    assert changed == [], (
        f"the code behind {', '.join(changed)} has changed: raise the version of each whose "
        "results change in rl/stage_table.py, then run "
        'python -m tests.test_stage_versions "why the results of the others are the same"'
    )


def record(reason: str) -> None:
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    now = current()
    for stage, entry in now.items():
        old = before.get(stage, {})
        if old.get("version") != entry["version"]:
            continue
        is_same = old["code"] == entry["code"]
        note = old.get("same_results_because") if is_same else reason
        if note:
            entry["same_results_because"] = note
    RECORD.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].strip():
        sys.exit(__doc__)
    record(sys.argv[1])
