"""The sampler: which token a number draws, how often, and what its log-probability is."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl.errors import MeshdialError
from rl.rollout.sampling import SamplingConfig, draw_uniforms

from .drawing import sample, softmax

ALMOST_ONE = np.float32(1 - 2**-24)


def kept_by_sorting(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The plain definition, by sorts, in float64, where no two logits are equal."""
    probabilities = softmax(np.asarray(logits, np.float64) / temperature)
    order = np.argsort(-probabilities)
    kept = order[:top_k] if top_k else order
    left = probabilities[kept] / probabilities[kept].sum()
    mass_before = np.concatenate([[0.0], np.cumsum(left)[:-1]])
    if top_p < 1:
        kept = kept[mass_before < top_p]
    return {int(v) for v in kept if probabilities[v] >= min_p * probabilities.max()}


def support(logits, num_draws=4096, **options):
    """Every token that evenly spaced numbers draw."""
    uniforms = (np.arange(num_draws) + 0.5) / num_draws
    return set(sample(np.tile(logits, (num_draws, 1)), uniforms, **options)[0].tolist())


# Which token a number draws


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 0), (0.1249, 0), (0.125, 1), (0.6249, 1), (0.625, 3), (0.8749, 3), (0.875, 4)],
)
def test_a_number_draws_the_token_whose_running_probability_passes_it(uniform, token):
    logits = np.log([0.125, 0.5, 1e-45, 0.25, 0.125])
    logits[2] = -np.inf
    assert sample(logits[None], [uniform])[0] == [token]


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 259])
def test_each_token_owns_its_own_interval(vocabulary):
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(size=vocabulary)
    edges = np.concatenate([[0.0], np.cumsum(softmax(logits))])
    middles = (edges[1:] + edges[:-1]) / 2
    tokens, _, _ = sample(np.tile(logits, (vocabulary, 1)), middles)
    assert tokens.tolist() == list(range(vocabulary))


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_p": 0.9}, {"temperature": 0.3}])
def test_no_number_draws_a_token_without_probability(uniform, options):
    """Also where u * total rounds to the total, of a block or of the row."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(200, 500)).astype(np.float32) * 4
    is_impossible = rng.random(logits.shape) < 0.7
    is_impossible[:, [0, 1, 498, 499]] = True
    is_impossible[np.arange(200), rng.integers(2, 498, 200)] = False
    logits[is_impossible] = -np.inf
    tokens, logprobs, sampling_logprobs = sample(logits, np.full(200, uniform), **options)
    assert not is_impossible[np.arange(200), tokens].any()
    assert np.isfinite(logprobs).all() and np.isfinite(sampling_logprobs).all()


def test_the_last_number_draws_the_last_token_that_has_probability():
    logits = np.full((1, 300), -np.inf)
    logits[0, [3, 17, 250]] = [1.0, 0.0, -3.0]
    assert sample(logits, [1.0])[0] == [250]
    assert sample(logits, [1.0], top_k=2)[0] == [17]


# How often


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"temperature": 0.5}, np.array([1, 4, 9, 16]) / 30),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.8}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"min_p": 0.6}, [0, 0, 3 / 7, 4 / 7]),
    ],
)
def test_frequencies_are_the_probabilities(options, expected):
    """Chi-square over 20,000 draws with the random numbers that a run uses."""
    num_draws, expected = 20_000, np.asarray(expected)
    uniforms = numbers_of(3, 5, range(200), range(100), 8)[7]
    logits = np.tile(np.log([0.1, 0.2, 0.3, 0.4]), (num_draws, 1))
    counts = np.bincount(sample(logits, uniforms.reshape(-1), **options)[0], minlength=4)
    assert (counts[expected == 0] == 0).all()
    is_kept = expected > 0
    wanted = num_draws * expected[is_kept]
    assert ((counts[is_kept] - wanted) ** 2 / wanted).sum() < 16.3  # 0.999 quantile, 3 degrees


def test_frequencies_over_a_large_vocabulary():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=1000) * 2
    uniforms = numbers_of(0, 0, range(50), range(400))
    counts = np.bincount(
        sample(np.tile(logits, (20_000, 1)), uniforms.reshape(-1))[0], minlength=1000
    )
    wanted = 20_000 * softmax(logits)
    is_common = wanted > 5
    counts = np.append(counts[is_common], counts[~is_common].sum())
    wanted = np.append(wanted[is_common], wanted[~is_common].sum())
    chi_square, freedom = ((counts - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    assert abs(chi_square - freedom) < 3.3 * np.sqrt(2 * freedom)


# Log-probabilities


@given(st.integers(0, 10_000), st.floats(0.2, 3.0))
@settings(max_examples=20, deadline=None)
def test_logprobs_are_those_of_the_whole_distribution_at_the_temperature(seed, temperature):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(16, 100)) * 3
    tokens, logprobs, sampling_logprobs = sample(
        logits, rng.random(16), temperature=temperature, top_k=5
    )
    probabilities = softmax(logits / temperature)
    chosen = probabilities[np.arange(16), tokens]
    top_five = np.sort(probabilities, axis=1)[:, -5:].sum(axis=1)
    np.testing.assert_allclose(logprobs, np.log(chosen), atol=1e-5)
    np.testing.assert_allclose(sampling_logprobs, np.log(chosen / top_five), atol=1e-5)


def test_without_truncation_both_logprobs_are_the_same():
    logits = np.random.default_rng(0).normal(size=(8, 50))
    _, logprobs, sampling_logprobs = sample(logits, np.linspace(0, 0.99, 8), temperature=0.7)
    np.testing.assert_array_equal(logprobs, sampling_logprobs)


@pytest.mark.parametrize("vocabulary", [3, 64, 301])
def test_greedy_takes_the_argmax_and_scores_it_at_temperature_one(vocabulary):
    logits = np.random.default_rng(2).normal(size=(40, vocabulary)).astype(np.float32)
    options = {"temperature": 0.0, "top_k": 2, "min_p": 0.5}
    tokens, logprobs, sampling_logprobs = sample(logits, np.full(40, 0.99), **options)
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    np.testing.assert_allclose(logprobs, np.log(softmax(logits).max(axis=1)), atol=1e-6)
    np.testing.assert_array_equal(logprobs, sampling_logprobs)


def test_greedy_takes_the_first_of_a_tie():
    logits = np.zeros((1, 200))
    logits[0, [70, 71, 190]] = 2.0
    assert sample(logits, [0.9], temperature=0.0)[0] == [70]


def test_large_logits_do_not_overflow():
    _, logprobs, _ = sample([[3e4, 3e4 - np.log(4), -3e4]], [0.1], temperature=1.0)
    np.testing.assert_allclose(logprobs, np.log(0.8), atol=2e-3)  # a float32 ulp at 3e4


# Truncation


@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([1, 5, 64, 90]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 100),
    top_p=st.sampled_from([0.05, 0.35, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_truncation_keeps_what_sorting_keeps(seed, vocabulary, temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(size=vocabulary).astype(np.float32)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    kept = kept_by_sorting(logits, **options)
    nearby = [kept_by_sorting(logits, **{**options, "top_p": top_p + d}) for d in (-1e-5, 1e-5)]
    assume(top_p == 1 or nearby == [kept, kept])  # else rounding decides
    # The middle of each kept token's interval draws it, so a set that differs in one token shows.
    probabilities = softmax(logits.astype(np.float64) / temperature)
    ordered = sorted(kept)
    edges = np.concatenate([[0.0], np.cumsum(probabilities[ordered])])
    middles = (edges[1:] + edges[:-1]) / 2 / edges[-1]
    uniforms = np.resize(middles, 90)
    tokens, _, sampling_logprobs = sample(np.tile(logits, (90, 1)), uniforms, **options)
    np.testing.assert_array_equal(tokens, np.resize(ordered, 90))
    wanted = np.log(probabilities[tokens] / probabilities[ordered].sum())
    np.testing.assert_allclose(sampling_logprobs, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, {1, 4}),  # the tie for the first place
        ({"top_k": 2}, {1, 4}),
        ({"top_k": 3}, {1, 2, 3, 4}),  # the tie for the third place
        ({"top_p": 0.25}, {1, 4}),
        ({"top_p": 0.5}, {1, 4}),  # the two weigh exactly a half
        ({"top_p": 0.501}, {1, 2, 3, 4}),
        ({"min_p": 1.0}, {1, 4}),
        ({"min_p": 0.5}, {1, 2, 3, 4}),  # exactly half of the most probable
        ({"min_p": 0.501}, {1, 4}),
        ({"top_k": 1, "top_p": 0.5}, {1, 4}),
        ({"top_k": 4, "top_p": 0.6}, {1, 4}),  # 4 of 6 that top-k left, 4 of 8 of all
    ],
)
def test_ties_at_a_threshold_are_all_kept(options, kept):
    eighths = np.array([0.5, 2, 1, 1, 2, 0.5, 0.5, 0.5])
    logits = np.log2(eighths) * np.float32(np.log(2))
    assert support(logits, **options) == kept


def test_rows_are_truncated_on_their_own():
    flat, peaked = np.zeros(8), np.array([9.0, 0, 0, 0, 0, 0, 0, 0])
    tokens, _, _ = sample([flat, peaked] * 8, np.repeat(np.linspace(0, 0.99, 8), 2), top_p=0.9)
    assert tokens[::2].tolist() == list(range(8))
    assert set(tokens[1::2]) == {0}


@pytest.mark.parametrize("options", [{"top_k": 9}, {"top_p": 0.8}, {"top_k": 30, "top_p": 0.7}])
def test_a_row_is_truncated_alike_whatever_the_others_need(options):
    """To the bit: the search goes on for others, and a row is done when it is done."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(40, 500)).astype(np.float32)
    uniforms = rng.random(40)
    others = logits.copy()
    others[1:] = np.round(others[1:])  # ties, which take the longest to tell apart
    for one, other in zip(
        sample(logits, uniforms, **options), sample(others, uniforms, **options), strict=True
    ):
        assert one[0] == other[0]


