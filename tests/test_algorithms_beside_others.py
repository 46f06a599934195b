"""Losses, their gradients and advantages beside those of TRL, verl and Tunix.

tests/reference/make_algorithm_numbers.py says which versions, and how their numbers came to be.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms.advantages import group_advantages
from rl.algorithms.aggregation import token_weights
from rl.algorithms.estimators import AdvantageConfig, Sequences, estimate
from rl.algorithms.kl import kl_estimate, kl_values
from rl.algorithms.policy_loss import clipped_loss, importance_ratio
from rl.algorithms.value_loss import clipped_value_loss

from .reference.algorithm_inputs import (
    CISPO_HIGH,
    CISPO_LOW,
    DUAL,
    GAMMA,
    GROUP,
    HIGH,
    LAM,
    LOW,
    MAX_TOKENS,
    SEQUENCE_HIGH,
    SEQUENCE_LOW,
    VALUE_CLIP,
    N,
    T,
    inputs,
    near,
    with_an_empty_sequence,
)

PEERS = json.loads(
    Path(__file__).with_name("reference").joinpath("algorithm_numbers.json").read_text()
)
GIVEN = inputs()
MASK = GIVEN["mask"].astype(bool)
INDEX = np.repeat(np.arange(N // GROUP), GROUP)
MEAN, BY_SEQUENCE = "token-mean", "sequence-mean-token-mean"
BY_SUM = "sequence-mean-token-sum-norm"


def f32(name):
    return jnp.asarray(GIVEN[name], jnp.float32)


def policy_loss(policy, kind, low, high, aggregation, level, kl_coefficient):
    """The sum of token losses with their weights; one sequence lies in each row."""
    is_sequence = level == "sequence"
    proximal = jnp.asarray(near(GIVEN) if is_sequence else GIVEN["proximal"], jnp.float32)
    advantages = f32("sequence_advantages")[:, None] if is_sequence else f32("advantages")
    segments = jnp.zeros((N, T), jnp.int32)
    ratio = importance_ratio(policy, proximal, level, jnp.asarray(MASK), segments)
    losses, is_clipped = clipped_loss(kind, ratio, policy, advantages, low, high, DUAL)
    losses += kl_coefficient * kl_estimate(policy, f32("reference"), "k3")
    weights = token_weights(MASK, aggregation, MAX_TOKENS)
    return jnp.sum(weights * losses), np.mean(is_clipped[MASK])


def assert_same(found, expected, tolerance=2e-5):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance / 10)


PPO = "ppo", LOW, HIGH
DUAL_CLIP = "dual", LOW, HIGH
SEQUENCE = "ppo", SEQUENCE_LOW, SEQUENCE_HIGH
# Its bound below is at most 1 - 1 = 0, where no ratio is; TRL has none.
CISPO = "cispo", None, CISPO_HIGH


@pytest.mark.parametrize(
    ("peer", "name", "clip", "aggregation", "level"),
    [
        ("trl", "grpo", PPO, BY_SEQUENCE, "token"),
        ("trl", "bnpo", PPO, MEAN, "token"),
        ("trl", "dr_grpo", PPO, BY_SUM, "token"),
        ("trl", "dual", DUAL_CLIP, BY_SEQUENCE, "token"),
        ("trl", "cispo", CISPO, MEAN, "token"),
        ("trl", "sequence", SEQUENCE, BY_SEQUENCE, "sequence"),
        ("verl", "dual token-mean", DUAL_CLIP, MEAN, "token"),
        ("verl", "dual seq-mean-token-mean", DUAL_CLIP, BY_SEQUENCE, "token"),
        ("verl", "dual seq-mean-token-sum-norm", DUAL_CLIP, BY_SUM, "token"),
        ("verl", "cispo", ("cispo", CISPO_LOW, CISPO_HIGH), MEAN, "token"),
        ("verl", "cispo without a lower bound", CISPO, MEAN, "token"),
        # Theirs is GSPO-token, whose gradient is GSPO's where a sequence has one advantage.
        ("verl", "sequence", SEQUENCE, BY_SEQUENCE, "sequence"),
        ("tunix", "ppo token-mean", PPO, MEAN, "token"),
        ("tunix", "ppo sequence-mean-token-mean", PPO, BY_SEQUENCE, "token"),
        ("tunix", "dual", DUAL_CLIP, MEAN, "token"),
        ("tunix", "sequence", SEQUENCE, BY_SEQUENCE, "sequence"),
    ],
)
def test_a_policy_loss_and_its_gradient(peer, name, clip, aggregation, level):
    (loss, clipped), gradient = jax.value_and_grad(policy_loss, has_aux=True)(
        f32("policy"), *clip, aggregation, level, 0.0
    )
    assert 0.1 < clipped < 0.9
    expected = PEERS[peer][name]
    assert_same(loss, expected["loss"])
    assert_same(gradient, expected["gradient"])


def test_the_inputs_tell_kinds_and_levels_apart():
    losses = [
        PEERS["trl"][name]["loss"] for name in ("grpo", "bnpo", "dr_grpo", "dual", "cispo")
    ] + [PEERS["verl"]["cispo"]["loss"], PEERS["trl"]["sequence"]["loss"]]
    gaps = np.abs(np.subtract.outer(losses, losses))[~np.eye(len(losses), dtype=bool)]
    assert gaps.min() > 1e-3


def test_a_kl_in_the_loss_has_trls_value_and_another_gradient():
    """TRL differentiates k3's value, which is the gradient of the other KL; ours is k2's, as verl's
    `k3+`."""
    (loss, _), gradient = jax.value_and_grad(policy_loss, has_aux=True)(
        f32("policy"), *PPO, BY_SEQUENCE, "token", 0.1
    )
    assert_same(loss, PEERS["trl"]["grpo_with_kl"]["loss"])
    without = np.array(PEERS["trl"]["grpo"]["gradient"])
    weights = token_weights(MASK, BY_SEQUENCE)
    of_verl = np.array(PEERS["verl"]["kl_gradient"]["k3+"])
    assert_same(gradient, without + 0.1 * weights * of_verl)
    assert not np.allclose(gradient, PEERS["trl"]["grpo_with_kl"]["gradient"], atol=1e-3)


@pytest.mark.parametrize("peer", ["verl", "tunix"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates(peer, kind):
    expected = PEERS[peer]["kl"][kind]
    assert_same(kl_values(GIVEN["policy"], GIVEN["reference"], kind), expected)
    assert_same(kl_estimate(f32("policy"), f32("reference"), kind), expected)


@pytest.mark.parametrize(("kind", "theirs"), [("k1", "k1+"), ("k2", "k2"), ("k3", "k3+")])
def test_every_kl_estimate_has_the_gradient_of_verls_corrected_one(kind, theirs):
    gradient = jax.grad(lambda policy: kl_estimate(policy, f32("reference"), kind).sum())
    assert_same(gradient(f32("policy")), PEERS["verl"]["kl_gradient"][theirs])


@pytest.mark.parametrize("peer", ["verl", "tunix"])
def test_an_empty_sequence_is_none_of_those_that_are_averaged_over(peer):
    by_name = {MEAN: MEAN, BY_SEQUENCE: "seq-mean-token-mean", BY_SUM: "seq-mean-token-sum-norm"}
    if peer == "tunix":  # its `sequence-mean-token-sum-norm` divides by no number of tokens
        by_name = {MEAN: MEAN, BY_SEQUENCE: BY_SEQUENCE, BY_SUM: "sequence-mean-token-scale"}
    mask = with_an_empty_sequence(GIVEN)
    for ours, theirs in by_name.items():
        found = np.sum(token_weights(mask, ours, MAX_TOKENS) * GIVEN["advantages"])
        assert_same(found, PEERS[peer]["aggregation"][theirs])


def test_trl_counts_an_empty_sequence():
    mask = with_an_empty_sequence(GIVEN)
    weights = token_weights(mask, BY_SUM, MAX_TOKENS)
    ratio = jnp.exp(f32("policy") - f32("proximal"))
    losses, _ = clipped_loss(
        "ppo", ratio, f32("policy"), f32("advantages"), low=LOW, high=HIGH, dual=DUAL
    )
    theirs = PEERS["trl"]["dr_grpo_with_an_empty_sequence"]["loss"]
    assert_same(jnp.sum(weights * losses), theirs * N / (N - 1))


# The critic


@pytest.mark.parametrize("peer", ["verl", "tunix"])
def test_the_value_loss_and_its_gradient(peer):
    weights = token_weights(MASK, MEAN)

    def loss(values):
        losses, is_clipped = clipped_value_loss(
            values, f32("old_values"), f32("returns"), VALUE_CLIP
        )
        return jnp.sum(weights * losses), jnp.sum(weights * is_clipped)

    (found, clipped), gradient = jax.value_and_grad(loss, has_aux=True)(f32("values"))
    expected = PEERS[peer]["value_loss"]
    assert_same(found, expected["loss"])
    assert_same(gradient, expected["gradient"])
    assert_same(clipped, PEERS["verl"]["value_loss"]["clipped"])
    assert 0.1 < clipped < 0.9


# Advantages


def estimated(estimator, **config):
    sequences = Sequences(
        rewards_N=GIVEN["rewards"],
        group_ids_N=INDEX,
        is_counted_N=np.ones(N, bool),
        masks=list(MASK),
        kl_penalties=list(np.where(MASK, GIVEN["penalties"], np.nan)),
        values=list(np.where(MASK, GIVEN["old_values"], np.nan)),
    )
    return estimate(AdvantageConfig(estimator=estimator, **config), sequences)


@pytest.mark.parametrize("estimator", ["group_zscore", "group_mean", "leave_one_out"])
def test_advantages_within_a_group(estimator):
    """verl's with KL penalties on the tokens, Tunix's of the rewards alone; the deviation of both
    is the sample's (n - 1)."""
    found = estimated(estimator, deviation="sample").advantages
    assert_same(np.array(found), PEERS["verl"][estimator])
    plain, is_degenerate = group_advantages(
        GIVEN["rewards"], INDEX, np.ones(N), estimator, "sample"
    )
    assert_same(plain, PEERS["tunix"][estimator])
    np.testing.assert_array_equal(is_degenerate, INDEX == INDEX[-1])


