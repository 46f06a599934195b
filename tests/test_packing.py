"""Completions in bins and micro-batches: each token once, within the budget, in few shapes."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.learner.packing import Shape, bin_size, bucket_length, divide, first_fit


def uniform(num_groups, group_size, length, prompt=9, budget=10**6, **options):
    """Shape and parts of a batch in which every completion is needed and as long."""
    is_needed = np.ones((num_groups, group_size), bool)
    lengths = np.full(is_needed.shape, length)
    return divide(is_needed, lengths, np.full(num_groups, prompt), budget, **options)


# Bins


def test_the_longest_go_first_into_the_first_bin_with_room():
    assert first_fit([2, 7, 0, 3, 5, 1], 8) == [[1, 5], [4, 3], [0]]


@given(st.lists(st.integers(0, 20), max_size=40), st.integers(20, 60))
def test_bins_hold_everything_once_and_overflow_nowhere(lengths, size):
    bins = first_fit(lengths, size)
    members = sorted(member for members in bins for member in members)
    assert members == [m for m, length in enumerate(lengths) if length]
    fills = [sum(lengths[m] for m in members) for members in bins]
    assert all(fill <= size for fill in fills)
    # Any two bins together would overflow, or the later one's members were put into the first.
    assert all(a + b > size for a, b in itertools.pairwise(fills))


def test_a_bin_holds_any_group_of_few_and_short_completions():
    for lengths in ([5] * 8, [1] * 8, [3, 5, 0, 0, 1, 2, 4, 4]):
        assert bin_size(np.array([lengths]), 5) == 40
    shape, parts = uniform(8, 8, 4, prompt=55, budget=2048, num_shared=48, max_tokens=5)
    assert shape == Shape(8, 1, 40, 56, 48) and len(parts) == 1
    assert shape.num_tokens == 48 + 8 * (8 + 40)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "size"),
    [
        ([3] * 40, None, 64),
        ([9, 2], None, 12),
        ([3, 2], None, 8),
        ([65, 1], None, 96),
        ([97], None, 128),
        ([129], None, 192),
        ([5] * 20, 5, 60),  # twelve of the longest
        ([5], 5, 5),
        ([40] * 3, 48, 48),
        ([90], 100, 96),
        ([97], 100, 100),
        ([700], 768, 768),
    ],
)
def test_a_bin_is_as_long_as_the_longest_or_holds_several(lengths, max_tokens, size):
    assert bin_size(np.array([lengths]), max_tokens) == size


@given(st.integers(1, 5000))
@settings(max_examples=200)
def test_bucketed_lengths_are_few_and_close(length):
    bucket = bucket_length(length)
    assert bucket % 8 == 0
    assert length <= bucket < max(length * 1.25, length + 8)
    assert bucket_length(bucket) == bucket
    assert len({bucket_length(n) for n in range(65, 1025)}) == 16


# Micro-batches


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 2000), st.integers(1, 3), st.data())
@settings(max_examples=150, deadline=None)
def test_every_needed_token_stands_in_one_place(P, G, budget, num_shards, draw):
    lengths = np.array(
        draw.draw(st.lists(st.integers(0, 150), min_size=P * G, max_size=P * G))
    ).reshape(P, G)
    needed = np.array(draw.draw(st.lists(st.booleans(), min_size=P * G, max_size=P * G)))
    needed = needed.reshape(P, G)
    prompts = np.array(draw.draw(st.lists(st.integers(17, 90), min_size=P, max_size=P)))
    num_shared = draw.draw(st.sampled_from([0, 16]))
    shape, parts = divide(
        needed, lengths, prompts, budget, num_shared=num_shared, num_shards=num_shards
    )
    places = (shape.num_prompts, shape.num_bins, shape.bin_size)
    count = np.zeros((P, G, 150), int)
    for part in parts:
        assert part.token_PBT.shape == part.member_PBT.shape == part.is_real_PBT.shape == places
        prompt_PBT = np.broadcast_to(part.prompt_P[:, None, None], places)
        real = part.is_real_PBT
        np.add.at(count, (prompt_PBT[real], part.member_PBT[real], part.token_PBT[real]), 1)
        for member_T, token_T, real_T in zip(
            *(x.reshape(-1, shape.bin_size) for x in (part.member_PBT, part.token_PBT, real)),
            strict=True,
        ):
            # A completion stands in one piece, its tokens in order from 0.
            starts = np.flatnonzero((token_T == 0) & real_T)
            assert len(set(member_T[starts])) == len(starts)
            goes_on = real_T[1:] & (token_T[1:] > 0)
            assert (np.diff(token_T)[goes_on] == 1).all()
            assert (np.diff(member_T)[goes_on] == 0).all()
    expected = (np.arange(150) < lengths[:, :, None]) & needed[:, :, None]
    np.testing.assert_array_equal(count, expected)
    assert shape.num_tokens <= budget or (shape.num_prompts, shape.num_bins) == (1, 1)
    assert shape.prompt_size >= prompts.max() - 1
    assert bool(parts) == bool(expected.any())


def test_the_tokens_of_a_shape_count_each_prompt_once_and_padding():
    # 16 shared, and for each of 3 prompts 40 - 16 more and 2 bins of 64.
    assert Shape(3, 2, 64, 40, 16).num_tokens == 16 + 3 * (24 + 2 * 64)


def test_what_fits_into_the_budget_goes_at_once():
    shape, parts = uniform(8, 4, 64)
    assert shape == Shape(8, 4, 64, 8, 0)
    assert [part.is_real_PBT.all() for part in parts] == [True]


def test_a_group_is_cut_where_it_does_not_fit():
    # A row of four bins takes 8 + 4 x 64 tokens, of two 8 + 2 x 64.
    shape, parts = uniform(1, 8, 64, budget=270)
    assert (shape.num_prompts, shape.num_bins, len(parts)) == (1, 4, 2)
    shape, parts = uniform(1, 8, 64, budget=140)
    assert (shape.num_prompts, shape.num_bins, len(parts)) == (1, 2, 4)
    assert [part.prompt_P.tolist() for part in parts] == [[0]] * 4


def test_a_completion_beyond_the_budget_runs_alone():
    shape, parts = uniform(2, 2, 500, prompt=300, budget=100)
    assert (shape.num_prompts, shape.num_bins, len(parts)) == (1, 1, 4)


def test_row_shards_share_the_rows():
    assert uniform(8, 1, 64, num_shards=1)[0].num_prompts == 8
    assert uniform(8, 1, 64, num_shards=4)[0].num_prompts == 2


def test_what_all_prompts_share_is_left_out_of_their_padding():
    shape, _ = uniform(4, 2, 64, prompt=305, num_shared=288)
    assert (shape.prompt_size, shape.num_shared) == (288 + 16, 288)
    assert shape.num_tokens == 288 + 4 * (16 + 2 * 64)


def test_nothing_needed_is_no_micro_batch():
    nothing = np.zeros((2, 3), bool)
    _, parts = divide(nothing, np.full((2, 3), 5), np.array([4, 4]), 1000)
    assert parts == []


@pytest.mark.parametrize("budget", [2048, 8192])
@pytest.mark.parametrize(
    ("group", "mean", "longest", "prompts"),
    [
        ((8, 8), 48, 128, (64, 128)),
        ((8, 8), 3, 12, (4, 9)),
        ((8, 16), 200, 1024, (100, 300)),
        ((32, 8), 1000, 64, (40, 64)),
        ((16, 16), 100, 512, (50, 60)),
    ],
)
def test_a_run_has_few_shapes_that_are_well_filled(group, mean, longest, prompts, budget):
    """Sixty iterations of geometric lengths, their mean doubling; 30% of groups are skipped."""
    rng = np.random.default_rng(0)
    shapes, computed, padded = set(), 0, 0
    for iteration in range(60):
        probability = 1 / (mean * (1 + iteration / 60))
        lengths = np.minimum(rng.geometric(probability, group), longest)
        prompt_lengths = rng.integers(*prompts, group[0])
        needed = np.broadcast_to(rng.random(group[0])[:, None] > 0.3, group)
        shape, parts = divide(needed, lengths, prompt_lengths, budget, max_tokens=longest)
        shapes.add(shape)
        computed += len(parts) * shape.num_tokens
        padded += needed.sum() * (lengths[needed].max() + prompt_lengths.max())
    assert len(shapes) <= 16
    assert computed < 0.75 * padded
