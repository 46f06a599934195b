"""Policies on disk: restored to the bit, known by content, refused when they are not right."""

import json
import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rl import checkpoint
from rl.artifacts import Publisher, artifact_id, content_id, write_json
from rl.checkpoint import (
    abstract_trainable,
    restore_parameters,
    restore_policy,
    save_policy,
)
from rl.errors import MeshdialError
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
        optax.linear_schedule(1e-2, 0.0, 10),
        mask=lambda tree: {name: value.ndim == 2 for name, value in tree.items()},
    ),
)


def parameters(seed=0):
    generator = np.random.default_rng(seed)
    return {
        "layers.0.mlp.up_proj.kernel": jnp.asarray(generator.normal(size=(6, 4)), jnp.float32),
        "norm.scale": jnp.asarray(generator.normal(size=6), jnp.float32),
        "half": jnp.asarray(generator.normal(size=(3, 5)), jnp.bfloat16),
    }


@jax.jit
def updated(trainable, state):
    """One AdamW update on the gradient of half the squared length: the parameters themselves."""
    changes, state = OPTIMIZER.update(trainable, state, trainable)
    return optax.apply_updates(trainable, changes), state


@pytest.fixture
def policy(tmp_path):
    """(folder, trainable, state) after two updates."""
    trainable = parameters()
    trainable, state = updated(*updated(trainable, OPTIMIZER.init(trainable)))
    save_policy(Publisher(), tmp_path / "policy", trainable, state, {"version": 2}, {"run": "a"})
    return tmp_path / "policy", trainable, state


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def refused(path, trainable, state):
    with pytest.raises(MeshdialError) as error:
        restore_policy(path, trainable, state)
    sentence = str(error.value)
    assert str(path) in sentence and "\n" not in sentence
    return sentence.replace(str(path), "FOLDER")


def test_a_policy_comes_back_to_the_bit_and_goes_on_as_if_it_had_not_stopped(policy):
    path, trainable, state = policy
    abstract = jax.eval_shape(lambda: (trainable, state))
    restored, restored_state, counters = restore_policy(path, *abstract)
    assert_same((restored, restored_state), (trainable, state))
    assert counters == {"version": 2}
    assert int(restored_state[1][0].count) == 2
    assert_same(updated(restored, restored_state), updated(trainable, state))


def test_the_manifest_names_the_content(policy):
    path, trainable, _ = policy
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["parameters_content_id"] == content_id(trainable)
    assert (manifest["run"], manifest["counters"]) == ("a", {"version": 2})
    assert artifact_id(path) == manifest["content_id"]
    assert manifest["arrays"]["trainable"]["half"] == {"dtype": "bfloat16", "shape": [3, 5]}
    names = manifest["arrays"]["optimizer"]
    assert "[1][0].mu['norm.scale']" in names and "[1][0].count" in names


def test_the_same_policy_has_the_same_ids_in_other_bytes(policy, tmp_path):
    path, trainable, state = policy
    again = tmp_path / "again"
    save_policy(Publisher(), again, trainable, state, {"version": 2}, {"run": "a"})
    save_policy(Publisher(), again, trainable, state, {"version": 2}, {"run": "a"})  # over itself
    assert (path / "manifest.json").read_bytes() == (again / "manifest.json").read_bytes()
    checksums = [(folder / "checksums.json").read_text() for folder in (path, again)]
    assert checksums[0] != checksums[1]  # orbax names its files at random
    assert_same(restore_policy(again, trainable, state)[:2], (trainable, state))


@pytest.mark.parametrize("part", ["parameters", "optimizer", "counters"])
def test_every_part_is_in_the_content_id(policy, tmp_path, part):
    path, trainable, state = policy
    count = {"version": 3 if part == "counters" else 2}
    if part == "parameters":
        trainable = trainable | {"norm.scale": trainable["norm.scale"].at[0].add(1)}
    if part == "optimizer":
        state = jax.tree.map(lambda leaf: leaf.at[...].add(1), state)
    manifest = save_policy(Publisher(), tmp_path / "other", trainable, state, count)
    before = json.loads((path / "manifest.json").read_text())
    keys = ("parameters_content_id", "optimizer_content_id", "counters")
    assert [key for key in keys if manifest[key] != before[key]] == [
        key for key in keys if key.startswith(part)
    ]
    assert manifest["content_id"] != before["content_id"]


