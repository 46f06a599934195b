"""The export of a policy by a process that does not hold it, and what several processes share."""

import json
import os
import shutil

import pytest

from rl import checkpoint
from rl.artifacts import read_json, read_table
from rl.errors import MeshdialError

from .pipeline import Pipeline
from .processes import run_alone, run_group

SCORER = """
import os
from pathlib import Path


def counted(completion):
    with open(Path(__file__).with_name("calls"), "a") as file:
        file.write("x")
    return len(completion) / 7
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A full policy of two heads, its weights exported by the process that made it."""
    pipeline = Pipeline(
        tmp_path_factory.mktemp("started"),
        lora={"rank": 0},
        model={"architecture": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "ffn": 64}},
    )
    pipeline.start()
    return pipeline


@pytest.fixture
def cold(started, tmp_path):
    """The same run without exports, in a process that remembers nothing."""
    pipeline = Pipeline(tmp_path / "run")
    pipeline.config = started.config
    shutil.copytree(started.folder, pipeline.folder)
    shutil.rmtree(pipeline.path("0", "weights"))
    return pipeline


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def nbytes(pipeline, part):
    arrays = read_json(pipeline.path("0", "policy", "manifest.json"))["arrays"][part]
    sizes = {name: 4 for name in arrays}
    for name, array in arrays.items():
        for size in array["shape"]:
            sizes[name] *= size
    return sum(sizes.values())


@pytest.mark.parametrize("dtype", ["same", "bfloat16"])
def test_an_export_from_the_checkpoint_is_that_of_the_holder(started, cold, monkeypatch, dtype):
    monkeypatch.setattr(checkpoint, "BATCH_BYTES", 10_000)
    restored = []
    read = checkpoint._read_arrays

    def read_arrays(path, abstract, **options):
        restored.append({part: sorted(leaves) for part, leaves in abstract.items()})
        return read(path, abstract, **options)

    monkeypatch.setattr(checkpoint, "_read_arrays", read_arrays)
    cold.config["rollout"]["dtype"] = dtype
    try:
        cold.sync(0)
        assert len(restored) > 3 and all(batch.keys() == {"trainable"} for batch in restored)
        names = [name for batch in restored for name in batch["trainable"]]
        assert len(names) == len(set(names)) > len(restored)
        from_file = files_of(cold.path("0", "weights"))
        cost = read_json(cold.path("timings", "sync_weights-0.json"))["sync"]
        size = nbytes(cold, "trainable")
        assert (cost["outcome"], cost["source_sharding"]) == ("load", "file")
        assert cost["bytes_read"] == size
        assert cost["bytes_written"] == (size if dtype == "same" else size // 2)
        assert cost["seconds"] > 0.01  # reading included
        assert cold.memory["weights"].entries == {}
        cold.memory = {"weights": started.memory["weights"]}
        cold.sync(0)
        cost = read_json(cold.path("timings", "sync_weights-0.json"))["sync"]
        assert cost["outcome"] == ("alias" if dtype == "same" else "cast")
        assert cost["bytes_read"] == 0
        assert files_of(cold.path("0", "weights")) == from_file
    finally:
        cold.config["rollout"]["dtype"] = "same"


def test_parameters_that_are_not_those_of_the_manifest_are_not_exported(cold, tmp_path):
    other = Pipeline(tmp_path / "other", seed=1)
    other.config = {**cold.config, "model": {**cold.config["model"], "seed": 5}}
    other.start()
    for name in ("arrays", "checksums.json"):
        target = cold.path("0", "policy", name)
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        source = other.path("0", "policy", name)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    with pytest.raises(MeshdialError) as error:
        cold.sync(0)
    sentence = "policy is damaged: its parameters do not match their content id"
    assert str(error.value).endswith(sentence)
    assert not cold.path("0", "weights").exists()
    assert [path.name for path in cold.path("0").iterdir()] == ["policy"]


def test_a_policy_of_another_version_is_not_exported(cold):
    cold.path("0").rename(cold.path("1"))
    with pytest.raises(MeshdialError, match="1/policy holds policy version 0, expected 1"):
        cold.sync(1)


EVALUATION = """
import sys
from pathlib import Path
from rl import group
from tests.pipeline import Pipeline

sys.path.append(sys.argv[2])
pipeline = Pipeline(
    Path(sys.argv[1]),
    lora={"rank": 0},
    model={"architecture": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "ffn": 64}},
    evaluation={"functions": [{"function": "scorer:counted"}]},
)
pipeline.layout = "all:devices=2,fsdp=2"
inputs = [("weights", "0/weights"), ("base", "base"), ("prompts", "heldout.parquet")]
pipeline.stage("evaluate_policy", 0, inputs, [("evaluation", "evaluation.parquet")])
"""


def test_two_processes_score_once_and_tell_what_both_have_read(started, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(started.folder, folder)
    (tmp_path / "scorer.py").write_text(SCORER)
    for process in run_group(EVALUATION, folder, tmp_path, num_devices=1):
        assert process.returncode == 0, process.stderr[-3000:]
    assert (tmp_path / "calls").read_text() == "x" * 8
    table = read_table(folder / "evaluation.parquet", "evaluation")
    lengths = [len(text) for text in table["completion"].to_pylist()]
    assert table["reward"].to_pylist() == [length / 7 for length in lengths]
    assert table["is_correct"].to_pylist() == [length >= 7 for length in lengths]
    assert table["scored_ok"].to_pylist() == [True] * 8
    sync = read_json(folder / "timings" / "evaluate_policy-0.json")["sync"]
    assert sync["outcome"] == "load"
    size = nbytes(started, "trainable")  # each process reads whole blocks, and these have one each
    assert sync["bytes_read"] == 2 * size


PEAK = """
import json, sys
from pathlib import Path
from rl import checkpoint
from tests.peak_memory import measured
from tests.pipeline import Pipeline

def pipeline(name, width):
    sizes = {"layers": 8, "width": width, "heads": 2, "kv_heads": 2, "ffn": 4 * width}
    return Pipeline(Path(sys.argv[1], name), lora={"rank": 0}, model={"architecture": sizes})

def read():
    return int(Path("/proc/self/io").read_text().split()[1])

small, large = pipeline("small", 32), pipeline("large", 640)
if sys.argv[2] == "start":
    small.start()
    large.start()
else:
    checkpoint.BATCH_BYTES = 16 * 2**20
    small.sync(0)  # what a process takes whatever the size
    before = read()
    peak = measured(lambda: large.sync(0))[1]
    print(json.dumps({"peak": peak, "read": read() - before}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux tells the peak")
def test_an_export_needs_memory_for_a_batch_and_reads_no_optimizer(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # else each thread of the C library keeps some
    for word in ("start", "sync"):
        result = run_alone(PEAK, tmp_path, word, num_devices=1)
        assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    large = Pipeline(tmp_path / "large")
    size, state = nbytes(large, "trainable"), nbytes(large, "optimizer")
    assert size > 150e6 and state > 2 * size
    assert size < found["read"] < 1.05 * size + 1e6, found
    assert found["peak"] < 4 * 16 * 2**20 < size / 3, found
