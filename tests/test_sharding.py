"""The same numbers on every mesh, and arrays where the table says."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from rl import sharding
from rl.errors import MeshdialError
from rl.learner import (
    init_optimizer,
    pack,
    score_batch,
    update,
)
from rl.learner.gradient import reinforcement_objective, sum_gradients
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec
from rl.models.transformer import init_lora, init_parameters, parameter_shapes
from rl.processes.runtime import parse_process_layout
from rl.rollout.sampler import EngineConfig, generate
from rl.rollout.sampling import SamplingConfig

from .test_learner import LOSS as ON_ONE_DEVICE
from .test_learner import SGD
from .test_sampler import Letters

CONFIG = ModelConfig(
    vocab_size=30,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    max_position_embeddings=128,
)
LORA = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "o_proj", "down_proj"))
LOSS = replace(ON_ONE_DEVICE, entropy_coefficient=0.01, max_tokens=None)
ADAMW = replace(SGD, kind="adamw", learning_rate=1e-3, weight_decay=0.1, clip_norm=1.0)
P, G = 5, 3
TOKENS = 100
"""Of a micro-batch: two of the five groups."""
PROMPTS = [[7, 8, 9, *range(3, 5 + 2 * p)] for p in range(P)]  # they share their first tokens


def mesh(data=1, fsdp=1, tensor=1):
    devices = np.array(jax.devices()[: data * fsdp * tensor])
    return Mesh(devices.reshape(data, fsdp, tensor), sharding.AXES)


def rollouts():
    rng = np.random.default_rng(0)
    completions = [rng.integers(3, 30, rng.integers(1, 8)).tolist() for _ in range(P * G)]
    return pack(
        group_ids=[p for p in range(P) for _ in range(G)],
        prompt_tokens=[PROMPTS[p] for p in range(P) for _ in range(G)],
        completion_tokens=completions,
        advantages=[np.full(len(tokens), rng.standard_normal()) for tokens in completions],
        rollout_logprobs=[-rng.random(len(tokens)) for tokens in completions],
        temperature=0.9,
    )


def everything(lora):
    """Gradient, scores, completions, updated parameters and figures on the current mesh."""
    spec, batch = ModelSpec(CONFIG, lora), rollouts()
    base = {k: v if v.ndim == 1 else 10 * v for k, v in init_parameters(CONFIG, 0).items()}
    adapter = {k: v + 0.05 for k, v in init_lora(spec, 1).items()}
    trainable = sharding.placed(adapter if lora else base)
    frozen = sharding.placed(base) if lora else {}
    objective = reinforcement_objective(batch, LOSS)
    gradient, _ = sum_gradients(
        spec, trainable, frozen, batch, objective, TOKENS, lambda line: None
    )
    scores = score_batch(spec, trainable, frozen, batch, TOKENS)
    completions = generate(
        *(spec, trainable, frozen, Letters(), PROMPTS, (1, 2, range(P)), G),
        *(SamplingConfig(max_tokens=30), EngineConfig(max_rows=6)),
    )
    tokens = [[list(row.tokens) for row in group] for group in completions]
    logprobs = [row.logprobs for group in completions for row in group]
    state = sharding.placed(init_optimizer(ADAMW, trainable))
    trainable, state, figures = update(
        spec, trainable, frozen, state, batch, LOSS, ADAMW, TOKENS, updates_per_batch=1
    )
    assert jax.tree.map(lambda a: a.sharding, state) == sharding.tree_shardings(
        state, sharding.current()
    )
    assert {k: v.sharding for k, v in trainable.items()} == {
        k: sharding.parameter_sharding(k, v.shape, sharding.current()) for k, v in trainable.items()
    }
    host = jax.tree.map(np.asarray, (gradient, trainable))
    return {
        "gradient": host[0],
        "trainable": host[1],
        "scores": scores,
        "tokens": tokens,
        "logprobs": logprobs,
        "figures": figures,
    }


@pytest.fixture(scope="module")
def on_one_device():
    with sharding.on(mesh()):
        return {lora: everything(lora) for lora in (None, LORA)}


def distance(one, other):
    """Relative norm of the difference of two trees."""
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    difference = sum(np.sum((a - b).astype(float) ** 2) for a, b in pairs)
    return np.sqrt(difference / sum(np.sum(a.astype(float) ** 2) for a, _ in pairs))


@pytest.mark.parametrize(
    ("axes", "lora"),
    [
        ({"fsdp": 2, "tensor": 2}, LORA),
        pytest.param({"fsdp": 2, "tensor": 2}, None, marks=pytest.mark.slow),
        pytest.param({"data": 2}, None, marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, None, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 2}, LORA, marks=pytest.mark.slow),
        pytest.param({"fsdp": 4}, None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_mesh_changes_no_number(axes, lora, on_one_device):
    with sharding.on(mesh(**axes)):
        found = everything(lora)
    expected = on_one_device[lora]
    assert found["tokens"] == expected["tokens"]
    for name in ("gradient", "trainable"):
        assert distance(expected[name], found[name]) < 1e-5, name
    for name in ("scores", "logprobs"):
        np.testing.assert_allclose(
            np.concatenate([np.ravel(row) for row in found[name]]),
            np.concatenate([np.ravel(row) for row in expected[name]]),
            atol=1e-5,
        )
    assert found["figures"] == pytest.approx(expected["figures"], rel=1e-5, abs=1e-6)


def test_the_table_shards_each_parameter_along_its_axes():
    shapes = parameter_shapes(ModelSpec(CONFIG, LORA))
    found = {k: s.spec for k, s in sharding.parameter_shardings(shapes, mesh(1, 2, 2)).items()}
    at = "layers.0.self_attn."
    assert found[f"{at}q_proj.kernel"] == PartitionSpec("fsdp", "tensor")
    assert found[f"{at}o_proj.kernel"] == PartitionSpec("tensor", "fsdp")
    assert found["layers.1.mlp.down_proj.kernel"] == PartitionSpec("tensor", "fsdp")
    assert found["embed_tokens.embedding"] == PartitionSpec("tensor", "fsdp")
    assert found["layers.0.input_layernorm.scale"] == PartitionSpec()
    assert found[f"{at}q_proj.lora_a"] == PartitionSpec("fsdp")
    assert found[f"{at}q_proj.lora_b"] == PartitionSpec(None, "tensor")
    assert found[f"{at}o_proj.lora_a"] == PartitionSpec("tensor")


def test_an_axis_that_does_not_divide_stays_whole():
    found = sharding.parameter_sharding("embed_tokens.embedding", (31, 16), mesh(1, 2, 2))
    assert found.spec == PartitionSpec(None, "fsdp")


@pytest.mark.parametrize(
    ("axes", "name"),
    [
        ({"tensor": 3}, "num_attention_heads"),
        ({"tensor": 4}, "num_key_value_heads"),
        ({"fsdp": 3}, "hidden_size"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(axes, name):
    with pytest.raises(MeshdialError, match=f"mesh m has {next(iter(axes))}: .*{name}"):
        sharding.check_model_fits(axes, CONFIG, "mesh m")


@pytest.mark.parametrize("first", [2, 6])
def test_meshes_of_one_process_lie_end_to_end(first):
    """Whatever lies between them on the machine, a mesh that the run does not use."""
    layouts = parse_process_layout(
        f"train:devices=2,fsdp=2+decode:devices=2,first={first},tensor=2"
    )
    train, decode = (sharding.device_mesh(layouts, name) for name in ("train", "decode"))
    assert list(train.devices.flat) == jax.devices()[:2]
    assert list(decode.devices.flat) == jax.devices()[2:4]
    assert dict(train.shape) == {"data": 1, "fsdp": 2, "tensor": 1}
    assert dict(decode.shape) == {"data": 1, "fsdp": 1, "tensor": 2}


def test_a_mesh_wants_devices_that_are_there():
    layouts = parse_process_layout("train:devices=64,fsdp=64")
    with pytest.raises(MeshdialError, match=r"mesh train wants devices 0 to 63 .* has 4 \(cpu\)"):
        sharding.device_mesh(layouts, "train")
