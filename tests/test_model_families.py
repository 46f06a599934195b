"""Every family against transformers' own numbers, and through each path that computes it.

Weights are made as `reference/make_family_numbers.py` makes them; that transformers reads the
folders that are written here is what its second use shows.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh

from rl import sharding
from rl.errors import MeshdialError
from rl.learner import pack, score_batch
from rl.models.config_file import read_model_config, write_model_config
from rl.models.families import hf_name, is_transposed, read_model, write_model
from rl.models.packed import Packed
from rl.models.scoring import completion_hidden, completion_logprobs, completion_values
from rl.models.spec import LoraConfig, ModelSpec
from rl.models.transformer import init_lora, network, parameter_shapes
from rl.rollout.sampler import EngineConfig, generate
from rl.rollout.sampling import SamplingConfig

from .reference.family_weights import LENGTHS, PLACES, PROMPT, TOKENS, probe, weights

NUMBERS = json.loads(
    (Path(__file__).parent / "reference" / "family_numbers.json").read_text(encoding="utf-8")
)["families"]
families = pytest.mark.parametrize("family", NUMBERS)


def folder_of(folder: Path, family: str, head="lm") -> Path:
    """The folder that transformers would save: its config, and tensors by its names."""
    values = dict(NUMBERS[family]["config"])
    kind = NUMBERS[family]["architecture"]
    values["architectures"] = [kind if head == "value" else "AnyForCausalLM"]
    if head == "value":
        values["id2label"] = {"0": "LABEL_0"}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    shapes = parameter_shapes(ModelSpec(read_model_config(values), head=head))
    tensors = {
        hf_name(name): weights(family, hf_name(name), shape[::-1] if is_transposed(name) else shape)
        for name, shape in shapes.items()
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def loaded(folder: Path, head="lm"):
    config, parameters = read_model(folder, head)
    return ModelSpec(config, head=head), {k: jnp.asarray(v) for k, v in parameters.items()}


def packed() -> Packed:
    """TOKENS, cut behind the prompt; the last one's target is a dummy."""
    fed, targets = TOKENS[PROMPT - 1 :], [*TOKENS[PROMPT:], 0]
    positions = np.arange(PROMPT - 1, len(TOKENS))
    prompts, lengths = jnp.array([TOKENS[: PROMPT - 1]]), jnp.array([PROMPT - 1])
    bins = (jnp.array(x, jnp.int32)[None, None] for x in (fed, targets, positions, 0 * positions))
    return Packed(prompts, lengths, *bins)


@families
def test_logits_are_those_of_transformers(tmp_path, family):
    spec, parameters = loaded(folder_of(tmp_path / "m", family))
    hidden_PBTD = completion_hidden(spec, {}, parameters, packed())
    found = network(spec, {}, parameters).logits(hidden_PBTD[0, 0])
    places = np.array(PLACES) - (PROMPT - 1)
    np.testing.assert_allclose(found[places], NUMBERS[family]["logits"], rtol=1e-4, atol=1e-4)


@families
def test_gradients_are_those_of_transformers(tmp_path, family):
    spec, parameters = loaded(folder_of(tmp_path / "m", family))

    @jax.jit
    @jax.grad
    def gradient_of(trainable):
        logprobs, _ = completion_logprobs(spec, trainable, {}, packed(), 1.0)
        return logprobs[0, 0, :-1].mean()

    found = {}
    for name, gradient in gradient_of(parameters).items():
        along = probe(family, hf_name(name), gradient.shape[:: -1 if is_transposed(name) else 1])
        found[hf_name(name)] = (gradient * (along.T if is_transposed(name) else along)).sum()
    expected = NUMBERS[family]["gradients"]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


@families
def test_scores_of_a_classifier_are_those_of_transformers(tmp_path, family):
    spec, parameters = loaded(folder_of(tmp_path / "m", family, "value"), "value")
    batch = pack(
        group_ids=range(len(LENGTHS)),
        prompt_tokens=[TOKENS[:n] for n in LENGTHS],
        completion_tokens=[[0]] * len(LENGTHS),  # behind the last token
        temperature=1.0,
    )
    values = score_batch(spec, {}, parameters, batch, 500)[:, 0, 0]
    np.testing.assert_allclose(values, NUMBERS[family]["scores"], rtol=2e-4, atol=2e-4)


def test_values_of_a_bfloat16_network_are_float32(tmp_path):
    float32, parameters = loaded(folder_of(tmp_path / "m", "gemma2", "value"), "value")
    spec = ModelSpec(float32.config, dtype="bfloat16", head="value")
    parameters = {name: value.astype("bfloat16") for name, value in parameters.items()}
    hidden_TD = np.asarray(completion_hidden(spec, {}, parameters, packed())[0, 0], np.float64)
    expected = hidden_TD @ np.asarray(parameters["score.kernel"], np.float64)[:, 0]
    values_PBT = completion_values(spec, {}, parameters, packed())
    np.testing.assert_allclose(values_PBT[0, 0], expected, rtol=1e-5, atol=1e-5)


