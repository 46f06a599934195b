"""The adapter: its names, its start, its arithmetic by hand and its merging."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.errors import MeshdialError
from rl.models.layers import Linear
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec
from rl.models.transformer import (
    init_lora,
    init_parameters,
    merge_lora,
    parameter_shapes,
    trainable_names,
)

from .padded import completion_logprobs

CONFIG = ModelConfig(31, 16, 24, 2, 4, 2, 4, tie_word_embeddings=True)
LORA = LoraConfig(rank=2, alpha=6.0, targets=("q_proj", "down_proj"))
SPEC = ModelSpec(CONFIG, LORA)


def test_output_by_hand():
    linear = Linear(2, 2, True, LoraConfig(1, 3.0, ("q_proj",)), "float32")
    linear.kernel[...] = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    linear.lora_a[...] = jnp.array([[1.0], [2.0]])
    linear.lora_b[...] = jnp.array([[10.0, 20.0]])
    linear.bias[...] = jnp.array([0.5, -0.5])
    # x @ a is 1 + 4 = 5; times b and alpha / rank = 3 that is (150, 300).
    np.testing.assert_allclose(linear(jnp.array([[1.0, 2.0]])), [[151.5, 301.5]])


def test_adapter_names_and_shapes():
    shapes = parameter_shapes(SPEC)
    assert {name: shapes[name] for name in trainable_names(SPEC)} == {
        f"layers.{layer}.{name}": shape
        for layer in range(2)
        for name, shape in {
            "self_attn.q_proj.lora_a": (16, 2),
            "self_attn.q_proj.lora_b": (2, 16),
            "mlp.down_proj.lora_a": (24, 2),
            "mlp.down_proj.lora_b": (2, 16),
        }.items()
    }
    plain = parameter_shapes(ModelSpec(CONFIG))
    assert set(shapes) == set(plain) | set(trainable_names(SPEC))


def test_a_fresh_adapter_is_uniform_and_changes_nothing():
    wide = ModelSpec(ModelConfig(31, 400, 24, 1, 4, 2, 100), LoraConfig(64, 64.0, ("q_proj",)))
    fresh = init_lora(wide, seed=0)
    lora_a = np.asarray(fresh["layers.0.self_attn.q_proj.lora_a"])
    # Uniform within 1 / sqrt(400): the deviation is that over sqrt(3).
    assert np.abs(lora_a).max() <= 0.05
    np.testing.assert_allclose(lora_a.std(), 0.05 / np.sqrt(3), rtol=0.02)
    assert (fresh["layers.0.self_attn.q_proj.lora_b"] == 0).all()


def test_a_fresh_adapter_depends_on_its_seed_and_name_alone():
    fresh, again, other = init_lora(SPEC, 1), init_lora(SPEC, 1), init_lora(SPEC, 2)
    jax.tree.map(np.testing.assert_array_equal, fresh, again)
    narrow = init_lora(ModelSpec(CONFIG, LoraConfig(2, 6.0, ("down_proj",))), 1)
    for name in narrow:
        np.testing.assert_array_equal(narrow[name], fresh[name])
    first, second = (f"layers.{layer}.self_attn.q_proj.lora_a" for layer in range(2))
    assert not np.array_equal(fresh[first], other[first])
    assert not np.array_equal(fresh[first], fresh[second])


def test_a_spec_without_an_adapter_has_an_empty_one():
    assert init_lora(ModelSpec(CONFIG), 0) == {}


def test_merging_by_hand():
    frozen = init_parameters(CONFIG, 0)
    trainable = init_lora(SPEC, 0)
    name = "layers.1.mlp.down_proj"
    trainable[f"{name}.lora_a"] = jnp.zeros((24, 2)).at[5].set(jnp.array([1.0, 2.0]))
    trainable[f"{name}.lora_b"] = jnp.zeros((2, 16)).at[:, 3].set(jnp.array([10.0, 100.0]))
    merged = merge_lora(SPEC, trainable, frozen)
    assert set(merged) == set(frozen)
    # Row 5 of a times column 3 of b is 10 + 200; alpha / rank is 3.
    change = np.asarray(merged[f"{name}.kernel"] - frozen[f"{name}.kernel"])
    expected = np.zeros((24, 16))
    expected[5, 3] = 630.0
    np.testing.assert_allclose(change, expected, rtol=1e-6, atol=1e-6)
    untouched = "layers.1.self_attn.k_proj.kernel"
    np.testing.assert_array_equal(merged[untouched], frozen[untouched])


def test_a_merged_model_scores_as_the_adapted_one():
    rng = np.random.default_rng(0)
    frozen = {
        name: value if name.endswith(".scale") else 10 * value
        for name, value in init_parameters(CONFIG, 0).items()
    }
    trainable = {
        name: jnp.asarray(rng.normal(0, 0.3, value.shape), jnp.float32)
        for name, value in init_lora(SPEC, 0).items()
    }
    prompts, completions = rng.integers(0, 31, (2, 4)), rng.integers(0, 31, (2, 2, 3))
    rows = (prompts, np.array([4, 2]), completions, np.full((2, 2), 3), 1.0)
    score = jax.jit(completion_logprobs, static_argnums=0)
    adapted = score(SPEC, trainable, frozen, *rows)
    merged = score(ModelSpec(CONFIG), merge_lora(SPEC, trainable, frozen), {}, *rows)
    np.testing.assert_allclose(adapted, merged, rtol=1e-5, atol=1e-5)
    base = score(ModelSpec(CONFIG), frozen, {}, *rows)
    assert np.abs(np.asarray(adapted[0]) - np.asarray(base[0])).max() > 0.01


def test_no_frozen_kernel_has_a_gradient_computed():
    """A kernel's costs 2 FLOPs a parameter and token."""
    rows = (np.ones((1, 41), int), np.array([41]), np.ones((1, 4, 40), int), np.full((1, 4), 40))

    def flops(spec, trainable, frozen):
        def total(trainable):
            return completion_logprobs(spec, trainable, frozen, *rows, 1.0)[0].sum()

        return jax.jit(jax.grad(total)).lower(trainable).compile().cost_analysis()["flops"]

    base = init_parameters(CONFIG, 0)
    saved = flops(ModelSpec(CONFIG), base, {}) - flops(SPEC, init_lora(SPEC, 0), base)
    kernels = sum(v.size for k, v in base.items() if k.endswith("kernel") and "layers.0" in k)
    last = kernels - 2 * 16 * 16 - 3 * 16 * 24  # keys and values; the rest of prompts is left out
    head = base["embed_tokens.embedding"].size
    adapter = 2 * 2 * sum(v.size for v in init_lora(SPEC, 0).values()) * 200 * 3
    expected = 2 * (200 * kernels + 160 * (kernels + head)) + 2 * 40 * last
    assert saved > 0.9 * (expected - adapter)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ((2, 4.0, ("q_proj", "qkv")), "'qkv' is no projection"),
        ((2, 4.0, ()), "lora targets"),
        ((0, 4.0, ("q_proj",)), "lora rank: 0"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(values, sentence):
    with pytest.raises(MeshdialError, match=sentence):
        LoraConfig(*values)
