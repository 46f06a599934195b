"""Which groups an update takes, and what lengths do to rewards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.algorithms.selection import select_groups
from rl.algorithms.shaping import length_penalty, overlong_penalty
from rl.errors import MeshdialError

GROUPS = np.repeat(["d", "a", "c", "b"], 2)  # prompt order, which is not the alphabet's
REWARDS = np.array([1.0, 1, 0, 1, 0, 0, 1, 0])
COUNTED = np.ones(8, bool)


def used(found):
    return "".join(dict.fromkeys(GROUPS[found.is_used_N]))


def silenced(found):
    return "".join(dict.fromkeys(GROUPS[found.is_silenced_N]))


def test_the_first_groups_with_spread_in_prompt_order():
    found = select_groups(REWARDS, GROUPS, COUNTED, 1, needs_spread=True)
    assert (used(found), silenced(found)) == ("a", "")
    assert (found.num_eligible, found.num_filled, found.num_left_out) == (2, 0, 3)


def test_where_there_are_too_few_the_first_others_fill_up_without_a_signal():
    found = select_groups(REWARDS, GROUPS, COUNTED, 3, needs_spread=True)
    assert (used(found), silenced(found)) == ("dab", "d")
    assert (found.num_eligible, found.num_filled, found.num_left_out) == (2, 1, 1)


def test_without_a_wish_all_are_taken():
    found = select_groups(REWARDS, GROUPS, COUNTED, 4, needs_spread=False)
    assert (used(found), silenced(found)) == ("dacb", "")


def test_pass_rates():
    found = select_groups(REWARDS, GROUPS, COUNTED, 2, (0.1, 1.0), needs_spread=False)
    assert (used(found), silenced(found)) == ("da", "")
    found = select_groups(REWARDS, GROUPS, COUNTED, 2, (0.0, 0.4), needs_spread=False)
    assert (used(found), silenced(found)) == ("dc", "d")  # c passes, d fills up
    found = select_groups(REWARDS, GROUPS, COUNTED, 3, (0.5, 1.0), 0.0, needs_spread=False)
    assert used(found) == "dac"


def test_what_was_not_scored_is_no_spread():
    counted = COUNTED.copy()
    counted[2] = False  # the 0 of group a
    found = select_groups(REWARDS, GROUPS, counted, 1, needs_spread=True)
    assert used(found) == "b"


@given(
    st.lists(
        st.lists(st.sampled_from([0, 1, None]), min_size=2, max_size=2), min_size=1, max_size=6
    ),
    st.integers(1, 6),
    st.booleans(),
)
def test_a_batch_has_as_many_groups_as_wanted(groups, num_wanted, needs_spread):
    num_wanted = min(num_wanted, len(groups))
    rewards = np.array([np.nan if r is None else r for group in groups for r in group])
    ids = np.repeat(np.arange(len(groups))[::-1], 2)
    found = select_groups(rewards, ids, ~np.isnan(rewards), num_wanted, needs_spread=needs_spread)
    assert found.is_used_N.sum() == 2 * num_wanted
    assert found.is_silenced_N.sum() == 2 * found.num_filled
    assert not (found.is_silenced_N & ~found.is_used_N).any()
    with_signal = [set(group) == {0, 1} for group in groups]
    if needs_spread:
        expected = np.flatnonzero(with_signal)[:num_wanted]
        trained = (found.is_used_N & ~found.is_silenced_N)[::2]
        np.testing.assert_array_equal(np.flatnonzero(trained), expected)
        assert found.num_eligible == sum(with_signal)
    else:
        np.testing.assert_array_equal(np.flatnonzero(found.is_used_N[::2]), range(num_wanted))


def test_too_few_groups_are_refused():
    with pytest.raises(MeshdialError, match="4 groups, expected at least 5"):
        select_groups(REWARDS, GROUPS, COUNTED, 5, needs_spread=True)


def test_overlong_penalty():
    # DAPO's equation 13 with a limit of 20 and a buffer of 4.
    found = overlong_penalty([1, 16, 17, 18, 20], 20, 4, 1.0)
    np.testing.assert_allclose(found, [0, 0, -0.25, -0.5, -1.0])
    np.testing.assert_array_equal(overlong_penalty([1, 20], 20, 0, 1.0), [0, 0])


def test_length_penalty_by_tokens():
    found = length_penalty("tokens", 0.5, [2, 8], 8, ["a", "a"], [True, True], [True, True])
    np.testing.assert_allclose(found, [-0.125, -0.5])


def test_length_penalty_within_a_group():
    # lengths 2, 4, 6: 1/2, 0, -1/2; a wrong answer has no bonus. The unscored 100 does not count.
    found = length_penalty(
        *("group", 2.0, [2, 4, 6, 2, 100], 200, ["a"] * 5),
        *([True, True, True, False, True], [True, True, True, True, False]),
    )
    np.testing.assert_allclose(found, [1.0, 0.0, -1.0, 0.0, 0.0])
    equal = length_penalty("group", 2.0, [3, 3], 9, ["a", "a"], [True, False], [True, True])
    np.testing.assert_array_equal(equal, [0, 0])