# Random numbers


def numbers_of(seed, iteration, prompts, samples, num_positions=1):
    """[T, P, G] of every prompt's every sample's first positions."""
    names_TPG = np.meshgrid(range(num_positions), prompts, samples, indexing="ij")
    positions, prompts, samples = (name.ravel() for name in names_TPG)
    numbers = draw_uniforms(seed, iteration, prompts, samples, positions)
    return numbers.reshape(names_TPG[0].shape)


def test_a_samples_numbers_depend_on_what_it_is_and_not_on_where_it_runs():
    numbers_TPG = numbers_of(1, 2, [4, 9], [0, 1, 2], 16)
    moved_TPG = numbers_of(1, 2, [9, 4, 5], [2, 1, 0], 16)
    np.testing.assert_array_equal(numbers_TPG, moved_TPG[:, 1::-1, ::-1])
    np.testing.assert_array_equal(numbers_TPG[:3], numbers_of(1, 2, [4, 9], [0, 1, 2], 3))


def test_numbers_are_folded_in_seed_iteration_prompt_sample_and_position():
    key = jax.random.key(7)
    for name in (8, 9, 10, 11):
        key = jax.random.fold_in(key, name)
    expected = int(jax.random.bits(key, (), np.uint32)) // 2**8 / 2**24
    assert numbers_of(7, 8, [9], [10], 12)[11, 0, 0] == expected


