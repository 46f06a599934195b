"""Advantages of tokens, by numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rl.algorithms.estimators import (
    AdvantageConfig,
    Sequences,
    estimate,
    generalised_advantages,
)


def sequences(rewards, masks, is_counted=None, groups=None, penalties=None, values=None):
    N = len(rewards)
    return Sequences(
        rewards_N=np.array(rewards),
        group_ids_N=np.array(groups or ["g"] * N),
        is_counted_N=np.array([True] * N if is_counted is None else is_counted),
        masks=[np.array(mask, bool) for mask in masks],
        kl_penalties=penalties and [np.array(p) for p in penalties],
        values=values and [np.array(v) for v in values],
    )


def config(estimator, **numbers):
    return AdvantageConfig(estimator=estimator, **numbers)


def test_generalised_advantages():
    # gamma 0.5, lambda 0.5; deltas: 0 + .5*2 - 1 = 0, 0 + .5*4 - 2 = 0, 8 + 0 - 4 = 4.
    found = generalised_advantages(np.array([0.0, 0, 8]), np.array([1.0, 2, 4]), 0.5, 0.5)
    np.testing.assert_allclose(found, [4 * 0.0625, 4 * 0.25, 4.0])


def test_lambda_one_is_the_return_minus_the_value_and_lambda_zero_one_step():
    rewards, values = np.array([1.0, 2, 3]), np.array([0.5, 0.25, 4])
    to_go = np.array([1 + 0.9 * 2 + 0.81 * 3, 2 + 0.9 * 3, 3])
    np.testing.assert_allclose(generalised_advantages(rewards, values, 0.9, 1.0), to_go - values)
    one = rewards + 0.9 * np.array([0.25, 4, 0]) - values
    np.testing.assert_allclose(generalised_advantages(rewards, values, 0.9, 0.0), one)


def test_gae_goes_over_the_policys_own_tokens_alone():
    nan = np.nan
    found = estimate(
        config("gae", gamma=1.0, lam=1.0, whiten=False),
        sequences(
            [2],  # a whole number is a reward like any other
            [[True, False, True]],
            penalties=[[0.25, nan, 0.5]],
            values=[[1.0, nan, 0.5]],
        ),
    )
    # Token rewards -0.25 and 2 - 0.5; to go 1.25 and 1.5.
    np.testing.assert_allclose(found.advantages[0], [0.25, 0.0, 1.0])
    np.testing.assert_allclose(found.returns[0], [1.25, 0.0, 1.5])
    assert found.advantages[0].dtype == found.returns[0].dtype == np.float32


def test_whitening_is_over_the_counted_tokens_of_the_batch_and_leaves_returns_alone():
    found = estimate(
        config("gae", gamma=1.0, lam=1.0),
        sequences(
            [1.0, 4.0, 100.0],
            [[True], [True, True, False], [True]],
            is_counted=[True, True, False],
            values=[[0.0], [0.0, 0.0, 9.0], [0.0]],
        ),
    )
    deviation = np.sqrt(2)  # of 1, 4, 4 around 3
    np.testing.assert_allclose(found.advantages[0], [-2 / deviation], rtol=1e-6)
    np.testing.assert_allclose(found.advantages[1], [1 / deviation, 1 / deviation, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(found.advantages[2], [0.0])
    np.testing.assert_allclose(found.returns[1], [4.0, 4.0, 0.0])
    assert found.returns[2] is None


def test_a_reward_of_zero_counts():
    found = estimate(
        config("gae", gamma=1.0, lam=1.0, whiten=False), sequences([0.0], [[True]], values=[[0.5]])
    )
    np.testing.assert_allclose(found.advantages[0], [-0.5])
    np.testing.assert_allclose(found.returns[0], [0.0])


def test_a_fraction_of_a_reward_stays_one():
    parts = [0.75, -0.25], [[True], [True]]
    found = estimate(config("gae", whiten=False), sequences(*parts, values=[[0.5], [0.5]]))
    np.testing.assert_allclose(found.advantages, [[0.25], [-0.75]])
    found = estimate(config("global_zscore"), sequences([0.75, 0.25, 0.5], [[True]] * 3))
    np.testing.assert_allclose(found.advantages, [[1.5**0.5], [-(1.5**0.5)], [0.0]], atol=1e-6)


def test_global_zscore_is_the_whitened_reward_to_go():
    found = estimate(
        config("global_zscore", gamma=1.0),
        sequences([1.0, 0.0], [[True, True], [True]], penalties=[[0.5, 0.25], [0.125]]),
    )
    to_go = np.array([1 - 0.75, 1 - 0.25, -0.125])
    expected = (to_go - to_go.mean()) / to_go.std()
    np.testing.assert_allclose(np.concatenate(found.advantages), expected, rtol=1e-6)
    assert found.returns is None


def test_global_zscore_discounts_the_terminal_reward():
    found = estimate(config("global_zscore", gamma=0.5), sequences([4.0], [[True] * 3]))
    to_go = np.array([1.0, 2.0, 4.0])
    expected = (to_go - to_go.mean()) / to_go.std()
    np.testing.assert_allclose(found.advantages[0], expected, rtol=1e-6)


def test_a_group_estimator_gives_every_own_token_its_sequences_advantage():
    found = estimate(
        config("group_mean"),
        sequences(
            [1.0, 0.0], [[True, False, True], [True]], penalties=[[0.25, np.nan, 0.25], [0.0]]
        ),
    )
    np.testing.assert_allclose(found.advantages[0], [0.25, 0.0, 0.25])
    np.testing.assert_allclose(found.advantages[1], [-0.25])
    assert not found.is_degenerate_N.any()


@pytest.mark.parametrize(
    "estimator", ["group_zscore", "group_mean", "leave_one_out", "global_zscore"]
)
def test_equal_rewards_give_exactly_nothing(estimator):
    found = estimate(config(estimator), sequences([0.3] * 3, [[True] * 2] * 3))
    assert all((advantage == 0).all() for advantage in found.advantages)


@given(arrays(float, 5, elements=st.floats(-3, 3)), st.floats(0.1, 1), st.floats(0, 1))
def test_gae_of_exact_values_is_nothing(rewards, gamma, lam):
    to_go = np.zeros(6)
    for t in reversed(range(5)):
        to_go[t] = rewards[t] + gamma * to_go[t + 1]
    found = generalised_advantages(rewards, to_go[:5], gamma, lam)
    np.testing.assert_allclose(found, 0, atol=1e-12)


ALL = ["group_zscore", "group_mean", "leave_one_out", "global_zscore", "gae"]
sample = st.tuples(
    st.sampled_from([0, 1, 2]),  # reward
    st.booleans(),  # whether it counts
    st.sampled_from("ab"),  # group
    st.lists(st.booleans(), min_size=1, max_size=4),  # mask
)


def drawn(samples, elsewhere, uncounted):
    """Their sequences; `elsewhere` stands outside the masks, `uncounted` where no reward counts."""
    rewards, counts, groups, masks = zip(*samples, strict=True)
    inside = [np.arange(1.0, 1 + len(mask)) / 8 for mask in masks]
    lists = [np.where(mask, x, elsewhere) for x, mask in zip(inside, masks, strict=True)]
    rewards = [r if c else uncounted for r, c in zip(rewards, counts, strict=True)]
    return sequences(rewards, masks, counts, groups, lists, [-x for x in lists])


@pytest.mark.parametrize("estimator", ALL)
@given(st.lists(sample, min_size=1, max_size=6))
def test_what_is_masked_or_does_not_count_changes_nothing_and_gets_nothing(estimator, samples):
    clean = estimate(config(estimator), drawn(samples, 0.0, 0.0))
    dirty = estimate(config(estimator), drawn(samples, np.nan, np.nan))
    for place, (_, counts, _, mask) in enumerate(samples):
        found = dirty.advantages[place]
        np.testing.assert_array_equal(found, clean.advantages[place])
        assert not found[~(np.array(mask) & counts)].any()
        if estimator == "gae":
            assert (dirty.returns[place] is not None) == counts
            if counts:
                np.testing.assert_array_equal(dirty.returns[place], clean.returns[place])
    np.testing.assert_array_equal(dirty.is_degenerate_N, clean.is_degenerate_N)


@pytest.mark.parametrize("estimator", ALL)
def test_whole_numbers_are_rewards_like_their_floats(estimator):
    masks, groups = [[True, True]] * 4, list("aabb")
    parts = {"penalties": [[0.125, 0.25]] * 4, "values": [[0.5, 0.75]] * 4}
    whole = sequences(np.array([0, 3, 1, 2]), masks, groups=groups, **parts)
    floats = sequences(np.array([0.0, 3.0, 1.0, 2.0]), masks, groups=groups, **parts)
    found, expected = (estimate(config(estimator), given) for given in (whole, floats))
    np.testing.assert_array_equal(found.advantages, expected.advantages)
    assert np.abs(found.advantages).min() > 0.1


@pytest.mark.parametrize("estimator", ALL)
def test_no_sample_that_counts_is_no_signal(estimator):
    given = sequences([1.0, 2.0], [[True]] * 2, [False] * 2, values=[[1.0], [2.0]])
    found = estimate(config(estimator), given)
    np.testing.assert_array_equal(found.advantages, [[0.0], [0.0]])
