"""A reward model trained on pairs: it is read back, and prefers what it was taught to prefer."""

import importlib.util
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rl.models.families import read_model, write_model
from rl.models.scratch import scratch_model
from rl.models.sources import prepare_model
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec
from rl.models.tokenizer import Tokenizer
from rl.models.transformer import init_lora, init_value_head
from rl.rewards.model_scoring import score_sequences, sequence_tokens

SCRIPT = Path(__file__).parents[1] / "workflow" / "scripts" / "train_reward_model.py"
ARCHITECTURE = {
    **{"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "max_positions": 16},
    **{"tokenizer": "characters", "alphabet": "0123456789>"},
}
SMALL = ("--updates", "40", "--batch-size", "16", "--learning-rate", "5e-3")
CHAT = [{"role": "user", "content": "12"}]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_reward_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written_base(folder, template=None, **changes):
    """The folder of a language model of characters."""
    config, parameters, files, ids = scratch_model(ARCHITECTURE | changes, 1)
    if template is not None:
        files = files | {"chat_template.jinja": template.encode()}
    write_model(folder, config, parameters, files, "float32", ids)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return written_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def pairs(script, tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "deep" / "pairs.jsonl"
    arguments = ["--out", str(path), "--num-pairs", "700", "--num-digits", "3"]
    assert script.main(["synthetic", *arguments]) == 0
    return path


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """Pairs that prefer the larger of two digits, which is soon learned."""
    path = tmp_path_factory.mktemp("larger") / "pairs.jsonl"
    digits = [(a, b) for a in range(10) for b in range(10) if a != b]
    rows = [pair(f"{a}{b}>", f"{max(a, b)}", f"{min(a, b)}") for a, b in digits]
    return written_pairs(path, *rows)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def written_pairs(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pair(prompt="12>", chosen="12", rejected="2"):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def train(script, pairs, out, *arguments):
    return script.main(["train", "--pairs", str(pairs), "--out", str(out), *map(str, arguments)])


def read_back(folder, source):
    """(spec, parameters, tokenizer) of what the pipeline makes of the script's folder."""
    prepare_model(str(source), folder, head="value")
    config, parameters = read_model(folder, "value")
    spec = ModelSpec(config, head="value")
    return spec, {n: jnp.asarray(v) for n, v in parameters.items()}, Tokenizer.load(folder)


def margins_of(model, rows):
    """score(chosen) - score(rejected) of each pair."""
    spec, parameters, tokenizer = model
    sequences = [
        sequence_tokens(tokenizer, row["prompt"], row[key])
        for row in rows
        for key in ("chosen", "rejected")
    ]
    groups = [number // 2 for number in range(len(sequences))]
    scores = np.array(score_sequences(spec, parameters, sequences, groups, 4096))
    return scores[0::2] - scores[1::2]


# Pairs


def test_synthetic_pairs_prefer_fewer_faults_and_are_those_of_the_seed(script, pairs, tmp_path):
    rows = rows_of(pairs)
    assert len(rows) == 700
    answers = ["".join(sorted(row["prompt"].removesuffix(">"))) for row in rows]
    for row, answer in zip(rows, answers, strict=True):
        assert re.fullmatch(r"\d{3}>", row["prompt"])
        assert script.faults(answer, row["chosen"]) < script.faults(answer, row["rejected"])
    num_right = sum(row["chosen"] == answer for row, answer in zip(rows, answers, strict=True))
    assert 350 < num_right < 700
    for seed, is_same in (("0", True), ("1", False)):
        path = tmp_path / f"{seed}.jsonl"
        arguments = ["--num-pairs", "700", "--num-digits", "3", "--seed", seed]
        assert script.main(["synthetic", "--out", str(path), *arguments]) == 0
        assert (path.read_bytes() == pairs.read_bytes()) == is_same


@pytest.mark.parametrize(
    ("found", "num_faults"),
    [("123", 0), ("132", 1), ("321", 2), ("12", 1), ("1233", 1), ("124", 2), ("", 3), ("421", 4)],
)
def test_faults_are_counted(script, found, num_faults):
    assert script.faults("123", found) == num_faults


# Training


@pytest.mark.parametrize("rank", [0, 4])
def test_a_trained_model_scores_as_reported(script, base, larger, tmp_path, capsys, rank):
    out = tmp_path / "deep" / "rewards"
    assert train(script, larger, out, "--base", base, "--lora-rank", rank, *SMALL) == 0
    told = re.search(r"([\d.]+) of (\d+) held-out pairs", capsys.readouterr().out)
    model = read_back(tmp_path / "prepared", out)
    heldout = [row for row in rows_of(larger) if script._is_heldout(row)]
    margins = margins_of(model, heldout)
    assert len(heldout) == int(told[2])
    assert (margins > 0).mean() == pytest.approx(float(told[1]), abs=6e-4)
    assert float(told[1]) > 0.8
    assert np.logaddexp(0, -margins).mean() < 0.7 * np.log(2)  # which it is of a fresh head
    _, started = read_model(base)
    changed = {name for name, value in started.items() if (model[1].get(name) != value).any()}
    stem = "layers.0.self_attn"
    assert f"{stem}.q_proj.kernel" in changed
    assert (f"{stem}.k_proj.kernel" in changed) == (rank == 0)
    assert [path.name for path in out.parent.iterdir()] == ["rewards"]


def test_from_scratch_the_same_seed_gives_the_same_folder(script, pairs, tmp_path):
    arguments = ["--updates", "2", "--batch-size", "4"]
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert train(script, pairs, tmp_path / name, *arguments, "--seed", seed) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}
    tokenizer = Tokenizer.load(tmp_path / "a")
    assert tokenizer.decode([config["pad_token_id"]], skip_special=False) == "<pad>"


def test_the_loss_is_that_of_bradley_and_terry(script):
    """Of sequences scored one by one, whether a pair shares all but its end, or nothing."""
    config = ModelConfig(20, 16, 24, 1, 2, 1, 8)
    spec = ModelSpec(config, LoraConfig(2, 4.0, ("q_proj",)), head="value")
    _, parameters, _, _ = scratch_model(ARCHITECTURE | {"width": 16, "ffn": 24}, 0)
    rng = np.random.default_rng(0)
    frozen = {
        name: jnp.asarray(rng.standard_normal(value.shape) * 0.3, jnp.float32)
        for name, value in parameters.items()
    }
    frozen["embed_tokens.embedding"] = jnp.asarray(rng.standard_normal((20, 16)), jnp.float32)
    head = {"score.kernel": jnp.asarray(rng.standard_normal((16, 1)), jnp.float32)}
    trainable = init_lora(spec, 0) | init_value_head(spec) | head
    pairs = [([3, 4, 5, 6], [3, 4, 7]), ([1, 2], [2, 1, 1]), ([8, 9, 9], [8]), ([5], [6])]
    flat = [tokens for pair in pairs for tokens in pair]
    plain = ModelSpec(config, head="value")
    scores = score_sequences(plain, frozen | head, flat, range(len(flat)), 4096)
    margins = np.array(scores[0::2]) - np.array(scores[1::2])
    loss, gradient = script._gradient(spec, trainable, frozen, *script._laid_out(pairs))
    assert np.abs(margins).min() > 1e-3
    np.testing.assert_allclose(loss, np.logaddexp(0, -margins).mean(), rtol=1e-5)
    assert {name for name in gradient if jnp.abs(gradient[name]).max() > 0} >= {"score.kernel"}
    found = script._accuracy(spec, trainable, frozen, pairs, 3)
    assert found == (margins > 0).mean()


# What is refused


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([pair(), pair(chosen=3)], r"row 2, chosen: found 3, expected text$"),
        ([pair(prompt=None)], r"row 1, prompt: found None, expected text or messages"),
        ([pair(prompt=[{"role": "user"}])], r"row 1, prompt: found \[{'role': 'user'}\], expected"),
        ([pair(prompt=[])], r"row 1, prompt: found \[\], expected text or messages"),
        ([pair(rejected=CHAT)], r"row 1, rejected: found \[{.*, expected text$"),
        ([["12>", "1"]], r"row 1: found \['12>', '1'\], expected a JSON object"),
        ([pair(), pair(rejected="1" * 14)], r"row 2, rejected: .* 17 tokens, expected 1 to 16,"),
        ([pair(prompt="", chosen="")], r"row 1, chosen: with the prompt 0 tokens, expected 1 to"),
        ([pair(chosen="x")], r"row 1, chosen: the tokenizer of .* has no token for 'x'"),
        ([pair(chosen="2")], r"row 1: chosen and rejected are the same"),
        ([pair(prompt=CHAT)], r"row 1, chosen: .* has no chat template"),
        ([pair()] * 9, r"0 pairs to train on and 9 held out, expected at least 16 and 1"),
        ([], r"0 pairs to train on and 0 held out"),
    ],
)
def test_pairs_that_cannot_be_used(script, base, tmp_path, capsys, rows, message):
    path = written_pairs(tmp_path / "pairs.jsonl", *rows)
    assert train(script, path, tmp_path / "out", "--base", base, *SMALL) == 1
    told = capsys.readouterr().err.strip()
    assert re.search(message, told) and told.startswith(f"train_reward_model.py: {path}")
    assert {file.name for file in tmp_path.iterdir()} == {"pairs.jsonl"}


@pytest.mark.parametrize("content", [b"{\n", b"\xff\xfe\xfa\n", b"\n"])
def test_rows_that_are_not_json(script, base, tmp_path, capsys, content):
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(json.dumps(pair()).encode() + b"\n" + content)
    assert train(script, path, tmp_path / "out", "--base", base) == 1
    assert f"{path}, row 2: not JSON" in capsys.readouterr().err


def test_bases_and_outputs_that_cannot_be_used(script, base, pairs, tmp_path, capsys):
    def told(out, *arguments):
        assert train(script, pairs, out, *arguments) == 1
        return capsys.readouterr().err

    out = tmp_path / "out"
    assert "no folder, no .gguf file" in told(out, "--base", tmp_path / "none")
    assert "has no config.json" in told(out, "--base", tmp_path)
    bare = written_base(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    assert "bare has no tokenizer.json" in told(out, "--base", bare)
    assert "lora rank: -1, expected at least 1" in told(out, "--base", base, "--lora-rank", "-1")
    assert "is there already" in told(base, "--base", base)
    assert "No such file" in told(out, "--pairs", tmp_path / "none.jsonl")
    diverging = ("--base", base, *SMALL, "--learning-rate", "1e30")
    assert re.search(r"update \d+: the loss is (nan|inf); try a lower", told(out, *diverging))
    assert {path.name for path in tmp_path.iterdir()} == {"bare"}


@pytest.mark.parametrize(
    ("option", "value"), [("--updates", "0"), ("--batch-size", "-2"), ("--learning-rate", "nan")]
)
def test_numbers_that_mean_nothing(script, pairs, tmp_path, capsys, option, value):
    with pytest.raises(SystemExit):
        train(script, pairs, tmp_path / "out", option, value)
    assert f"{option}: found {value}, expected a number above 0" in capsys.readouterr().err


def test_a_failed_write_leaves_no_folder(script, base, pairs, tmp_path, monkeypatch, capsys):
    def fails(folder, *rest):
        (folder / "config.json").write_text("half")
        raise OSError("out of luck")

    monkeypatch.setattr(script, "write_model", fails)
    arguments = ("--base", base, "--updates", "1", "--batch-size", "4")
    assert train(script, pairs, tmp_path / "out", *arguments) == 1
    assert "out of luck" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_base_that_is_a_classifier_already_is_refused(script, pairs, tmp_path, capsys):
    arguments = ("--updates", "1", "--batch-size", "4")
    assert train(script, pairs, tmp_path / "a", *arguments) == 0
    assert train(script, pairs, tmp_path / "b", "--base", tmp_path / "a", *arguments) == 1
    assert "holds a classifier" in capsys.readouterr().err


def test_prompts_of_messages_go_through_the_template(script, tmp_path):
    """A completion's score is that at the last token of the rendered chat."""
    template = "{% for m in messages %}{{ m.content }}>{% endfor %}"
    base = written_base(tmp_path / "base", template)
    rows = [pair([{"role": "user", "content": f"{n}"}], "1", "2") for n in range(60)]
    path = written_pairs(tmp_path / "pairs.jsonl", *rows)
    tokenizer = script._tokenizer(script.open_model(str(base)))
    chosen, rejected = script._pair_tokens(tokenizer, rows[12], 16, "here")
    assert [tokenizer.decode(tokens) for tokens in (chosen, rejected)] == ["12>1>", "12>2>"]
    arguments = ("--base", base, "--updates", "8", "--batch-size", "8", "--learning-rate", "1e-2")
    assert train(script, path, tmp_path / "out", *arguments) == 0
    assert (margins_of(read_back(tmp_path / "prepared", tmp_path / "out"), rows) > 0).all()
