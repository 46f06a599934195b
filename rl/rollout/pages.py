"""The pages of a KV cache: who holds them, and which prompts' tokens they already have.

A page has room for the keys and values of `page_size` tokens, in every layer. It is free when
nobody holds it. Full pages of prompts are found again by their content, so that whoever begins with
the same tokens shares them.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rl.errors import MeshdialError
from rl.rollout.shapes import rounded_up

TRASH = 0
"""The page that nobody holds: what is written to it is never read."""

Content = tuple[int, tuple[int, ...]]
"""The page before (TRASH for none) and this page's tokens: all the tokens up to its end."""


class Pages:
    """Reference-counted pages 1 to num_pages - 1."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self.peak = 0
        self._free = deque(range(1, num_pages))
        self._num_holders = [0] * num_pages
        self._page_of: dict[Content, int] = {}
        self._content_of: dict[int, Content] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_pages - 1 - self.num_free

    def take(self, count: int) -> list[int]:
        """So many free pages, each held once. IndexError if there are fewer: ask `num_free`."""
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._num_holders[page] = 1
        self.peak = max(self.peak, self.num_held)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Hold pages once more that somebody already holds."""
        for page in pages:
            assert self._num_holders[page] > 0, f"page {page} is free"
            self._num_holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Undo one `take` or `hold` of each page."""
        for page in reversed(pages):
            assert self._num_holders[page] > 0, f"page {page} is free already"
            self._num_holders[page] -= 1
            if not self._num_holders[page]:
                self._page_of.pop(self._content_of.pop(page, None), None)
                self._free.append(page)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The pages there are of the full pages that `tokens` begin with."""
        found: list[int] = []
        for content in self._split(tokens):
            page = self._page_of.get((found[-1] if found else TRASH, content))
            if page is None:
                break
            found.append(page)
        return found

    def name(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Say that `pages`, all full, are those of the first of `tokens`."""
        before = TRASH
        for page, content in zip(pages, self._split(tokens), strict=False):
            self._page_of[before, content] = page
            self._content_of[page] = before, content
            before = page

    def _split(self, tokens: Sequence[int]) -> Iterable[tuple[int, ...]]:
        size = self.page_size
        ends = range(size, len(tokens) + 1, size)
        return (tuple(tokens[end - size : end]) for end in ends)


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """How many pages hold so many tokens."""
    return -(-num_tokens // page_size)


@dataclass(frozen=True)
class Demand:
    """What one replica is asked to sample: the lengths are the longest, in tokens."""

    prompt_length: int
    max_tokens: int
    num_prompts: int
    group_size: int
    max_rows: int

    @property
    def num_rows(self) -> int:
        """Samples that run at once."""
        return min(self.max_rows, self.num_prompts * self.group_size)

    @property
    def num_open_prompts(self) -> int:
        """Prompts whose samples run at once: twice what would be, if groups ended together."""
        return min(self.num_prompts, 2 * -(-self.num_rows // self.group_size))

    def num_pages(self, page_size: int) -> int:
        """Pages, TRASH too, that let every row run: those of prompts and of each sample's own
        tokens, and some to spare for what is admitted. In few sizes, as a pool's size is one of
        every program's."""
        of_prompt = num_pages_for(self.prompt_length, page_size) + 1
        of_sample = num_pages_for(self.max_tokens + page_size, page_size)
        num_rows = self.num_rows
        num_pages = self.num_open_prompts * of_prompt + num_rows * of_sample + num_rows + 1
        return rounded_up(num_pages, 8, 8)


def pages_within(
    budget: int, whose: str, page_bytes: int, wanted: int, num_tokens: int, page_size: int
) -> int:
    """As many of the `wanted` pages as `budget` bytes hold; MeshdialError, naming `whose` the
    budget is, where a sample of so many tokens could not run alone on them."""
    # The trash page and a prompt's last page too.
    least = num_pages_for(num_tokens, page_size) + 2
    num_pages = min(max(wanted, least), budget // page_bytes)
    if num_pages < least:
        raise MeshdialError(
            f"{whose} allows {budget / 2**20:.4g} MiB for the KV cache, and a sample of "
            f"{num_tokens} tokens needs {least * page_bytes / 2**20:.4g} MiB"
        )
    return num_pages
