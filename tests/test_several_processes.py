"""The stages of an iteration in two processes that share a mesh of four devices.

The other layouts of the same mesh, four devices of one process, must give the same: every table
byte for byte, and every content id.
"""

import pytest

from rl.artifacts import artifact_id

from .processes import run_alone, run_group

ITERATION = """
import sys
from pathlib import Path
from rl import group
from tests.pipeline import Pipeline

pipeline = Pipeline(
    Path(sys.argv[1]),
    model={"architecture": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "ffn": 64}},
    lora={"rank": int(sys.argv[2])},
    learner={"updates_per_batch": 2},
    algorithm={"kl": {"coefficient": 0.1}},
)
pipeline.layout = "all:devices=4,fsdp=2,tensor=2"
pipeline.start()
pipeline.iterate(1)
pipeline.memory.clear()  # so that iteration 2 is read from files
pipeline.sample(2)
pipeline.learn(2)
pipeline.sync(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 0])
def test_two_processes_make_what_one_makes(tmp_path, rank):
    alone = run_alone(ITERATION, tmp_path / "one", rank, timeout=400)
    assert alone.returncode == 0, alone.stderr[-3000:]
    for process in run_group(ITERATION, tmp_path / "two", rank, timeout=400):
        assert process.returncode == 0, process.stderr[-3000:]
    found, expected = (
        {
            str(path.relative_to(tmp_path / name)): artifact_id(path)
            for path in sorted((tmp_path / name).rglob("*"))
            if path.suffix == ".parquet" or (path.is_dir() and (path / "manifest.json").exists())
        }
        for name in ("two", "one")
    )
    assert "2/policy" in found and "2/weights" in found
    assert found == expected
    assert [p for p in (tmp_path / "two").rglob(".*")] == []
