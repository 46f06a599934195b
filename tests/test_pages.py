"""Pages: who holds them, when they are free, and how a prompt's are found again."""

import pytest

from rl.rollout.pages import TRASH, Pages, num_pages_for


def test_a_page_is_free_when_nobody_holds_it():
    pages = Pages(6, 4)
    taken = pages.take(3)
    assert len(set(taken)) == 3 and TRASH not in taken
    assert (pages.num_free, pages.num_held) == (2, 3)
    pages.hold(taken[:1])
    pages.release(taken)
    assert (pages.num_free, pages.num_held) == (4, 1)
    pages.release(taken[:1])
    assert (pages.num_free, pages.num_held, pages.peak) == (5, 0, 3)


def test_more_than_there_are_is_an_error():
    with pytest.raises(IndexError):
        Pages(3, 4).take(3)


def test_what_is_free_can_be_neither_held_nor_released():
    pages = Pages(4, 4)
    taken = pages.take(1)
    pages.release(taken)
    with pytest.raises(AssertionError, match="is free"):
        pages.hold(taken)
    with pytest.raises(AssertionError, match="is free already"):
        pages.release(taken)


def test_full_pages_are_found_by_all_the_tokens_up_to_their_end():
    pages = Pages(9, 2)
    first = pages.take(3)
    pages.name(first, [1, 2, 3, 4, 5, 6])
    assert pages.find([1, 2, 3, 4, 5, 6, 7]) == first
    assert pages.find([1, 2, 3, 4, 9, 9]) == first[:2]
    assert pages.find([1, 2, 3]) == first[:1]
    assert pages.find([3, 4]) == []  # the same tokens, but not after 1 and 2
    assert pages.find([1]) == []


def test_a_freed_page_is_not_found_even_when_it_is_taken_again():
    pages = Pages(3, 2)
    first = pages.take(2)
    pages.name(first, [1, 2, 3, 4])
    pages.release(first)
    assert pages.find([1, 2, 3, 4]) == []
    again = pages.take(2)
    assert pages.find([1, 2, 3, 4]) == []
    pages.name(again, [1, 2, 3, 5])
    assert pages.find([1, 2, 3, 5]) == again


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_pages_for_tokens(tokens, count):
    assert num_pages_for(tokens, 4) == count
