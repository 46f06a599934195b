"""Imports point one way, and the package knows neither Snakemake nor where results lie."""

import re
import subprocess
import sys

import pytest

from .imports import imports_of, modules

# From the bottom up: a module may import from its own layer and from those above it in this list.
LAYERS = (
    ("rl", "rl.errors", "rl.schedule", "rl.stage_table", "rl.group", "rl.compiling"),
    ("rl.algorithms", "rl.mesh", "rl.conflicts", "rl.context", "rl.processes.liveness"),
    ("rl.config", "rl.artifacts", "rl.processes", "rl.workflow"),
    ("rl.models", "rl.sharding"),
    (
        *("rl.weights", "rl.block_reader", "rl.block_writer", "rl.checkpoint"),
        *("rl.rollout", "rl.learner", "rl.tasks", "rl.rewards"),
    ),
    ("rl.report", "rl.plan"),
    ("rl.sync", "rl.memory", "rl.stages"),
    ("rl.processes.launch", "rl.processes.job", "rl.processes.devices", "rl.processes.reach"),
    ("rl.worker", "rl.client", "rl.cli"),
)


def layer_of(name):
    depths = [
        (len(prefix), depth)
        for depth, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if name == prefix or (name.startswith(f"{prefix}.") and prefix != "rl")
    ]
    assert depths, f"{name} belongs to no layer: give it one"
    return max(depths)[1]


def test_imports_point_one_way():
    upward = [
        f"{name} imports {target}"
        for name in modules()
        for target in imports_of(name)
        if layer_of(target) > layer_of(name)
    ]
    # The command of a cold stage imports the stages when it runs, not when it starts.
    assert upward == []


def test_algorithms_import_nothing_of_the_package_but_errors():
    for name in modules():
        if name.startswith("rl.algorithms."):
            assert {t for t in imports_of(name) if not t.startswith("rl.algorithms")} <= {
                "rl.errors"
            }


@pytest.mark.parametrize("pattern", [r"^\s*(import|from) snakemake", r"results/\{?\w*\}?/\d"])
def test_the_package_knows_no_snakemake_and_no_results_path(pattern):
    for name, path in modules().items():
        assert not re.search(pattern, path.read_text(), re.MULTILINE), name


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("rl.client", ["jax", "numpy", "pyarrow", "yaml", "subprocess"]),
        ("rl.config", ["jax", "numpy", "pyarrow"]),
        ("rl.artifacts", ["jax"]),
        ("rl.tasks", ["jax"]),
        ("rl.rewards", ["jax"]),
    ],
)
def test_what_starts_often_starts_light(module, heavy):
    code = f"import sys, {module}; print(*[m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
