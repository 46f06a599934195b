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
from rl.models.spec import LoraConfig, ModelSpec
from rl.models.transformer import init_lora, parameter_shapes
from rl.rollout.sampler import EngineConfig, generate
from rl.rollout.sampling import SamplingConfig

from .reference.family_weights import LENGTHS, TOKENS, weights

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


def logprobs_of(spec, parameters, trainable=None, budget=500):
    """Of TOKENS after the first, from the packed path."""
    batch = pack(
        group_ids=[0],
        prompt_tokens=[TOKENS[:1]],
        completion_tokens=[TOKENS[1:]],
        temperature=1.0,
    )
    return score_batch(spec, trainable or {}, parameters, batch, budget)[0, 0]


@families
def test_logits_are_those_of_transformers(tmp_path, family):
    spec, parameters = loaded(folder_of(tmp_path / "m", family))
    found = logprobs_of(spec, parameters)
    for place, logits in zip((0, 4, 12, 19), NUMBERS[family]["logits"], strict=True):
        if place < len(found):
            expected = jax.nn.log_softmax(jnp.array(logits))[TOKENS[place + 1]]
            np.testing.assert_allclose(found[place], expected, rtol=2e-4, atol=2e-4)


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


@families
def test_the_rollout_engine_agrees_with_the_scorer(tmp_path, family):
    spec, parameters = loaded(folder_of(tmp_path / "m", family))
    sampling = SamplingConfig(temperature=1.0, max_tokens=12, eos_ids=())
    prompts = [TOKENS[:9], TOKENS[4:6]]
    groups = generate(
        *(spec, {}, parameters, NoText(), prompts, (0, 1, range(2)), 3, sampling),
        EngineConfig(max_rows=4, page_size=8),
    )
    samples = [sample for group in groups for sample in group]
    batch = pack(
        group_ids=[0, 0, 0, 1, 1, 1],
        prompt_tokens=[prompts[0]] * 3 + [prompts[1]] * 3,
        completion_tokens=[sample.tokens for sample in samples],
        temperature=1.0,
    )
    scores = score_batch(spec, {}, parameters, batch, 60).reshape(6, -1)
    for sample, score in zip(samples, scores, strict=True):
        np.testing.assert_allclose(sample.logprobs, score, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_sharded_and_with_an_adapter(tmp_path, family):
    spec, parameters = loaded(folder_of(tmp_path / "m", family))
    lora = ModelSpec(spec.config, LoraConfig(2, 4.0, ("q_proj", "o_proj", "down_proj")))
    adapter = {name: value + 0.05 for name, value in init_lora(lora, 0).items()}
    plain = logprobs_of(spec, parameters)
    whole = logprobs_of(lora, parameters, adapter)
    assert np.abs(whole - plain).max() > 0.01
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 2, 2), sharding.AXES)
    with sharding.on(mesh):
        split = logprobs_of(lora, sharding.placed(parameters), sharding.placed(adapter))
    np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-4)


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
