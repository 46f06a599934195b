"""Hugging Face folders in and out, held against the safetensors package and values by hand."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.errors import MeshdialError
from rl.models.families import hf_name, peft_name, read_model, write_model
from rl.models.safetensors_file import LazyTensor, read_safetensors, write_safetensors
from rl.models.spec import ModelConfig, ModelSpec
from rl.models.transformer import parameter_shapes

CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
)
UP = "model.layers.1.mlp.up_proj.weight"


def random_parameters(config=CONFIG) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = parameter_shapes(ModelSpec(config))
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path) -> Path:
    write_model(tmp_path / "model", CONFIG, random_parameters(), {})
    return tmp_path / "model"


def rewrite(folder: Path, change) -> None:
    """Rewrites the folder's tensors, by their checkpoint names, with the safetensors package."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def test_names():
    assert hf_name("embed_tokens.embedding") == "model.embed_tokens.weight"
    assert hf_name("layers.3.input_layernorm.scale") == "model.layers.3.input_layernorm.weight"
    assert hf_name("layers.0.self_attn.q_proj.kernel") == "model.layers.0.self_attn.q_proj.weight"
    assert hf_name("layers.0.self_attn.q_proj.bias") == "model.layers.0.self_attn.q_proj.bias"
    assert hf_name("norm.scale") == "model.norm.weight"
    assert hf_name("lm_head.kernel") == "lm_head.weight"
    assert (
        peft_name("layers.0.self_attn.q_proj.lora_a")
        == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    )


def test_kernels_are_stored_out_by_in_where_another_reader_finds_them(folder):
    parameters, stored = (
        random_parameters(),
        safetensors.numpy.load_file(folder / "model.safetensors"),
    )
    assert stored[UP].shape == (12, 8)
    np.testing.assert_array_equal(stored[UP], parameters["layers.1.mlp.up_proj.kernel"].T)
    assert stored["model.embed_tokens.weight"].shape == (11, 8)
    assert stored["lm_head.weight"].shape == (11, 8)
    assert {hf_name(name) for name in parameters} == stored.keys()


def test_what_is_written_is_read_back_as_views_of_the_file(folder):
    config, parameters = read_model(folder)
    assert config == CONFIG
    assert parameters.keys() == random_parameters().keys()
    for name, expected in random_parameters().items():
        np.testing.assert_array_equal(parameters[name], expected)
        assert not parameters[name].flags.owndata and not parameters[name].flags.writeable


def test_the_same_model_gives_the_same_bytes(tmp_path, folder):
    backwards = dict(reversed(random_parameters().items()))
    write_model(tmp_path / "again", CONFIG, backwards, {})
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_shards_are_read_by_their_index(folder):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, held in parts.items():
        safetensors.numpy.save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    _, parameters = read_model(folder)
    for name, expected in random_parameters().items():
        np.testing.assert_array_equal(parameters[name], expected)

    index.write_text(json.dumps({"weight_map": {**weight_map, names[0]: "b.safetensors"}}))
    with pytest.raises(MeshdialError, match=f"b.safetensors lacks tensor {names[0]}"):
        read_model(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(MeshdialError, match=r"b\.safetensors is missing"):
        read_model(folder)


def test_biases_and_a_tied_head_follow_the_config(tmp_path):
    config = ModelConfig(11, 8, 12, 1, 4, 2, 6, tie_word_embeddings=True, attention_bias=True)
    parameters = random_parameters(config)
    assert "lm_head.kernel" not in parameters
    write_model(tmp_path, config, parameters, {})
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    read_config, read = read_model(tmp_path)
    assert read_config == config and read.keys() == parameters.keys()
    bias = "layers.0.self_attn.k_proj.bias"
    np.testing.assert_array_equal(read[bias], parameters[bias])


def test_dtypes_are_cast_to_nearest_even_and_read_back_exactly(tmp_path):
    tensor = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.0e38, 2**-130], np.float32)
    write_safetensors(tmp_path / "t", {"t": tensor}, np.dtype(ml_dtypes.bfloat16))
    rounded = np.asarray(read_safetensors(tmp_path / "t")["t"], np.float32)
    # 1 + 2^-8 lies halfway between 1 and 1 + 2^-7; 1 + 3 * 2^-8 between 1 + 2^-7 and 1 + 2^-6
    assert rounded[:3].tolist() == [1.0, 1.0, 1 + 2**-6]
    assert rounded[4] == np.float32(2**-130)
    assert (tmp_path / "t").read_bytes()[-10:-4] == b"\x80\x3f\x80\x3f\x82\x3f"


