import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.algorithms.aggregation import token_weights

# Three sequences of 3, 1 and 0 tokens.
MASK = np.array([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
KINDS = ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum-norm"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token-mean", [[1 / 4, 1 / 4, 1 / 4, 0], [0, 1 / 4, 0, 0], [0] * 4]),
        ("sequence-mean-token-mean", [[1 / 6, 1 / 6, 1 / 6, 0], [0, 1 / 2, 0, 0], [0] * 4]),
        ("sequence-mean-token-sum-norm", [[1 / 10, 1 / 10, 1 / 10, 0], [0, 1 / 10, 0, 0], [0] * 4]),
    ],
)
def test_values(kind, expected):
    weights = token_weights(MASK, kind, max_tokens=5)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(token_weights(MASK[None], kind, max_tokens=5), weights[None])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_train_on_weighs_nothing(kind):
    np.testing.assert_array_equal(token_weights(np.zeros((2, 3), bool), kind, max_tokens=5), 0.0)


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=6))
def test_means_have_weights_that_sum_to_one_and_only_inside_the_mask(rows):
    mask = np.array(rows)
    for kind in KINDS:
        weights = token_weights(mask, kind, max_tokens=4)
        np.testing.assert_array_equal(weights > 0, mask)
        if mask.any() and kind != "sequence-mean-token-sum-norm":
            np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-6)


def test_the_norm_needs_a_length():
    with pytest.raises(ValueError, match="max_tokens"):
        token_weights(MASK, "sequence-mean-token-sum-norm")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="median"):
        token_weights(MASK, "median")
