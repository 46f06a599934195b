"""Exports of a policy version: same bytes, same ids, and refused when they are not right."""

import errno
import hashlib
import json
import os
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rl.artifacts import (
    Publisher,
    artifact_id,
    content_id,
    described,
    id_of_blocks,
    write_json,
)
from rl.errors import MeshdialError
from rl.models.config_file import write_model_config
from rl.models.families import is_transposed, read_model, stored_name, write_model
from rl.models.safetensors_file import read_safetensors, write_safetensors
from rl.models.sources import open_model
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec
from rl.models.transformer import init_lora, init_parameters, merge_lora, trainable_names
from rl.stages.base import identity_of
from rl.weights import export_weights, load_model, load_weights, read_manifest

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
)
FULL = ModelSpec(CONFIG)
LORA = ModelSpec(CONFIG, LoraConfig(3, 6.0, ("q_proj", "v_proj", "down_proj")))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    parameters = init_parameters(CONFIG, seed=0)
    files = {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"eos_token": "<eos>"}'}
    write_model(folder, CONFIG, parameters, files, token_ids={"eos_token_id": 2})
    write_json(Publisher(), folder / "manifest.json", {"content_id": content_id(parameters)})
    return folder


def parameters_of(spec):
    """An adapter or a model whose values are all different from 0."""
    generator = np.random.default_rng(5)
    fresh = init_lora(spec, 1) if spec.lora else init_parameters(spec.config, 1)
    return {
        name: jnp.asarray(generator.normal(size=value.shape), jnp.float32)
        for name, value in fresh.items()
    }


def export(path, base, spec=LORA, trainable=None, **changes):
    trainable = parameters_of(spec) if trainable is None else trainable
    arguments = {"base": base, "base_path": "../base", "version": 3, "parent": "sha256:22"}
    return export_weights(Publisher(), path, spec, trainable, **(arguments | changes))


