import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.algorithms.advantages import group_advantages
from rl.errors import MeshdialError

REWARDS = [1.0, 0.0, 0.0, 1.0, 3.0, 1.0]
GROUPS = ["a", "a", "a", "a", "b", "b"]
ALL_SCORED = [True] * 6


ESTIMATORS = [
    ("group_zscore", "population"),
    ("group_zscore", "sample"),
    ("group_mean",),
    ("leave_one_out",),
]
A, B = np.sqrt(0.75), np.sqrt(0.5)


@pytest.mark.parametrize(
    ("estimator", "deviation", "expected"),
    [
        # Group a: mean 1/2, squares 4 * 1/4; group b: mean 2, squares 2 * 1.
        ("group_zscore", "population", [1.0, -1.0, -1.0, 1.0, 1.0, -1.0]),
        ("group_zscore", "sample", [A, -A, -A, A, B, -B]),
        ("group_mean", "population", [0.5, -0.5, -0.5, 0.5, 1.0, -1.0]),
        # The others of a: 1/3 for a 1, 2/3 for a 0; of b: 1 and 3.
        ("leave_one_out", "population", [2 / 3, -2 / 3, -2 / 3, 2 / 3, 2.0, -2.0]),
    ],
)
def test_values(estimator, deviation, expected):
    advantages, is_degenerate = group_advantages(
        REWARDS, GROUPS, ALL_SCORED, estimator, deviation, epsilon=0.0
    )
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    assert advantages.dtype == np.float32
    assert not is_degenerate.any()


def test_epsilon_is_added_to_the_deviation():
    advantages, _ = group_advantages([0.0, 1.0], [7, 7], [True, True], epsilon=0.5)
    np.testing.assert_allclose(advantages, [-0.5, 0.5], rtol=1e-6)  # 1/2 / (1/2 + 1/2)


def test_groups_need_not_be_contiguous():
    advantages, _ = group_advantages([0, 0, 2, 4], ["x", "y", "x", "y"], [True] * 4, "group_mean")
    np.testing.assert_array_equal(advantages, [-1, -2, 1, 2])


def test_leave_one_out_leaves_out_what_is_not_scored():
    advantages, _ = group_advantages(
        [1.0, 4.0, np.inf], [0, 0, 0], [True, True, False], "leave_one_out"
    )
    np.testing.assert_allclose(advantages, [-3, 3, 0])


def test_unscored_samples_count_in_neither_mean_nor_deviation():
    rewards = [0.0, np.nan, 1.0, 100.0]
    advantages, is_degenerate = group_advantages(
        rewards, [0, 0, 0, 0], [True, False, True, False], epsilon=0.0
    )
    np.testing.assert_allclose(advantages, [-1, 0, 1, 0])
    assert not is_degenerate.any()


@pytest.mark.parametrize("scored", [[False, False], [True, False]])
def test_a_group_with_fewer_than_two_scores_is_degenerate(scored):
    for estimator in ESTIMATORS:
        advantages, is_degenerate = group_advantages([5.0, 9.0], [1, 1], scored, *estimator)
        np.testing.assert_array_equal(advantages, [0, 0])
        assert is_degenerate.all()


def test_rounding_is_no_spread_but_a_small_difference_is():
    advantages, is_degenerate = group_advantages(
        [0.1 + 0.2, 0.3, 0.1 + 0.2 - 0.3, 0.0, 1.0, 1.0 + 1e-6],
        [0, 0, 1, 1, 2, 2],
        ALL_SCORED,
        epsilon=0.0,
    )
    np.testing.assert_array_equal(is_degenerate, [True, True, True, True, False, False])
    np.testing.assert_array_equal(advantages[:4], 0.0)
    np.testing.assert_allclose(advantages[4:], [-1, 1], rtol=1e-6)


def test_a_scored_reward_that_is_not_finite_is_refused():
    with pytest.raises(MeshdialError, match="sample 1 is nan"):
        group_advantages([0.0, np.nan], [0, 0], [True, True])


finite = st.floats(-1e6, 1e6)


@given(finite, st.integers(1, 9), st.sampled_from(ESTIMATORS))
def test_equal_rewards_give_exactly_zero(reward, size, estimator):
    advantages, is_degenerate = group_advantages(
        [reward] * size, ["g"] * size, [True] * size, *estimator
    )
    assert (advantages == 0).all()
    assert is_degenerate.all()


@given(st.lists(st.tuples(finite, st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_scored_advantages_of_a_group_sum_to_zero_and_have_deviation_one(samples):
    rewards, groups, scored = map(np.array, zip(*samples, strict=True))
    advantages, is_degenerate = group_advantages(rewards, groups, scored, epsilon=0.0)
    assert (advantages[~scored] == 0).all()
    for group in np.unique(groups):
        member = (groups == group) & scored
        assert len(np.unique(is_degenerate[groups == group])) == 1
        if not is_degenerate[groups == group][0]:
            assert abs(advantages[member].mean()) < 1e-5
            assert abs(advantages[member].std() - 1) < 1e-5
            assert (np.diff(advantages[member][np.argsort(rewards[member])]) >= 0).all()