def unwhitened(peer):
    """What is whitened: returns - values, since returns are before whitening."""
    return np.array(PEERS[peer]["gae_returns"]) - GIVEN["old_values"]


@pytest.mark.parametrize("peer", ["verl", "tunix"])
def test_generalised_advantages_and_returns(peer):
    found = estimated("gae", gamma=GAMMA, lam=LAM, whiten=False)
    assert_same(np.array(found.advantages)[MASK], unwhitened(peer)[MASK])
    assert_same(np.array(found.returns)[MASK], np.array(PEERS[peer]["gae_returns"])[MASK])
    assert not np.array(found.advantages)[~MASK].any()


# Theirs divide by the square root of (the sample's variance + 1e-8), ours by the population's
# deviation.
SAMPLE_TO_POPULATION = np.sqrt(MASK.sum() / (MASK.sum() - 1))


@pytest.mark.parametrize("peer", ["verl", "tunix"])
def test_whitened_generalised_advantages(peer):
    found = np.array(estimated("gae", gamma=GAMMA, lam=LAM, whiten=True).advantages)
    expected = SAMPLE_TO_POPULATION * np.array(PEERS[peer]["gae"])
    assert_same(found[MASK], expected[MASK])
    assert not np.allclose(found[MASK], np.array(PEERS[peer]["gae"])[MASK], rtol=1e-3)


def test_whitened_rewards_to_go():
    found = np.array(estimated("global_zscore", gamma=GAMMA).advantages)
    assert_same(found, SAMPLE_TO_POPULATION * np.array(PEERS["verl"]["global_zscore"]))