def load(path, spec=LORA, **expected):
    """The parameters of an export on one device."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return load_weights(path, spec, dict.fromkeys(trainable_names(spec), device), **expected)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(path, spec=LORA, **expected):
    with pytest.raises(MeshdialError) as error:
        load(path, spec, **expected)
    sentence = str(error.value)
    assert str(path) in sentence and "\n" not in sentence
    return sentence.replace(str(path), "FOLDER")


@pytest.mark.parametrize("spec", [LORA, FULL], ids=["adapter", "full"])
def test_an_export_comes_back_to_the_bit(tmp_path, base, spec):
    trainable = parameters_of(spec)
    manifest = export(tmp_path / "w", base, spec, trainable)
    loaded, bytes_read = load(tmp_path / "w", spec, version=3, base_content_id=artifact_id(base))
    assert sorted(loaded) == sorted(trainable_names(spec))
    for name, value in loaded.items():
        np.testing.assert_array_equal(value, trainable[name])
    assert bytes_read == sum(value.nbytes for value in trainable.values())
    assert manifest == read_manifest(tmp_path / "w")
    assert manifest["source_content_id"] == content_id(trainable) == content_id(loaded)
    stored = {
        stored_name(name): np.asarray(value).T if is_transposed(name) else value
        for name, value in trainable.items()
    }
    assert artifact_id(tmp_path / "w") == manifest["content_id"] == content_id(stored)
    assert (manifest["version"], manifest["parent"]) == (3, "sha256:22")
    assert manifest["base_content_id"] == artifact_id(base)


@pytest.mark.parametrize("spec", [LORA, FULL], ids=["adapter", "full"])
def test_the_same_parameters_give_the_same_bytes(tmp_path, base, spec):
    trainable = parameters_of(spec)
    export(tmp_path / "a", base, spec, trainable)
    shuffled = dict(reversed([(name, np.asarray(value)) for name, value in trainable.items()]))
    export(tmp_path / "b", base, spec, shuffled)
    export(tmp_path / "b", base, spec, shuffled)  # over itself
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert len(files_of(tmp_path / "a")) == (3 if spec.lora else 6)


def test_a_cast_rounds_once_and_remembers_its_source(tmp_path, base):
    trainable = parameters_of(LORA)
    manifest = export(tmp_path / "w", base, replace(LORA, dtype="bfloat16"), trainable)
    expected = {n: np.asarray(v).astype(ml_dtypes.bfloat16) for n, v in trainable.items()}
    loaded, _ = load(tmp_path / "w", LORA)
    assert manifest["dtype"] == "bfloat16"
    assert manifest["source_content_id"] == content_id(trainable)
    assert content_id(loaded) == content_id(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(loaded[name], value)
        np.testing.assert_array_equal(trainable[name].astype("bfloat16"), value)


def test_block_hashes_by_hand(tmp_path, base):
    trainable = parameters_of(LORA)
    manifest = export(tmp_path / "w", base, LORA, trainable)
    name = "layers.1.self_attn.q_proj.lora_a"
    assert manifest["tensors"][f"base_model.model.model.{name[:-7]}.lora_A.weight"] == {
        "dtype": "float32",
        "shape": [3, 16],
        "blocks": [hashlib.sha256(np.asarray(trainable[name]).T.tobytes()).hexdigest()],
    }
    assert len(manifest["tensors"]) == 2 * 3 * 2


def test_an_adapter_has_the_names_and_the_orientation_of_peft(tmp_path, base):
    trainable = parameters_of(LORA)
    export(tmp_path / "w", base, LORA, trainable)
    config = json.loads((tmp_path / "w/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6.0)
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert config["base_model_name_or_path"] == "../base"
    tensors = read_safetensors(tmp_path / "w/adapter_model.safetensors")
    ours, theirs = "layers.0.mlp.down_proj", "base_model.model.model.layers.0.mlp.down_proj"
    assert tensors[f"{theirs}.lora_A.weight"].shape == (3, 24)
    np.testing.assert_array_equal(tensors[f"{theirs}.lora_A.weight"], trainable[f"{ours}.lora_a"].T)
    np.testing.assert_array_equal(tensors[f"{theirs}.lora_B.weight"], trainable[f"{ours}.lora_b"].T)


def test_an_adapter_is_a_model_source_that_finds_its_base(tmp_path, base):
    trainable = parameters_of(LORA)
    export(tmp_path / "w", base, LORA, trainable, base_path=str(base))
    merged = merge_lora(LORA, trainable, init_parameters(CONFIG, seed=0))
    opened = open_model(str(tmp_path / "w"))
    for name, value in merged.items():
        np.testing.assert_allclose(np.asarray(opened.parameters[name]), value, atol=1e-5)


def test_a_full_export_is_a_model_folder_with_the_tokenizer_of_its_base(tmp_path, base):
    trainable = parameters_of(FULL)
    export(tmp_path / "w", base, FULL, trainable)
    config, parameters = read_model(tmp_path / "w")
    assert config == CONFIG
    for name, value in parameters.items():
        np.testing.assert_array_equal(value, trainable[name])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "w" / name).read_bytes() == (base / name).read_bytes()
    assert json.loads((tmp_path / "w/config.json").read_text())["eos_token_id"] == 2


def test_what_is_not_what_was_asked_for_is_refused(tmp_path, base):
    path = tmp_path / "w"
    export(path, base)
    identity = artifact_id(base)
    assert refused(path, version=4) == "FOLDER holds policy version 3, expected 4"
    assert (
        refused(path, base_content_id="sha256:99")
        == f"FOLDER belongs to the base {identity}, expected sha256:99"
    )
    other = replace(LORA, config=replace(CONFIG, num_hidden_layers=3))
    assert refused(path, other) == "FOLDER was exported with model.num_hidden_layers 2, expected 3"
    other = replace(LORA, lora=replace(LORA.lora, alpha=7.0))
    assert refused(path, other) == "FOLDER was exported with lora.alpha 6.0, expected 7.0"
    assert refused(path, FULL).startswith("FOLDER was exported with lora {")
    assert refused(tmp_path / "none") == "FOLDER/manifest.json is missing"


def test_a_folder_that_lacks_something_is_refused(tmp_path, base):
    path, name = tmp_path / "w", "adapter_model.safetensors"
    export(path, base)
    tensors = {name: np.array(value) for name, value in read_safetensors(path / name).items()}
    first = sorted(tensors)[0]

    def rewritten(changed):
        write_safetensors(path / name, changed, np.dtype(np.float32))
        return refused(path)

    without = {name: value for name, value in tensors.items() if name != first}
    assert rewritten(without) == f"FOLDER/{name} has no tensor {first}"
    surplus = tensors | {"x": tensors[first]}
    sentence = f"FOLDER/{name} has a tensor x, which its manifest does not list"
    assert rewritten(surplus) == sentence
    assert rewritten(tensors | {first: tensors[first][:2]}) == (
        f"FOLDER/{name}: tensor {first} has shape [2, 24], its manifest says [3, 24]"
    )
    (path / name).unlink()
    assert refused(path) == f"FOLDER/{name} is missing"


def test_a_flipped_or_cut_byte_is_refused(tmp_path, base):
    path = tmp_path / "w"
    export(path, base)
    file = path / "adapter_model.safetensors"
    whole, header = file.read_bytes(), 8 + int.from_bytes(file.read_bytes()[:8], "little")
    for place in (*range(header, len(whole), 499), len(whole) - 1):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        sentence = refused(path)
        assert sentence.startswith("FOLDER/adapter_model.safetensors is damaged: block 0 of tensor")
    for place in range(0, header, 41):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        if whole[place] != ord(" "):
            refused(path)
    for length in (0, 7, header, len(whole) - 1):
        file.write_bytes(whole[:length])
        refused(path)


def test_the_damaged_block_is_the_one_that_is_named(tmp_path):
    wide = ModelSpec(replace(CONFIG, vocab_size=70_000))
    base = tmp_path / "base"
    write_model(base, wide.config, init_parameters(wide.config, 0), {})
    write_json(Publisher(), base / "manifest.json", {"content_id": "sha256:0"})
    path = tmp_path / "w"
    manifest = export(path, base, wide)
    assert len(manifest["tensors"]["model.embed_tokens.weight"]["blocks"]) == 2  # 65,536 rows each
    file = path / "model.safetensors"
    tensors = {name: np.array(value) for name, value in read_safetensors(file).items()}
    tensors["model.embed_tokens.weight"][65_536, 0] += 1
    write_safetensors(file, tensors, np.dtype(np.float32))
    assert refused(path, wide) == (
        "FOLDER/model.safetensors is damaged: "
        "block 1 of tensor model.embed_tokens.weight does not match its hash"
    )


def test_a_manifest_that_is_not_right_is_refused(tmp_path, base):
    path = tmp_path / "w"
    export(path, base)
    manifest = read_manifest(path)

    def rewritten(**changes):
        changed = {k: v for k, v in (manifest | changes).items() if v is not ...}
        write_json(Publisher(), path / "manifest.json", changed)
        return refused(path).removeprefix("FOLDER/manifest.json ")

    assert rewritten(kind="policy") == "is not the manifest of exported weights"
    assert rewritten(format=1) == "has format 1, expected 2"
    assert rewritten(version=...) == "has no key version"
    damaged = "is damaged: its tensors do not match its content id"
    assert rewritten(content_id="sha256:0") == damaged
    name, *others = manifest["tensors"]
    fewer = {other: manifest["tensors"][other] for other in others}
    assert rewritten(tensors=fewer) == damaged
    assert rewritten(tensors=fewer | {name: {}}) == damaged
    (path / "manifest.json").write_text("[]")
    assert refused(path) == "FOLDER/manifest.json is not the manifest of exported weights"


def test_parameters_of_another_adapter_are_not_exported(tmp_path, base):
    with pytest.raises(KeyError):
        export(tmp_path / "w", base, LORA, {})
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_publishes_nothing(tmp_path, base, monkeypatch):
    written = []

    def pwrite(descriptor, block, place):
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(place)
        return real(descriptor, block, place)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(MeshdialError) as error:
        export(tmp_path / "w", base)
    assert str(error.value) == f"{tmp_path / 'w'} was not written: the disk is full"
    assert list(tmp_path.iterdir()) == []


def test_a_write_may_be_taken_in_pieces(tmp_path, base, monkeypatch):
    export(tmp_path / "whole", base)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, block, place: real(fd, block[:7], place))
    export(tmp_path / "pieces", base)
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "pieces")


def test_a_value_that_is_not_finite_is_not_exported(tmp_path, base):
    trainable = parameters_of(LORA)
    name = "layers.0.self_attn.q_proj.lora_a"
    spoilt = trainable | {name: trainable[name].at[0, 0].set(jnp.inf)}
    with pytest.raises(MeshdialError, match=r"q_proj.lora_A.weight holds a value not finite"):
        export(tmp_path / "w", base, LORA, spoilt)
    large = trainable | {name: trainable[name].at[0, 0].set(1e6)}
    with pytest.raises(MeshdialError, match="beyond the range of float16"):
        export(tmp_path / "w", base, replace(LORA, dtype="float16"), large)
    assert list(tmp_path.iterdir()) == []


# Whole models


@pytest.fixture
def model(tmp_path, base):
    """(a folder to change, its manifest)"""
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    manifest = identity_of(folder, described(read_safetensors(folder / "model.safetensors")))
    return folder, manifest


def loaded_model(folder, manifest, dtype="float32"):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return load_model(folder, manifest, dtype, dict.fromkeys(trainable_names(FULL), device))


def test_a_model_comes_back_in_any_dtype(model):
    parameters = init_parameters(CONFIG, seed=0)
    for dtype in ("float32", "bfloat16", "float16"):
        loaded, bytes_read = loaded_model(*model, dtype)
        assert content_id(loaded) == content_id(
            {name: np.asarray(value).astype(dtype) for name, value in parameters.items()}
        )
        assert bytes_read == sum(value.nbytes for value in parameters.values())
    assert model[1]["parameters_content_id"] == id_of_blocks(model[1]["tensors"])


def test_a_model_that_is_not_right_is_refused(model):
    folder, manifest = model

    def refused_model(**changes):
        changed = {k: v for k, v in (manifest | changes).items() if v is not ...}
        with pytest.raises(MeshdialError) as error:
            loaded_model(folder, changed)
        return str(error.value).replace(str(folder), "FOLDER")

    assert refused_model(tensors=...) == "FOLDER/manifest.json has no key tensors"
    damaged = "FOLDER/manifest.json is damaged: its tensors do not match its content id"
    assert refused_model(parameters_content_id="sha256:0") == damaged
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert refused_model() == (
        "FOLDER/model.safetensors is damaged: block 0 of tensor model.norm.weight does not match "
        "its hash"
    )
    file.write_bytes(whole[:-1])
    assert refused_model().startswith("FOLDER/model.safetensors is cut short: tensor model.norm")
    file.unlink()
    assert refused_model() == "FOLDER/model.safetensors is missing"
    config = write_model_config(CONFIG) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    assert refused_model() == (
        "FOLDER/manifest.json: model.layers.2.input_layernorm.weight has shape None, expected [16]"
    )
