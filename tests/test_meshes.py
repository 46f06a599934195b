"""Weights and checkpoints of one mesh on another: the same bytes, ids and values everywhere."""

import json
import os

import pytest

from rl.artifacts import artifact_id, content_id
from rl.block_reader import MAX_HOST_BYTES

from . import on_a_mesh
from .processes import run_alone, run_group

MAIN = "from tests.on_a_mesh import main; main()"


def said_by(results):
    """[what was written, what was read] as every process of the group says it."""
    for result in results:
        assert result.returncode == 0, result.stderr
    said = [json.loads(result.stdout.splitlines()[-1]) for result in results]
    assert all(words == said[0] for words in said)
    return said[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(folder, what was said of it) of policies written on one device."""
    folder = tmp_path_factory.mktemp("written")
    on_a_mesh.make_base(folder / "base")
    return folder, on_a_mesh.write(folder, "one", on_a_mesh.mesh_of((1, 1, 1)))


def assert_same_files(folder, name, other="one"):
    for kind in on_a_mesh.SPECS:
        files = sorted(path.name for path in (folder / f"{name}-{kind}").iterdir())
        assert files == sorted(path.name for path in (folder / f"{other}-{kind}").iterdir())
        for file in files:
            bytes_of = [(folder / f"{n}-{kind}" / file).read_bytes() for n in (name, other)]
            assert bytes_of[0] == bytes_of[1], file
        policies = [artifact_id(folder / f"{n}-{kind}-policy") for n in (name, other)]
        assert policies[0] == policies[1]


def assert_read(found, said):
    """What was read has the values that were written."""
    for kind, spec in on_a_mesh.SPECS.items():
        values = on_a_mesh.values_of(spec)
        assert found[kind]["loaded"] == found[kind]["restored"] == content_id(values)
        assert found[kind]["loaded"] == said[kind]["source"] == said[kind]["in memory"]
        state = on_a_mesh.state_of(on_a_mesh.placed(values, on_a_mesh.mesh_of((1, 1, 1))), 3)
        assert found[kind]["state"] == content_id(dict(on_a_mesh.enumerate_leaves(state)))
    assert found["base"] == content_id(on_a_mesh.values_of(on_a_mesh.FULL))


def assert_one_device_reads(folder, name, said):
    assert_read(on_a_mesh.read(folder, name, on_a_mesh.mesh_of((1, 1, 1))), said)


@pytest.mark.parametrize("shape", ["1,4,1", "1,2,2"])
def test_four_devices_write_what_one_does_and_read_it(written, shape):
    folder, said = written
    own, found = said_by([run_alone(MAIN, folder, shape, f"four-{shape}", "one")])
    assert own == said
    assert_same_files(folder, f"four-{shape}")
    assert_read(found, said)
    assert_one_device_reads(folder, f"four-{shape}", said)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["1,4,1", "1,1,4"])
def test_two_processes_write_what_one_does_and_read_it(written, shape):
    folder, said = written
    own, found = said_by(run_group(MAIN, folder, shape, f"two-{shape}", "one"))
    assert own == said
    assert_same_files(folder, f"two-{shape}")
    assert_read(found, said)
    assert_one_device_reads(folder, f"two-{shape}", said)
    values = on_a_mesh.values_of(on_a_mesh.FULL)
    total = sum(value.nbytes for value in values.values())
    # Over fsdp, each has a part of every row; over `tensor`, the first has the first half of the
    # rows of the embedding and the head, which all lie in the first of their two blocks.
    unread = sum(values[name].nbytes for name in ("embed_tokens.embedding", "lm_head.kernel"))
    unread = unread * (24_000 - 16_384) // 24_000 if shape == "1,1,4" else 0
    assert found["full"]["read"] == [total - unread, total]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux tells the peak")
@pytest.mark.parametrize("run", [run_alone, run_group])
def test_an_export_and_a_load_need_little_more_than_one_part(tmp_path, run):
    code = "from tests.peak_memory import main; main()"
    results = run(code, tmp_path / "file")
    for result in results if isinstance(results, list) else [results]:
        assert result.returncode == 0, result.stderr
        for found in json.loads(result.stdout.splitlines()[-1]):
            assert found["part"] == 4 * 8192 * 8192 // 4
            limit = 1.5 * found["part"] + MAX_HOST_BYTES  # the whole tensor is larger
            assert 0 <= max(found["export"], found["load"]) < limit < 4 * 8192 * 8192, found


FULL_DISK = """
import errno, os, sys
from pathlib import Path
from rl import group
from rl.artifacts import Publisher
from rl.errors import MeshdialError
from rl.weights import export_weights
from tests.on_a_mesh import FULL, mesh_of, placed, values_of

group.join()

def full(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

if group.rank() == 1:
    os.pwrite = full
folder = Path(sys.argv[1])
trainable = placed(values_of(FULL), mesh_of((1, 4, 1)))
try:
    export_weights(
        Publisher(), folder / "w", FULL, trainable, base=folder / "base", base_path="", version=1
    )
except MeshdialError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_process_stops_all(tmp_path):
    on_a_mesh.make_base(tmp_path / "base")
    results = run_group(FULL_DISK, tmp_path)
    assert all(result.returncode == 0 for result in results), results
    sentence = f"{tmp_path / 'w'} was not written: the disk is full"
    said = [result.stdout.splitlines()[-1] for result in results]
    assert said == [f"process 1 of 2 failed: {sentence}", sentence]
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
