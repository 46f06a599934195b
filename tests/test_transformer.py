"""Scores of packed completions against a plain float64 forward pass; the layers by hand."""

import functools
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.errors import MeshdialError
from rl.models import token_scores
from rl.models.config_file import read_model_config, write_model_config
from rl.models.layers import RMSNorm, rotary_angles, rotate
from rl.models.packed import Packed
from rl.models.scoring import completion_logprobs as packed_logprobs
from rl.models.spec import PROJECTIONS, LoraConfig, ModelConfig, ModelSpec
from rl.models.transformer import init_parameters, parameter_shapes, trainable_names

from .padded import completion_logprobs
from .plain_llama import plain_scores

TIED = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    tie_word_embeddings=True,
)
BIASED = ModelConfig(
    vocab_size=53,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=6,
    attention_bias=True,
    mlp_bias=True,
)
SLIDING = replace(
    TIED,
    sliding_window=3,
    layer_types=("sliding_attention", "full_attention"),
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
)
SPECS = {
    "tied": ModelSpec(TIED),
    "biased": ModelSpec(BIASED),
    "adapted": ModelSpec(TIED, LoraConfig(3, 5.0, PROJECTIONS)),
    "sliding": ModelSpec(SLIDING),
}
P, G, PROMPT, T = 3, 2, 7, 5
PROMPT_LENGTHS = np.array([7, 4, 5], np.int32)
COMPLETION_LENGTHS = np.array([[5, 1], [3, 5], [2, 4]], np.int32)
NUM_SHARED = 3

score = jax.jit(completion_logprobs, static_argnums=(0, 8))