@families
def test_a_folder_reads_back_as_it_was_written(tmp_path, family):
    for head in ("lm", "value"):
        config, parameters = read_model(folder_of(tmp_path / head, family, head), head)
        write_model(tmp_path / f"{head}-2", config, parameters, {}, head=head)
        again, same = read_model(tmp_path / f"{head}-2", head)
        assert again == config == read_model_config(write_model_config(config, head))
        for name, value in parameters.items():
            np.testing.assert_array_equal(same[name], value)


class NoText:
    eos_ids = (99,)
    pad_id = 0

    def decode(self, tokens):
        return ""


PROMPTS = [TOKENS[:9], TOKENS[4:6]]


def samples_of(spec, trainable, parameters):
    """Three completions of each of PROMPTS, in order."""
    sampling = SamplingConfig(temperature=1.0, max_tokens=12, eos_ids=())
    groups = generate(
        *(spec, trainable, parameters, NoText(), PROMPTS, (0, 1, range(2)), 3, sampling),
        EngineConfig(max_rows=4, page_size=8),
    )
    return [sample for group in groups for sample in group]


def scores_of(spec, trainable, parameters, samples):
    """Log-probability of each token of each sample, from the packed path."""
    batch = pack(
        group_ids=[0, 0, 0, 1, 1, 1],
        prompt_tokens=[PROMPTS[0]] * 3 + [PROMPTS[1]] * 3,
        completion_tokens=[sample.tokens for sample in samples],
        temperature=1.0,
    )
    return score_batch(spec, trainable, parameters, batch, 60).reshape(6, -1)


@families
def test_the_rollout_engine_agrees_with_the_scorer(tmp_path, family):
    spec, parameters = loaded(folder_of(tmp_path / "m", family))
    samples = samples_of(spec, {}, parameters)
    scores = scores_of(spec, {}, parameters, samples)
    for sample, score in zip(samples, scores, strict=True):
        np.testing.assert_allclose(sample.logprobs, score, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_sharded_and_with_an_adapter(tmp_path, family):
    """Rollouts and scores of a mesh are those of one device, and the adapter has a part in them."""
    plain, parameters = loaded(folder_of(tmp_path / "m", family))
    spec = ModelSpec(plain.config, LoraConfig(2, 4.0, ("q_proj", "o_proj", "down_proj")))
    adapter = {name: value + 0.05 for name, value in init_lora(spec, 0).items()}
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 2, 2), sharding.AXES)
    with sharding.on(mesh):
        split = sharding.placed(adapter), sharding.placed(parameters)
        samples = samples_of(spec, *split)
        split_scores = scores_of(spec, *split, samples)
    scores = scores_of(spec, adapter, parameters, samples)
    np.testing.assert_allclose(split_scores, scores, rtol=1e-4, atol=1e-4)
    for sample, score in zip(samples, scores, strict=True):
        np.testing.assert_allclose(sample.logprobs, score, rtol=1e-4, atol=1e-4)
    assert np.abs(scores_of(plain, {}, parameters, samples) - scores).max() > 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', supported are llama, mistral, qwen2"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu', supported is 'gelu"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
            "rope_parameters is of type 'linear'",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries, expected .* 3 layer"),
        ({"layer_types": ["full_attention", "chunked", "x"]}, "layer_types has 'chunked'"),
    ],
)
def test_what_is_not_computed_is_refused(changes, message):
    with pytest.raises(MeshdialError, match=message):
        read_model_config(NUMBERS["gemma3_text"]["config"] | changes)


def test_a_classifier_of_several_labels_and_a_model_of_another_head_are_refused(tmp_path):
    folder = folder_of(tmp_path / "m", "llama", "value")
    with pytest.raises(MeshdialError, match=r"holds a classifier .* expected a language model"):
        read_model(folder)
    values = json.loads((folder / "config.json").read_text()) | {"id2label": {"0": "a", "1": "b"}}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(MeshdialError, match=r"config.json: .* has 2 labels .* expected 1"):
        read_model(folder, "value")


@pytest.mark.parametrize(
    ("kind", "more", "window", "layer_types"),
    [
        ("qwen2", {}, None, None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, 4096, "ffss"),
        ("gemma2", {"sliding_window": 7}, 7, "sfsf"),
        ("gemma3_text", {"sliding_window_pattern": 3}, 4096, "ssfs"),
    ],
)
def test_which_layers_slide_where_a_config_does_not_list_them(kind, more, window, layer_types):
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    sizes = dict.fromkeys(names, 8) | {"num_hidden_layers": 4, "head_dim": 2}
    config = read_model_config({"model_type": kind, **sizes, **more})
    words = {"f": "full_attention", "s": "sliding_attention"}
    assert config.sliding_window == window
    assert config.layer_types == (layer_types and tuple(words[letter] for letter in layer_types))
    assert read_model_config(write_model_config(config)) == config


def test_gelu_means_its_approximation_in_the_first_gemma_alone():
    config = NUMBERS["gemma"]["config"] | {"hidden_act": "gelu"}
    assert read_model_config(config).hidden_act == "gelu_pytorch_tanh"
    with pytest.raises(MeshdialError, match="hidden_activation is 'gelu', supported is 'gelu_py"):
        read_model_config(NUMBERS["gemma2"]["config"] | {"hidden_activation": "gelu"})