@pytest.mark.parametrize(
    "value, dtype", [(np.nan, np.float32), (np.inf, np.float32), (7e4, np.float16), (-3.4e38, "bf")]
)
def test_values_that_the_dtype_cannot_hold_are_refused(tmp_path, value, dtype):
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bf" else dtype)
    tensor = np.array([1.0, value], np.float32)
    with pytest.raises(MeshdialError, match=f"tensor t holds a value .* range of {dtype}"):
        write_safetensors(tmp_path / "t", {"t": tensor}, dtype)


def test_a_lazy_tensor_is_made_once_and_not_before_its_turn(tmp_path):
    made = []

    def lazy(name):
        def load():
            made.append(name)
            return np.full((2, 3), len(made), np.float32)

        return LazyTensor((2, 3), np.dtype(np.float32), load)

    tensors = {"b": lazy("b"), "a": lazy("a")}
    assert made == []
    write_safetensors(tmp_path / "t", tensors, np.dtype(np.float32))
    assert made == ["a", "b"]
    assert safetensors.numpy.load_file(tmp_path / "t")["b"].tolist() == [[2.0] * 3] * 2


def test_large_tensors_are_cast_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.models.safetensors_file.CHUNK_BYTES", 64)
    tensor = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)
    write_safetensors(tmp_path / "t", {"t": tensor, "u": tensor.T}, np.dtype(np.float16))
    stored = safetensors.numpy.load_file(tmp_path / "t")
    np.testing.assert_array_equal(stored["t"], tensor)
    np.testing.assert_array_equal(stored["u"], tensor.T)


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8), shapes, max_size=5))
def test_any_tensors_are_read_alike_by_the_package_and_by_us(tmp_path_factory, named_shapes):
    named_shapes.pop("__metadata__", None)
    path = tmp_path_factory.mktemp("any") / "t"
    generator = np.random.default_rng(1)
    tensors = {name: generator.random(shape, np.float32) for name, shape in named_shapes.items()}
    write_safetensors(path, tensors, np.dtype(np.float32))
    theirs, ours = safetensors.numpy.load_file(path), read_safetensors(path)
    assert theirs.keys() == ours.keys() == tensors.keys()
    for name, expected in tensors.items():
        np.testing.assert_array_equal(ours[name], expected)
        np.testing.assert_array_equal(theirs[name], expected)


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_a_file_that_is_cut_short_is_refused(folder, fraction):
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * fraction)])
    with pytest.raises(MeshdialError, match=r"cut short|not a whole safetensors file"):
        read_model(folder)


def header(entry: object) -> bytes:
    raw = json.dumps({"t": entry}).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(8)


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ((9).to_bytes(8, "little") + b"[not json", "no JSON"),
        ((2).to_bytes(8, "little") + b"[]", "no JSON object"),
        (header({"dtype": "F32", "shape": [2]}), "entry of tensor t is damaged"),
        (header({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}), "tensor t is damaged"),
        (header({"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}), "tensor t is damaged"),
        (header({"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}), "t has dtype F4"),
        (header({"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}), "cut short: tensor t"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, raw, message):
    (tmp_path / "t").write_bytes(raw)
    with pytest.raises(MeshdialError, match=message):
        read_safetensors(tmp_path / "t")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(UP), f"tensor {UP} is missing"),
        (lambda t: t.update({UP: t[UP].T.copy()}), rf"{UP} has shape \[8, 12\];.* \[12, 8\]"),
        (lambda t: t.update(extra=t[UP]), "tensor extra has no place"),
        (lambda t: t.update({UP: t[UP].astype(np.complex64)}), f"tensor {UP} has dtype C64"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(MeshdialError, match=message):
        read_model(folder)


def test_old_rotary_buffers_are_passed_over(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": t[UP]}))
    assert len(read_model(folder)[1]) == len(random_parameters())


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("model_type", "mixtral", r"config.json: .*mixtral"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, r"config.json: .*rope_scaling.*linear"),
        ("hidden_size", None, r"config.json: .*hidden_size"),
    ],
)
def test_an_unsupported_config_is_refused_with_its_file(folder, key, value, message):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, key: value}))
    with pytest.raises(MeshdialError, match=message):
        read_model(folder)


def test_folders_without_a_model_say_what_is_missing(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(MeshdialError, match=r"neither .* \(pickled weights are never loaded"):
        read_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(MeshdialError, match="holds a list"):
        read_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(MeshdialError, match=r"config.json cannot be read as JSON"):
        read_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(MeshdialError, match=r"has no config.json"):
        read_model(folder)


def test_an_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(MeshdialError, match="found 'int4'; expected float32, bfloat16, float16"):
        write_model(tmp_path, CONFIG, random_parameters(), {}, dtype="int4")