def parameters_of(spec, seed=0):
    """Parameters large enough that every part of the network counts."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(1.0 if name.endswith("scale") else 0.0, 0.3, shape), "float32")
        for name, shape in parameter_shapes(spec).items()
    }


def split(spec, parameters):
    names = set(trainable_names(spec))
    return (
        {name: value for name, value in parameters.items() if name in names},
        {name: value for name, value in parameters.items() if name not in names},
    )


@functools.cache
def case(name):
    """(spec, trainable, frozen, prompts, completions): prompts begin with the same tokens."""
    spec = SPECS[name]
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, spec.config.vocab_size, (P, PROMPT), np.int32)
    prompts[:, :NUM_SHARED] = prompts[0, :NUM_SHARED]
    completions = rng.integers(0, spec.config.vocab_size, (P, G, T), np.int32)
    return spec, *split(spec, parameters_of(spec)), prompts, completions


def expected_scores(name, temperature, prompt_lengths=PROMPT_LENGTHS, lengths=COMPLETION_LENGTHS):
    spec, trainable, frozen, prompts, completions = case(name)
    expected = np.zeros((2, P, G, T))
    for p, g in np.ndindex(P, G):
        length = lengths[p, g]
        expected[:, p, g, :length] = plain_scores(
            spec.config,
            spec.lora,
            {**frozen, **trainable},
            prompts[p, : prompt_lengths[p]],
            completions[p, g, :length],
            temperature,
        )
    return expected


# Scoring


@pytest.mark.parametrize("num_shared", [0, NUM_SHARED])
@pytest.mark.parametrize("name", SPECS)
def test_scores_are_those_of_a_plain_forward_pass(name, num_shared):
    spec, trainable, frozen, prompts, completions = case(name)
    scores = score(
        *(spec, trainable, frozen, prompts, PROMPT_LENGTHS, completions, COMPLETION_LENGTHS, 0.7),
        num_shared,
    )
    np.testing.assert_allclose(scores, expected_scores(name, 0.7), rtol=2e-5, atol=2e-5)
    padding = np.arange(T)[None, None, :] >= COMPLETION_LENGTHS[:, :, None]
    assert all((np.asarray(values)[padding] == 0).all() for values in scores)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(1, PROMPT), min_size=P, max_size=P),
    st.lists(st.integers(0, T), min_size=P * G, max_size=P * G),
    st.floats(0.3, 3.0),
)
def test_scores_hold_for_any_lengths_and_temperature(prompt_lengths, lengths, temperature):
    prompt_lengths = np.array(prompt_lengths, np.int32)
    lengths = np.array(lengths, np.int32).reshape(P, G)
    spec, trainable, frozen, prompts, completions = case("tied")
    scores = score(
        spec, trainable, frozen, prompts, prompt_lengths, completions, lengths, temperature, 0
    )
    expected = expected_scores("tied", temperature, prompt_lengths, lengths)
    np.testing.assert_allclose(scores, expected, rtol=5e-5, atol=5e-5)


def test_a_completion_of_one_token_needs_only_its_prompt():
    spec, trainable, frozen, prompts, completions = case("tied")
    ones = np.ones((P, G), np.int32)
    rows = (prompts, PROMPT_LENGTHS, completions[:, :, :1], ones, 1.0)
    logprobs, entropy = completion_logprobs(spec, trainable, frozen, *rows)
    expected = expected_scores("tied", 1.0, lengths=ones)[..., :1]
    np.testing.assert_allclose([logprobs, entropy], expected, rtol=2e-5, atol=2e-5)


def test_an_embedding_of_zeros_is_a_uniform_distribution():
    spec = ModelSpec(TIED)
    parameters = parameters_of(spec)
    parameters["embed_tokens.embedding"] = jnp.zeros((61, 24))
    _, _, _, prompts, completions = case("tied")
    logprobs, entropy = score(
        spec, parameters, {}, prompts, PROMPT_LENGTHS, completions, np.full((P, G), T), 0.5, 0
    )
    np.testing.assert_allclose(logprobs, np.full((P, G, T), -math.log(61)), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.full((P, G, T), math.log(61)), rtol=1e-6)


def test_temperature_zero_scores_at_temperature_one():
    spec, trainable, frozen, prompts, completions = case("tied")
    rows = (prompts, PROMPT_LENGTHS, completions, COMPLETION_LENGTHS)
    np.testing.assert_array_equal(
        score(spec, trainable, frozen, *rows, 0.0, 0), score(spec, trainable, frozen, *rows, 1.0, 0)
    )


def test_padding_changes_nothing():
    spec, trainable, frozen, prompts, completions = case("adapted")
    other_prompts, other_completions = prompts.copy(), completions.copy()
    other_prompts[np.arange(PROMPT)[None, :] >= PROMPT_LENGTHS[:, None]] = 9
    other_completions[np.arange(T)[None, None, :] >= COMPLETION_LENGTHS[:, :, None]] = 9

    def gradient(prompts, completions):
        def total(trainable):
            rows = (prompts, PROMPT_LENGTHS, completions, COMPLETION_LENGTHS, 1.0, NUM_SHARED)
            logprobs, entropy = completion_logprobs(spec, trainable, frozen, *rows)
            return jnp.sum(logprobs) + jnp.sum(entropy)

        return jax.jit(jax.value_and_grad(total))(trainable)

    one, other = gradient(prompts, completions), gradient(other_prompts, other_completions)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert all(np.isfinite(values).all() and values.any() for values in one[1].values())


def total_score(name, trainable):
    spec, _, frozen, prompts, completions = case(name)
    rows = (prompts, PROMPT_LENGTHS, completions, COMPLETION_LENGTHS, 0.7, NUM_SHARED)
    logprobs, entropy = completion_logprobs(spec, trainable, frozen, *rows)
    return jnp.sum(logprobs) + 0.5 * jnp.sum(entropy)


@functools.cache
def gradient_of_total(name):
    return jax.jit(jax.grad(functools.partial(total_score, name)))(case(name)[1])


@pytest.mark.parametrize(
    ("name", "parameter", "place"),
    [
        ("tied", "embed_tokens.embedding", (7, 5)),
        ("tied", "layers.0.self_attn.k_proj.kernel", (3, 4)),
        ("tied", "layers.1.self_attn.q_proj.kernel", (1, 7)),
        ("tied", "layers.0.mlp.up_proj.kernel", (5, 9)),
        ("sliding", "layers.0.self_attn.q_proj.kernel", (3, 4)),
        ("sliding", "layers.1.self_attn.k_proj.kernel", (2, 3)),
        ("tied", "layers.0.input_layernorm.scale", (2,)),
        ("biased", "layers.1.mlp.gate_proj.bias", (6,)),
        ("adapted", "layers.0.self_attn.v_proj.lora_a", (1, 2)),
        ("adapted", "layers.1.mlp.down_proj.lora_b", (2, 3)),
    ],
)
def test_gradient_is_the_slope_of_the_plain_forward_pass(name, parameter, place):
    spec, trainable, frozen, prompts, completions = case(name)

    def plain_total(shift):
        moved = np.array(trainable[parameter], np.float64)
        moved[place] += shift
        parameters = {**frozen, **trainable, parameter: moved}
        result = 0.0
        for p, g in np.ndindex(P, G):
            prompt = prompts[p, : PROMPT_LENGTHS[p]]
            completion = completions[p, g, : COMPLETION_LENGTHS[p, g]]
            scores = plain_scores(spec.config, spec.lora, parameters, prompt, completion, 0.7)
            result += scores[0].sum() + 0.5 * scores[1].sum()
        return result

    slope = (plain_total(1e-5) - plain_total(-1e-5)) / 2e-5
    assert abs(slope) > 1e-3
    np.testing.assert_allclose(gradient_of_total(name)[parameter][place], slope, rtol=1e-3)


def test_scoring_in_chunks_gives_the_same_gradient(monkeypatch):
    monkeypatch.setattr(token_scores, "MAX_LOGITS", 7 * TIED.vocab_size)  # 30 rows: 5 chunks
    chunked = jax.jit(jax.grad(lambda trainable: total_score("tied", trainable)))
    for name, values in chunked(case("tied")[1]).items():
        expected = gradient_of_total("tied")[name]
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4, err_msg=name)


def test_scoring_in_chunks_gives_the_same_scores(monkeypatch):
    monkeypatch.setattr(token_scores, "MAX_LOGITS", 7 * TIED.vocab_size)
    spec, trainable, frozen, prompts, completions = case("tied")
    rows = (prompts, PROMPT_LENGTHS, completions, COMPLETION_LENGTHS, 0.7)
    scores = jax.jit(lambda *rows: completion_logprobs(spec, trainable, frozen, *rows))(*rows)
    np.testing.assert_allclose(scores, expected_scores("tied", 0.7), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("max_logits", [2**20, 4 * 11], ids=["whole", "in chunks"])
@pytest.mark.parametrize("width_axis", [0, 1])
def test_the_gradient_under_a_soft_cap_is_that_of_the_formula(monkeypatch, width_axis, max_logits):
    monkeypatch.setattr(token_scores, "MAX_LOGITS", max_logits)
    rng = np.random.default_rng(3)
    hidden_ND, kernel_DV = (rng.normal(size=shape).astype("f4") for shape in ((9, 6), (6, 11)))
    targets_N, weights_N = rng.integers(0, 11, 9), rng.normal(size=(2, 9)).astype("f4")

    def formula(hidden_ND, kernel_DV):
        logprobs_NV = jax.nn.log_softmax(2.0 * jnp.tanh(hidden_ND @ kernel_DV / 2.0) / 0.7)
        entropy_N = -(jnp.exp(logprobs_NV) * logprobs_NV).sum(axis=1)
        return (
            weights_N[0] * logprobs_NV[jnp.arange(9), targets_N] + weights_N[1] * entropy_N
        ).sum()

    def ours(hidden_ND, kernel_DV):
        kernel = kernel_DV if width_axis == 0 else kernel_DV.T
        scores = token_scores.token_scores(
            width_axis, False, 2.0, hidden_ND, kernel, targets_N, jnp.float32(0.7)
        )
        return (weights_N * jnp.stack(scores)).sum()

    found, expected = (jax.grad(f, (0, 1))(hidden_ND, kernel_DV) for f in (ours, formula))
    for of_found, of_expected in zip(found, expected, strict=True):
        np.testing.assert_allclose(of_found, of_expected, rtol=1e-4, atol=1e-5)


# Packing

SEGMENTS = ((4, 1, 2), (5,)), ((3, 3), (1, 1, 1, 2)), ((2,), (7,))
"""Lengths of the completions in each of three prompts' two bins, of eight places."""


