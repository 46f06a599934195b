"""What crosses a stage's boundary: content ids, whole-or-nothing files, checked tables."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rl.artifacts import (
    SCHEMAS,
    Publisher,
    artifact_id,
    block_hashes,
    canonical_json,
    content_id,
    group_id,
    join,
    json_content_id,
    make_table,
    read_json,
    read_table,
    sample_id,
    table_content_id,
    table_provenance,
    write_json,
    write_table,
)
from rl.artifacts.content import BLOCK_BYTES, block_bounds
from rl.artifacts.gathering import summed
from rl.artifacts.shards import Blocked, each_block
from rl.errors import ClientGone, MeshdialError

PROVENANCE = {
    "stage": "score_rewards",
    "stage_version": 3,
    "config": {"weight": 0.5, "names": ["exact"]},
    "inputs": {"rollouts": "sha256:11"},
}


def rewards(**changes):
    columns = {
        "sample_id": ["a-0", "a-1", "b-0"],
        "reward": [1.0, None, 0.25],
        "scored_ok": [True, False, True],
        "failure": [None, "timeout", None],
        "component:exact": [1.0, None, 0.25],
    }
    return make_table("rewards", {**columns, **changes})


def written(path, **changes):
    write_table(Publisher(), path, "rewards", rewards(**changes), PROVENANCE)
    return path


def python(code, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


# Content ids


def test_content_id_by_hand():
    array = np.array([[1, 2], [3, 4]], np.int32)
    block = hashlib.sha256(bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0])).hexdigest()
    line = f'["w","int32",[2,2],["{block}"]]\n'
    assert block_hashes(array) == [block]
    assert content_id({"w": array}) == "sha256:" + hashlib.sha256(line.encode()).hexdigest()


def test_blocks_are_cut_at_fixed_rows_of_the_leading_axis():
    rows = BLOCK_BYTES // (1024 * 4)
    assert block_bounds((2 * rows + 1, 1024), 4) == [(0, rows), (rows, 2 * rows), (2 * rows, 2049)]
    assert block_bounds((2, 2 * BLOCK_BYTES), 1) == [(0, 1), (1, 2)]  # a row is never cut
    assert block_bounds((), 8) == [(0, 1)]
    assert block_bounds((0, 5), 4) == block_bounds((5, 0), 4) == []
    array = np.arange(2 * rows * 1024 + 1024, dtype=np.float32).reshape(-1, 1024)
    parts = [array[:rows], array[rows : 2 * rows], array[2 * rows :]]
    assert block_hashes(array) == [hashlib.sha256(part.tobytes()).hexdigest() for part in parts]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (1100, 2048)])
def test_numpy_and_jax_arrays_have_one_id(dtype, shape):
    values = np.random.default_rng(0).integers(0, 2, shape)
    array = jnp.asarray(values, dtype)
    assert content_id({"x": array}) == content_id({"x": np.asarray(array)})


def test_the_id_is_of_the_values_not_of_their_place_in_memory():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    same = [
        np.asfortranarray(array),
        array.astype(">f4"),
        np.repeat(array, 2, axis=1)[:, ::2],
        array[::-1][::-1],
    ]
    ids = {content_id({"x": other}) for other in same}
    assert ids == {content_id({"x": array})}
    assert content_id({"a": array, "b": same[0]}) == content_id({"b": array, "a": array})


def test_name_dtype_shape_and_values_are_all_in_the_id():
    array = np.arange(6, dtype=np.float32)
    changed = array.copy()
    changed[5] = np.nextafter(changed[5], 9)
    variants = [
        {"x": array},
        {"y": array},
        {"x": array.view(np.int32)},
        {"x": array.reshape(2, 3)},
        {"x": array.reshape(6, 1)},
        {"x": changed},
        {"x": array, "y": array[:0]},
        {},
    ]
    assert len({content_id(variant) for variant in variants}) == len(variants)


def test_an_array_of_python_objects_has_no_id():
    with pytest.raises(TypeError, match="Python objects"):
        content_id({"x": np.array(["a", None], object)})


MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
SPECS = [P("a", "b"), P("b"), P(None, "a"), P(("b", "a")), P(None, ("a", "b")), P()]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_sharded_array_has_the_id_of_the_whole(spec):
    whole = np.random.default_rng(1).normal(size=(1500, 1024)).astype(np.float32)
    for part in (whole, whole[:4, :4]):
        sharded = jax.device_put(part, NamedSharding(MESH, spec))
        assert len(sharded.devices()) == 4
        assert content_id({"x": sharded}) == content_id({"x": part})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("spec", SPECS[:-1], ids=str)
def test_the_devices_put_any_block_together_to_the_bit(spec, dtype):
    bits = np.random.default_rng(2).integers(0, 256, (12, 8, jnp.dtype(dtype).itemsize), np.uint8)
    bits = bits % 2 if dtype == "bool" else bits  # negative zeros and NaNs among the floats
    whole = bits.view(jnp.dtype(dtype))[..., 0]
    array = jax.device_put(whole, NamedSharding(MESH, spec))
    for axis, num_rows in ((0, 1), (0, 5), (0, 12), (1, 3), (1, 8)):
        program = summed(array.sharding, 2, axis, num_rows)
        for start in range(whole.shape[axis] - num_rows + 1):
            found = np.asarray(program(array, np.int32(start)))
            expected = whole.take(range(start, start + num_rows), axis)
            assert found.tobytes() == expected.tobytes(), (axis, num_rows, start)


def test_an_error_on_one_block_is_told_when_all_have_been_through():
    blocks = {name: Blocked(np.zeros(9), 0, [(0, 3), (3, 6), (6, 9)]) for name in "ab"}
    done = []

    def work(name, number, block):
        assert block.shape == (3,)
        if (name, number) == ("a", 1):
            raise MeshdialError("the second of a")
        done.append((name, number))
        return number

    with pytest.raises(MeshdialError, match="the second of a"):
        each_block(blocks, work)
    assert ("a", 0) in done
    results = each_block({"b": blocks["b"], "none": Blocked(np.zeros(0), 0, [])}, work)
    assert results == {"b": {0: 0, 1: 1, 2: 2}, "none": {}}


def test_artifacts_need_no_jax():
    result = python("import rl.artifacts, sys; sys.exit('jax' in sys.modules)")
    assert result.returncode == 0, result.stderr


def test_json_has_one_spelling():
    assert canonical_json({"b": (1, np.float32(0.5)), "a": "é"}) == '{"a":"é","b":[1,0.5]}'
    expected = hashlib.sha256(b'{"a":[1,2]}').hexdigest()
    assert json_content_id({"a": (1, 2)}) == f"sha256:{expected}"


# The ids of tables


def test_table_id_does_not_see_chunks_slices_or_column_order():
    table = rewards()
    pieces = [table.slice(i, 1) for i in range(3)]
    padded = pa.concat_tables([table.slice(2, 1), table, table.slice(0, 1)]).combine_chunks()
    assert table_content_id(pa.concat_tables(pieces)) == table_content_id(table)
    assert table_content_id(padded.slice(1, 3)) == table_content_id(table)
    assert table_content_id(table.select(table.column_names[::-1])) == table_content_id(table)


def test_table_id_does_not_see_what_lies_below_a_null():
    for full in (pa.array([1.0, 2.0, 3.0]), pa.array(["a", "b", "c"]), pa.array([[1], [2], [3]])):
        values = full.to_pylist()
        clean = pa.array([values[0], None, values[2]], full.type)
        mask = pa.array([False, True, False])
        buffers = [clean.buffers()[0], *full.buffers()[1:]]
        if pa.types.is_list(full.type):
            dirty = pa.ListArray.from_arrays(full.offsets, full.values, mask=mask)
        else:
            dirty = pa.Array.from_buffers(full.type, 3, buffers)
        assert dirty.to_pylist() == clean.to_pylist()
        assert table_content_id(pa.table({"x": dirty})) == table_content_id(pa.table({"x": clean}))


@pytest.mark.parametrize(
    "one, other",
    [
        (["ab", "c"], ["a", "bc"]),
        ([None, "a"], ["", "a"]),
        ([[1], [2, 3]], [[1, 2], [3]]),
        ([[], [1]], [None, [1]]),
        ([[1, None]], [[1, 0]]),
        ([[[1], [2]]], [[[1, 2]]]),
        ([True, False], [False, True]),
        ([1, 2], [2, 1]),
        ([1, 2], [1.0, 2.0]),
        ([1, 2], [1, 2, 2]),
        ([None, 1], [1, None]),
    ],
)
def test_table_id_tells_values_apart(one, other):
    assert table_content_id(pa.table({"x": one})) != table_content_id(pa.table({"x": other}))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.none() | st.text(max_size=4),
            st.none() | st.lists(st.none() | st.integers(-9, 9), max_size=3),
            st.floats(width=32, allow_nan=False) | st.none(),
            st.booleans(),
        ),
        max_size=8,
    ),
    st.lists(st.integers(0, 8), max_size=3),
)
def test_table_id_is_the_same_for_any_chunking(rows, cuts):
    kinds = [pa.string(), pa.list_(pa.int32()), pa.float32(), pa.bool_()]
    columns = list(zip(*rows, strict=True)) or [()] * 4
    table = pa.table(
        {str(i): pa.array(c, kind) for i, (c, kind) in enumerate(zip(columns, kinds, strict=True))}
    )
    bounds = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    pieces = [table.slice(a, b - a) for a, b in pairwise(bounds)]
    rejoined = pa.concat_tables(pieces) if pieces else table
    assert table_content_id(rejoined) == table_content_id(table)
    if rows:
        fewer = table.slice(0, len(rows) - 1)
        assert table_content_id(fewer) != table_content_id(table)


# Tables


def test_a_table_comes_back_and_is_the_same_file_when_made_again(tmp_path):
    first, second = written(tmp_path / "a.parquet"), written(tmp_path / "b.parquet")
    assert first.read_bytes() == second.read_bytes()
    table = read_table(first, "rewards")
    assert table.equals(rewards())
    assert table["reward"].to_pylist() == [1.0, None, 0.25]
    assert table_content_id(table) == table_provenance(first)["content_id"] == artifact_id(first)


def test_every_kind_survives_the_round_trip(tmp_path):
    examples = {
        pa.string(): "é\n",
        pa.float64(): 0.1,
        pa.float32(): 0.5,
        pa.int32(): -7,
        pa.bool_(): True,
        pa.list_(pa.int32()): [1, 2],
        pa.list_(pa.float32()): [-0.5],
        pa.list_(pa.bool_()): [],
    }
    for kind, schema in SCHEMAS.items():
        table = make_table(kind, {field.name: [examples[field.type]] for field in schema})
        for name, rows in (("full", table), ("empty", table.slice(0, 0))):
            path = tmp_path / f"{kind}-{name}.parquet"
            identity = write_table(Publisher(), path, kind, rows, PROVENANCE)
            assert read_table(path, kind).equals(rows)
            assert artifact_id(path) == identity


def test_the_footer_says_where_a_table_came_from(tmp_path):
    path = tmp_path / "a.parquet"
    identity = write_table(
        Publisher(), path, "rewards", rewards(), {**PROVENANCE, "scorer": "sha256:22"}
    )
    footer = pq.read_metadata(path).metadata[b"meshdial"]
    expected = {**PROVENANCE, "kind": "rewards", "content_id": identity, "scorer": "sha256:22"}
    assert footer == json.dumps(expected, sort_keys=True, separators=(",", ":")).encode()


def test_a_table_without_provenance_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="lacks stage_version, inputs"):
        write_table(Publisher(), tmp_path / "a", "rewards", rewards(), {"stage": "x", "config": {}})


def refused(path, kind="rewards", expect=None):
    """The sentence with which a table is refused: one line that names the file."""
    with pytest.raises(MeshdialError) as error:
        read_table(path, kind, expect)
    sentence = str(error.value)
    assert str(path) in sentence and "\n" not in sentence
    return sentence.replace(str(path), "FILE")


def rewritten(path, table):
    """The table with the footer of `path`, written there by someone who checks nothing."""
    footer = pq.read_metadata(path).metadata[b"meshdial"]
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({b"meshdial": footer})
    return path


def test_tables_that_do_not_match_are_refused(tmp_path):
    path, table = written(tmp_path / "a.parquet"), rewards()
    assert refused(path, "advantages") == "FILE is a table of rewards, not of advantages"
    assert refused(tmp_path / "b.parquet") == "FILE is missing"
    cases = [
        (table.drop_columns("reward"), "FILE has no column reward, which a rewards table needs"),
        (
            table.append_column("note", pa.array(["", "", ""])),
            "FILE has a column note, which a rewards table has not",
        ),
        (
            table.set_column(1, "reward", pa.array([1, 2, 3])),
            "FILE: column reward is int64, expected double",
        ),
        (
            table.set_column(4, "component:exact", pa.array(["", "", ""])),
            "FILE: column component:exact is string, expected double",
        ),
        (
            table.set_column(2, "scored_ok", pa.array([True, True, None])),
            "FILE: column scored_ok has no value in row 2",
        ),
        (
            table.set_column(0, "sample_id", pa.array(["a", "b", "b"])),
            "FILE has the sample_id b more than once",
        ),
        (
            table.set_column(1, "reward", pa.array([1.0, None, 0.5])),
            "FILE is damaged: its values do not match the content id it states",
        ),
    ]
    for changed, sentence in cases:
        assert refused(rewritten(path, changed)) == sentence
    for changed, sentence in cases[:-1]:
        new = tmp_path / "c.parquet"
        with pytest.raises(MeshdialError) as error:
            write_table(Publisher(), new, "rewards", changed, PROVENANCE)
        assert str(error.value).replace(str(new), "FILE") == sentence and not new.exists()


def test_a_missing_item_in_a_list_is_refused(tmp_path):
    table = pa.table(
        {"sample_id": ["a"], "reference_logprobs": pa.array([[1.0, None]], pa.list_(pa.float32()))}
    )
    with pytest.raises(MeshdialError, match="reference_logprobs has a list with a missing item"):
        write_table(Publisher(), tmp_path / "a", "reference", table, PROVENANCE)


def test_a_value_of_the_wrong_type_names_its_column():
    with pytest.raises(MeshdialError, match=r"column reward does not hold double"):
        rewards(reward=["high", None, 0.0])


def test_what_a_reader_expects_of_the_provenance(tmp_path):
    path = written(tmp_path / "a.parquet")
    read_table(path, "rewards", {"inputs": {"rollouts": "sha256:11"}, "stage_version": 3})
    assert (
        refused(path, expect={"stage_version": 4})
        == "FILE was made with stage_version 3, expected 4"
    )
    assert (
        refused(path, expect={"inputs": {"rollouts": "sha256:99"}})
        == "FILE was made with inputs {'rollouts': 'sha256:11'}, expected {'rollouts': 'sha256:99'}"
    )


def test_other_files_are_no_tables(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")
    assert refused(path).startswith("FILE is not a readable parquet table:")
    pq.write_table(rewards(), path)
    assert refused(path) == "FILE was not written by meshdial: its footer has no provenance"


def test_a_cut_table_is_refused(tmp_path):
    path = written(tmp_path / "a.parquet")
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        assert refused(path).startswith("FILE is not a readable parquet table:")


def test_a_flipped_byte_is_refused_or_harmless(tmp_path):
    path = written(tmp_path / "a.parquet")
    whole, table, num_refused = path.read_bytes(), rewards(), 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        try:
            assert read_table(path, "rewards").equals(table)
        except MeshdialError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            num_refused += 1
    assert num_refused > len(whole) / 2


# Samples


def test_sample_ids_are_stable_and_distinct():
    assert sample_id("g", 0) == "g-0"
    keys = [(7, 2, "p"), (8, 2, "p"), (7, 3, "p"), (7, 2, "q")]
    groups = [group_id(*key) for key in keys]
    assert groups == [group_id(*key) for key in keys]
    assert len({sample_id(group, n) for group in groups for n in (0, 1)}) == 8


def test_join_follows_the_left_table():
    left = pa.table({"sample_id": ["b", "a", "c"], "x": [1, 2, 3]})
    right = pa.table({"sample_id": ["a", "b", "c"], "y": ["A", None, "C"], "z": [0, 0, 0]})
    joined = join(left, right, ["y"])
    assert joined.to_pydict() == {
        "sample_id": ["b", "a", "c"],
        "x": [1, 2, 3],
        "y": [None, "A", "C"],
    }
    chunked = pa.concat_tables([right.slice(0, 1), right.slice(1)])
    assert join(left, chunked, ["y"]).to_pydict() == joined.to_pydict()


@pytest.mark.parametrize(
    "ids, sentence",
    [
        (["a"], "1 samples are missing from the table to join, first b"),
        (["a", "b", "c"], "1 samples are only in the table to join: c"),
        (["a", "c"], "1 samples are missing from the table to join, first b"),
        (["a", "b", "b"], "the table to join has the sample_id b more than once"),
    ],
)
def test_join_refuses_samples_without_a_partner(ids, sentence):
    left = pa.table({"sample_id": ["a", "b"]})
    right = pa.table({"sample_id": ids, "y": list(range(len(ids)))})
    with pytest.raises(MeshdialError) as error:
        join(left, right, ["y"])
    assert str(error.value) == sentence


def test_join_refuses_a_column_that_is_not_there():
    table = pa.table({"sample_id": ["a"], "y": [1]})
    with pytest.raises(MeshdialError, match="no column z"):
        join(table, table, ["z"])
    with pytest.raises(ValueError, match="both tables"):
        join(table, table, ["y"])


# Publishing


def test_a_folder_is_replaced_whole(tmp_path):
    publisher, target = Publisher(), tmp_path / "deep" / "policy"
    for text, name in (("first", "a"), ("second", "b")):
        with publisher.directory(target) as draft:
            assert draft.parent.parent == target.parent  # so one rename publishes it
            (draft / name).write_text(text)
            assert name == "a" or (target / "a").read_text() == "first"
    assert [p.name for p in target.iterdir()] == ["b"]
    assert [p.name for p in target.parent.iterdir()] == ["policy"]


def test_a_failed_writer_leaves_the_old_file_and_nothing_else(tmp_path):
    publisher, target = Publisher(), tmp_path / "a.json"
    write_json(publisher, target, {"n": 1})
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), publisher.file(target) as draft:
            draft.write_text("half")
            raise error
    assert read_json(target) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_nothing_is_published_for_a_client_that_is_gone(tmp_path):
    def check_alive():
        raise ClientGone

    with pytest.raises(ClientGone), Publisher(check_alive).directory(tmp_path / "policy") as draft:
        (draft / "a").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_nothing_that_is_trusted(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from rl.artifacts import Publisher
with Publisher().directory(sys.argv[1]) as draft:
    (draft / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    target = tmp_path / "policy"
    with Publisher().directory(target) as draft:
        (draft / "old").write_text("kept")
    assert python(code, target).returncode == -signal.SIGKILL
    assert [p.name for p in target.iterdir()] == ["old"]
    [leftover] = [p for p in tmp_path.iterdir() if p != target]
    assert leftover.name.startswith(".policy.partial-")
    write_json(Publisher(), tmp_path / "other.json", 1)
    assert leftover.exists()  # of another target
    with Publisher().directory(target) as draft:
        (draft / "new").write_text("x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.json", "policy"]
    assert [p.name for p in target.iterdir()] == ["new"]


def test_a_living_writer_keeps_its_draft(tmp_path):
    target = tmp_path / "a.json"
    with Publisher().file(target) as slow:
        slow.write_text("slow")
        with Publisher().file(target) as quick:
            quick.write_text("quick")
        assert target.read_text() == "quick"
        assert slow.read_text() == "slow"
    assert target.read_text() == "slow"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "code, reason",
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk quota is used up")],
)
def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch, code, reason):
    def fsync(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(MeshdialError) as error:
        written(tmp_path / "a.parquet")
    assert str(error.value) == f"{tmp_path / 'a.parquet'} was not written: {reason}"
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_does_not_fit_on_the_disk(tiny_disk):
    path = tiny_disk / "a.parquet"
    noise = np.random.default_rng(0).normal(size=100_000)
    ids = [str(i) for i in range(len(noise))]
    with pytest.raises(MeshdialError) as error:
        written(
            path,
            **{"sample_id": ids, "reward": noise, "component:exact": noise},
            scored_ok=[True] * len(noise),
            failure=[None] * len(noise),
        )
    assert str(error.value) == f"{path} was not written: the disk is full"
    assert list(tiny_disk.iterdir()) == []


# JSON


def test_json_is_written_one_way(tmp_path):
    path = tmp_path / "a.json"
    write_json(Publisher(), path, {"b": np.float64(0.5), "a": [1, "é"]})
    assert path.read_text() == '{\n  "a": [\n    1,\n    "é"\n  ],\n  "b": 0.5\n}\n'
    assert read_json(path) == {"a": [1, "é"], "b": 0.5}
    assert artifact_id(path) == json_content_id({"a": [1, "é"], "b": 0.5})


def test_json_that_cannot_be_used_is_refused(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(MeshdialError, match="was not written: Out of range float"):
        write_json(Publisher(), path, {"loss": float("nan")})
    with pytest.raises(MeshdialError, match=r"a\.json is missing"):
        read_json(path)
    path.write_text('{"a": 1')
    with pytest.raises(MeshdialError, match=r"a\.json is not JSON"):
        read_json(path)


def test_a_folder_is_named_by_its_manifest(tmp_path):
    with pytest.raises(MeshdialError, match=r"manifest\.json is missing"):
        artifact_id(tmp_path)
    write_json(Publisher(), tmp_path / "manifest.json", {"content_id": "sha256:33"})
    assert artifact_id(tmp_path) == "sha256:33"
    write_json(Publisher(), tmp_path / "manifest.json", {})
    with pytest.raises(MeshdialError, match="no key content_id"):
        artifact_id(tmp_path)


@pytest.fixture
def tiny_disk(tmp_path):
    """An empty file system of 256 KiB; needs the right to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tiny disk needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