def test_nothing_in_the_folder_says_when_or_where_it_was_written(policy):
    path, _, _ = policy
    host = os.uname().nodename.encode()
    for file in path.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"timestamp" not in content and host not in content, file
            assert str(path.parent).encode() not in content, file


@pytest.mark.parametrize("there, here", [(1, 4), (4, 1), (4, 2), (2, 4)])
def test_a_policy_restores_to_another_mesh(policy, tmp_path, there, here):
    path, trainable, state = policy
    save_policy(Publisher(), tmp_path / "there", *on_devices(there, (trainable, state)), {})
    placed = on_devices(here, (trainable, state))
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), placed
    )
    *restored, _ = restore_policy(tmp_path / "there", *abstract)
    assert_same(tuple(restored), (trainable, state))
    kernel = restored[0]["layers.0.mlp.up_proj.kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(6, 4 // here)}
    save_policy(Publisher(), tmp_path / "again", *restored, {"version": 2})
    assert artifact_id(tmp_path / "again") == artifact_id(path)


def on_devices(number, tree):
    """Every array of the tree over so many devices, by its last axis where that can be."""
    mesh = Mesh(np.array(jax.devices()[:number]), ("fsdp",))

    def place(leaf):
        is_divided = leaf.ndim == 2 and leaf.shape[1] % number == 0
        return jax.device_put(leaf, NamedSharding(mesh, P(None, "fsdp") if is_divided else P()))

    return jax.tree.map(place, tree)


def test_other_arrays_than_expected_are_refused(policy):
    path, trainable, state = policy
    wider = trainable | {"norm.scale": jnp.zeros(7)}
    sentence = "FOLDER: trainable norm.scale is float32 [6], expected float32 [7]"
    assert refused(path, wider, state) == sentence
    halved = trainable | {"norm.scale": jnp.zeros(6, jnp.bfloat16)}
    sentence = "FOLDER: trainable norm.scale is float32 [6], expected bfloat16 [6]"
    assert refused(path, halved, state) == sentence
    more = trainable | {"bias": jnp.zeros(1)}
    assert refused(path, more, state) == "FOLDER: trainable bias is absent, expected float32 [1]"
    fewer = {name: value for name, value in trainable.items() if name != "half"}
    sentence = "FOLDER: trainable half is bfloat16 [3, 5], expected absent"
    assert refused(path, fewer, state) == sentence
    lion = optax.lion(1e-3).init(trainable)
    assert refused(path, trainable, lion).startswith("FOLDER: optimizer [0].count is absent")


def test_a_damaged_policy_is_refused(policy):
    path, trainable, state = policy
    files = sorted(file for file in (path / "arrays").rglob("*") if file.is_file())
    assert len(files) >= 4
    for file in files:
        whole, name = file.read_bytes(), f"FOLDER/{file.relative_to(path)}"
        flipped = [whole[:i] + bytes([whole[i] ^ 8]) + whole[i + 1 :] for i in (0, len(whole) - 1)]
        for damaged in (*flipped, whole[:-1], b""):
            file.write_bytes(damaged)
            sentence = f"{name} is damaged: its bytes do not match its checksum"
            assert refused(path, trainable, state) == sentence
        file.unlink()
        assert refused(path, trainable, state) == f"{name} is missing"
        file.write_bytes(whole)
    restore_policy(path, trainable, state)


def test_a_policy_with_other_values_is_refused(policy, tmp_path):
    path, trainable, state = policy
    manifest = (path / "manifest.json").read_bytes()
    changed = trainable | {"norm.scale": -trainable["norm.scale"]}
    save_policy(Publisher(), path, changed, state, {"version": 2})
    (path / "manifest.json").write_bytes(manifest)
    sentence = "FOLDER is damaged: its parameters do not match their content id"
    assert refused(path, trainable, state) == sentence


def test_a_policy_without_its_arrays_is_refused(policy):
    path, trainable, state = policy
    (path / "arrays").rename(path / "elsewhere")
    assert refused(path, trainable, state).startswith("FOLDER/arrays/_METADATA is missing")
    assert refused(path / "none", trainable, state) == "FOLDER/manifest.json is missing"


def test_a_manifest_that_is_not_right_is_refused(policy):
    path, trainable, state = policy
    manifest = json.loads((path / "manifest.json").read_text())

    def rewritten(**changes):
        changed = {k: v for k, v in (manifest | changes).items() if v is not ...}
        write_json(Publisher(), path / "manifest.json", changed)
        return refused(path, trainable, state).removeprefix("FOLDER/manifest.json ")

    assert rewritten(kind="weights") == "is not the manifest of a policy"
    assert rewritten(format=9) == "has format 9, expected 1"
    assert rewritten(arrays=...) == "has no key arrays"
    damaged = "is damaged: its entries do not match its content id"
    assert rewritten(counters={"version": 1}) == damaged


@pytest.mark.parametrize("num_devices", [1, 4])
def test_parameters_come_back_alone_a_batch_at_a_time(policy, monkeypatch, num_devices):
    path, trainable, _ = policy
    monkeypatch.setattr(checkpoint, "BATCH_BYTES", 60)
    batches = list(restore_parameters(path, on_devices(num_devices, trainable)))
    # Of 30, 96 and 24 bytes, in the order of their names.
    assert [list(batch) for batch in batches] == [
        ["half"],
        ["layers.0.mlp.up_proj.kernel"],
        ["norm.scale"],
    ]
    monkeypatch.setattr(checkpoint, "BATCH_BYTES", 126)
    batches = list(restore_parameters(path, on_devices(num_devices, trainable)))
    assert [len(batch) for batch in batches] == [2, 1]
    assert_same(batches[0] | batches[1], trainable)
    kernel = batches[0]["layers.0.mlp.up_proj.kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(6, 4 // num_devices)}


# Orbax leaves some of its coroutines behind when it meets damage.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_parameters_that_are_damaged_are_refused_and_the_file_is_named(policy):
    path, trainable, _ = policy
    refused_files = set()
    for file in sorted(file for file in (path / "arrays").rglob("*") if file.is_file()):
        whole, name = file.read_bytes(), str(file.relative_to(path))
        ways = [flipped(whole, at) for at in range(0, len(whole), 97)]
        for damaged in (*ways, whole[:-1], b"", None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            try:
                batches = list(restore_parameters(path, trainable))
            except MeshdialError as error:
                refused_files.add(name)
                reason = "is damaged: its bytes do not match its checksum"
                sentence = f"{path / name} {reason if damaged is not None else 'is missing'}"
                assert str(error) == sentence
            else:  # what is damaged is of no parameter
                assert_same(batches[0], trainable)
        file.write_bytes(whole)
    assert len(refused_files) >= 3


def flipped(whole, at):
    return whole[:at] + bytes([whole[at] ^ 8]) + whole[at + 1 :]


def test_other_parameters_than_the_manifest_states_are_refused(policy):
    path, trainable, state = policy
    manifest = (path / "manifest.json").read_bytes()
    changed = trainable | {"norm.scale": -trainable["norm.scale"]}
    save_policy(Publisher(), path, changed, state, {"version": 2})
    (path / "manifest.json").write_bytes(manifest)
    batches = restore_parameters(path, trainable)
    assert len(next(batches)) == 3
    with pytest.raises(MeshdialError, match="its parameters do not match their content id"):
        next(batches)
    wider = trainable | {"norm.scale": jnp.zeros(7)}
    with pytest.raises(MeshdialError, match=r"norm.scale is float32 \[6\], expected float32 \[7\]"):
        next(restore_parameters(path, wider))


def test_a_policy_that_does_not_fit_on_the_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tiny disk needs root")
    try:
        noise = np.random.default_rng(0).normal(size=(1000, 1000)).astype(np.float32)
        with pytest.raises(MeshdialError) as error:
            save_policy(Publisher(), disk / "policy", {"w": jnp.asarray(noise)}, (), {})
        assert str(error.value) == f"{disk / 'policy'} was not written: the disk is full"
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_a_spec_trains():
    config = ModelConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    found = abstract_trainable(ModelSpec(config, LoraConfig(2, 4.0, ("down_proj",)), "bfloat16"))
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in found.items()} == {
        "layers.0.mlp.down_proj.lora_a": ((12, 2), "bfloat16"),
        "layers.0.mlp.down_proj.lora_b": ((2, 8), "bfloat16"),
    }
    assert len(abstract_trainable(ModelSpec(config))) == 12