def packed_case(name):
    """(Packed, what a plain forward pass says of each place [2, P, B, T], its mask)."""
    spec, trainable, frozen, prompts, _ = case(name)
    rng = np.random.default_rng(2)
    shape = len(SEGMENTS), 2, 8
    inputs, targets, positions = (rng.integers(0, 9, shape, np.int32) for _ in range(3))
    segments, expected = np.full(shape, -1, np.int32), np.zeros((2, *shape))
    for p, b in np.ndindex(*shape[:2]):
        prompt, at = prompts[p, : PROMPT_LENGTHS[p]], 0
        for number, length in enumerate(SEGMENTS[p][b]):
            completion = rng.integers(0, spec.config.vocab_size, length)
            places = p, b, slice(at, at + length)
            inputs[places] = [prompt[-1], *completion[:-1]]
            targets[places], segments[places] = completion, number
            positions[places] = len(prompt) - 1 + np.arange(length)
            expected[:, *places] = plain_scores(
                spec.config, spec.lora, {**frozen, **trainable}, prompt, completion, 0.7
            )
            at += length
    prompts = prompts[:, :-1], PROMPT_LENGTHS - 1
    return Packed(*prompts, inputs, targets, positions, segments), expected, segments >= 0


@pytest.mark.parametrize("num_shared", [0, NUM_SHARED])
@pytest.mark.parametrize("name", SPECS)
def test_completions_in_one_bin_see_their_prompt_and_themselves(name, num_shared):
    spec, trainable, frozen, *_ = case(name)
    packed, expected, mask = packed_case(name)
    score = jax.jit(packed_logprobs, static_argnums=(0, 5))
    scores = np.asarray(score(spec, trainable, frozen, packed, 0.7, num_shared))
    np.testing.assert_allclose(scores[:, mask], expected[:, mask], rtol=2e-5, atol=2e-5)
    assert np.isfinite(scores).all()