def test_numbers_differ_in_seed_iteration_prompt_sample_and_position():
    names = [(s, i, [p], [g]) for s in (0, 1) for i in (0, 1) for p in (0, 1) for g in (0, 1)]
    numbers = [number for name in names for number in numbers_of(*name, 2).ravel()]
    assert len(set(numbers)) == 32


def test_numbers_are_multiples_of_two_to_the_minus_24_below_one():
    numbers = numbers_of(0, 0, range(100), range(100)).astype(np.float64)
    assert (numbers * 2**24 == np.floor(numbers * 2**24)).all()
    assert (numbers % 2**-23 != 0).any()
    assert 0 <= numbers.min() and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01


# The configuration


def test_what_counts_as_truncating():
    config = SamplingConfig(max_tokens=4)
    cases = {"top_k": 5, "top_p": 0.9, "min_p": 0.1}
    assert not config.is_truncating
    for name, value in cases.items():
        assert dataclasses.replace(config, **{name: value}).is_truncating
        assert not dataclasses.replace(config, temperature=0.0, **{name: value}).is_truncating
    for name, value in {"forbidden_ids": (3,), "min_tokens": 1}.items():
        assert dataclasses.replace(config, **{name: value}).is_truncating
        assert dataclasses.replace(config, temperature=0.0, **{name: value}).is_truncating


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("stop", ("\n", "")),
        ("min_tokens", -1),
        ("min_tokens", 5),
        ("forbidden_ids", (3, -1)),
        ("eos_ids", (-2,)),
        ("time_limit_s", 0.0),
    ],
)
def test_senseless_sampling_is_refused_by_name(name, value):
    with pytest.raises(MeshdialError, match=f"sampling: {name} is "):
        SamplingConfig(**{"max_tokens": 4, name: value})
