"""Tokens that may not be drawn: forbidden ones, and ends that come too early."""

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.config import complete
from rl.errors import MeshdialError
from rl.rollout.sampling import SamplingConfig, check_ids
from rl.stage_table import stage_config
from rl.stages.evaluation import evaluation_sampling
from rl.stages.experience import rollout_sampling

from .drawing import sample, softmax


def test_forbidden_ids_are_not_drawn_and_the_rest_keeps_its_proportions():
    """The log-probabilities are those of the whole, the sampling ones of what is allowed."""
    logits = np.log([0.1, 0.2, 0.3, 0.4])
    uniforms = [0.0, 0.24, 0.26, 0.999]
    found = sample([logits] * 4, uniforms, forbidden_ids=(1, 3))
    assert found[0].tolist() == [0, 0, 2, 2]
    np.testing.assert_allclose(found[1], np.log([0.1, 0.1, 0.3, 0.3]), atol=1e-6)
    np.testing.assert_allclose(found[2], np.log([0.25, 0.25, 0.75, 0.75]), atol=1e-6)


def test_ends_are_banned_in_rows_with_fewer_tokens_than_the_minimum():
    logits = [np.log([0.1, 0.2, 0.3, 0.4])] * 3
    options = {"min_tokens": 3, "ends": (2, 3), "num_tokens": [2, 3, 4]}
    tokens, logprobs, sampling_logprobs = sample(logits, [0.95] * 3, **options)
    assert tokens.tolist() == [1, 3, 3]
    np.testing.assert_allclose(logprobs, np.log([0.2, 0.4, 0.4]), atol=1e-6)
    np.testing.assert_allclose(sampling_logprobs, np.log([2 / 3, 0.4, 0.4]), atol=1e-6)


def test_an_end_that_is_forbidden_stays_so():
    options = {"min_tokens": 2, "ends": (0, 1), "forbidden_ids": (1, 1), "num_tokens": [1, 2, 9]}
    assert sample([[0.0, 5.0, 0.0]] * 3, [0.1] * 3, **options)[0].tolist() == [2, 0, 0]


def test_what_is_banned_may_outweigh_all_else():
    """By more than float32 can tell: weights are relative to the best token that is allowed."""
    logits = [[300.0, 0.0, -1.0, 200.0]]
    tokens, logprobs, sampling_logprobs = sample(logits, [0.9], forbidden_ids=(0, 3))
    assert tokens == [2]
    np.testing.assert_allclose(logprobs, -301.0, rtol=1e-6)
    np.testing.assert_allclose(sampling_logprobs, -1 - np.log1p(np.exp(-1)), atol=1e-6)


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 3]),
    min_p=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=60, deadline=None)
def test_bans_come_before_truncation(seed, temperature, top_k, min_p):
    """As if the model gave such tokens no logit, but for the log-probability of the whole."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(16, 100)).astype(np.float32) * 2
    forbidden = rng.permutation(100)[: rng.integers(65, 100)]
    options = {"temperature": temperature, "top_k": top_k, "min_p": min_p}
    uniforms, everyone = rng.random(16), np.arange(16)
    tokens, logprobs, sampling_logprobs = sample(
        logits, uniforms, forbidden_ids=tuple(forbidden.tolist()), **options
    )
    without = logits.copy()
    without[:, forbidden] = -np.inf
    wanted, _, wanted_logprobs = sample(without, uniforms, **options)
    np.testing.assert_array_equal(tokens, wanted)
    np.testing.assert_array_equal(sampling_logprobs, wanted_logprobs)
    probabilities = softmax(logits / (temperature or 1.0))
    np.testing.assert_allclose(logprobs, np.log(probabilities[everyone, tokens]), atol=1e-5)


def test_bans_come_in_few_sizes_and_where_there_are_none_cost_nothing():
    assert SamplingConfig(9).bans((1, 2)) is None
    assert SamplingConfig(9, min_tokens=2).bans(()) is None
    sizes = {
        SamplingConfig(9, forbidden_ids=tuple(range(num))).bans(()).ids_N.size
        for num in range(1, 33)
    }
    assert sizes == {8, 16, 32}


@pytest.mark.parametrize(
    ("forbidden", "ends", "min_tokens", "message"),
    [
        ((3, 5), (), 0, "rollout.forbidden_tokens has the id 5, expected ids below 5"),
        ((), (1, 7), 0, "has the id 7, expected ids below 5"),
        ((0, 1, 2, 3, 4), (), 0, "leaves none of the 5 tokens"),
        ((0, 1, 2, 3), (4,), 1, "leaves none of the 5 tokens"),
    ],
)
def test_ids_that_the_model_has_not_or_that_leave_no_token_are_refused(
    forbidden, ends, min_tokens, message
):
    config = SamplingConfig(9, forbidden_ids=forbidden, min_tokens=min_tokens)
    with pytest.raises(MeshdialError, match=message):
        check_ids(config, ends, vocab_size=5)


def test_forbidding_every_end_or_all_but_the_end_is_allowed():
    check_ids(SamplingConfig(9, forbidden_ids=(4,), min_tokens=3), (4,), vocab_size=5)
    check_ids(SamplingConfig(9, forbidden_ids=(0, 1, 2, 3)), (4,), vocab_size=5)


def test_an_evaluation_ends_where_the_run_does_and_is_not_truncated_by_probability():
    limits = {"max_tokens": 20, "min_tokens": 2, "stop": ["\n"], "forbidden_tokens": [4]}
    truncation = {"top_k": 3, "top_p": 0.9, "min_p": 0.1, "time_limit_s": 5}
    rollout = limits | truncation | {"stop_token_ids": [9, 2], "train_on_truncated": True}
    config = complete({"run": "x", "rollout": rollout, "evaluation": {"temperature": 0.5}})
    tokenizer = types.SimpleNamespace(eos_ids=(2, 3))
    ending = {"min_tokens": 2, "stop": ("\n",), "forbidden_ids": (4,), "eos_ids": (2, 3, 9)}
    assert rollout_sampling(stage_config(config, "generate_rollouts"), tokenizer) == SamplingConfig(
        20, 1.0, **truncation, **ending
    )
    assert evaluation_sampling(
        stage_config(config, "evaluate_policy"), tokenizer
    ) == SamplingConfig(20, 0.5, **ending)