# Costs


def dots_of(name, **options):
    """Shapes of the matrix products in the compiled gradient of a score."""
    spec, trainable, frozen, *_ = case(name)
    packed, *_ = packed_case(name)

    def total(trainable):
        scores = packed_logprobs(spec, trainable, frozen, packed, 1.0, **options)
        return sum(map(jnp.sum, scores))

    text = jax.jit(jax.grad(total)).lower(trainable).as_text()
    return re.findall(r"dot_general.*-> tensor<([\dx]*)x[a-z]", text)


def test_rematerialised_layers_give_the_same_gradient():
    spec, trainable, frozen, *_ = case("tied")
    packed, *_ = packed_case("tied")

    def total(trainable, is_rematerialised):
        scores = packed_logprobs(
            spec, trainable, frozen, packed, 1.0, is_rematerialised=is_rematerialised
        )
        return jnp.sum(scores[0])

    gradient = jax.jit(jax.grad(total), static_argnums=1)
    one, other = gradient(trainable, False), gradient(trainable, True)
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-5, err_msg=name)
    more = len(dots_of("tied", is_rematerialised=True)) - len(dots_of("tied"))
    assert more > 2 * 7  # a layer's seven kernels, and its scores


def test_a_fixed_entropy_is_the_same_number_without_a_gradient():
    spec, trainable, frozen, *_ = case("tied")
    packed, *_ = packed_case("tied")

    def score(trainable, is_entropy_fixed):
        return packed_logprobs(
            spec, trainable, frozen, packed, 1.0, is_entropy_fixed=is_entropy_fixed
        )[1].sum()

    grad = jax.jit(jax.value_and_grad(score), static_argnums=1)
    (one, slopes), (other, none) = grad(trainable, False), grad(trainable, True)
    assert one == other
    assert all(np.any(value) for value in slopes.values())
    assert not any(np.any(value) for value in none.values())


def test_bfloat16_stays_near_float32():
    spec, trainable, _, prompts, completions = case("tied")
    rows = (prompts, PROMPT_LENGTHS, completions, COMPLETION_LENGTHS, 1.0, NUM_SHARED)
    half = {name: value.astype(jnp.bfloat16) * 0.3 for name, value in trainable.items()}
    whole = {name: value.astype(jnp.float32) for name, value in half.items()}
    scores = score(ModelSpec(TIED, dtype="bfloat16"), half, {}, *rows)
    assert scores[0].dtype == scores[1].dtype == jnp.float32
    np.testing.assert_allclose(scores, score(spec, whole, {}, *rows), atol=0.05)


# Layers, by hand


def test_root_mean_square_norm_by_hand():
    norm = RMSNorm(2, ModelSpec(ModelConfig(2, 2, 4, 1, 1, 1, 2, rms_norm_eps=0.0)))
    norm.scale[...] = jnp.array([1.0, 2.0])
    # The mean square of (1, 7) is 25.
    np.testing.assert_allclose(norm(jnp.array([[1.0, 7.0]])), [[0.2, 2.8]], rtol=1e-6)


def test_rotation_by_hand():
    config = ModelConfig(2, 4, 4, 1, 1, 1, 4, rope_theta=16.0)
    cosine, sine = rotary_angles(config.head_dim, config.rope_theta, jnp.array([3]))
    # Frequencies are 1 and 16 ** -(2 / 4) = 1 / 4: position 3 turns by 3 and by 3 / 4.
    np.testing.assert_allclose(cosine, [[math.cos(3), math.cos(0.75)]], rtol=1e-6)
    turned = rotate(jnp.array([[[1.0, 0.0, 0.0, 2.0]]]), (cosine, sine))
    expected = [math.cos(3), -2 * math.sin(0.75), math.sin(3), 2 * math.cos(0.75)]
    np.testing.assert_allclose(turned, [[expected]], rtol=1e-6)


# Parameters


def test_parameters_by_name_and_shape():
    assert parameter_shapes(ModelSpec(ModelConfig(11, 4, 6, 1, 2, 1, 2))) == {
        "embed_tokens.embedding": (11, 4),
        "layers.0.input_layernorm.scale": (4,),
        "layers.0.self_attn.q_proj.kernel": (4, 4),
        "layers.0.self_attn.k_proj.kernel": (4, 2),
        "layers.0.self_attn.v_proj.kernel": (4, 2),
        "layers.0.self_attn.o_proj.kernel": (4, 4),
        "layers.0.post_attention_layernorm.scale": (4,),
        "layers.0.mlp.gate_proj.kernel": (4, 6),
        "layers.0.mlp.up_proj.kernel": (4, 6),
        "layers.0.mlp.down_proj.kernel": (6, 4),
        "norm.scale": (4,),
        "lm_head.kernel": (4, 11),
    }


def test_without_an_adapter_all_parameters_are_trained():
    spec = ModelSpec(BIASED)
    assert trainable_names(spec) == list(parameter_shapes(spec))


def test_fresh_parameters():
    config = ModelConfig(1000, 64, 128, 2, 4, 2, 16, attention_bias=True)
    fresh = init_parameters(config, seed=3)
    assert {name: value.shape for name, value in fresh.items()} == parameter_shapes(
        ModelSpec(config)
    )
    embedding = np.asarray(fresh["embed_tokens.embedding"])
    # 64,000 draws: mean and deviation lie within 4 standard errors.
    assert abs(embedding.mean()) < 4 * 0.02 / np.sqrt(64000)
    assert abs(embedding.std() - 0.02) < 4 * 0.02 / np.sqrt(2 * 64000)
    assert (fresh["norm.scale"] == 1).all()
    assert (fresh["layers.1.self_attn.o_proj.bias"] == 0).all()
    again, other = init_parameters(config, seed=3), init_parameters(config, seed=4)
    jax.tree.map(np.testing.assert_array_equal, fresh, again)
    for name in ("layers.0.mlp.up_proj.kernel", "layers.1.mlp.up_proj.kernel"):
        assert not np.array_equal(fresh[name], other[name])
        assert not np.array_equal(fresh[name], fresh["layers.0.mlp.gate_proj.kernel"])


# Configurations

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


def test_a_hugging_face_config_is_read():
    config = read_model_config(SMOLLM2)
    assert config == ModelConfig(
        49152, 576, 1536, 30, 9, 3, 64, 1e-5, 1e5, True, max_position_embeddings=8192
    )
    shapes = parameter_shapes(ModelSpec(config))
    assert sum(math.prod(shape) for shape in shapes.values()) == 134_515_008
    assert read_model_config(write_model_config(config)) == config


def test_a_hugging_face_config_has_defaults():
    sizes = {name: SMOLLM2[name] for name in list(SMOLLM2)[3:8]}
    config = read_model_config(sizes | {"head_dim": None})
    assert (config.num_key_value_heads, config.head_dim) == (9, 64)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 10000.0)
    assert not config.tie_word_embeddings
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert read_model_config(sizes | theta).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is of type 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters is of type 'llama3'"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 4}, "num_attention_heads is 9"),
        ({"head_dim": 63}, "head_dim is 63"),
    ],
)
def test_a_config_of_another_architecture_is_refused(changes, sentence):
    with pytest.raises(MeshdialError, match=sentence):
        read_model_config(SMOLLM2 | changes)
