"""Which samples decode now: pages and slots of one replica of the model.

1. `reserve` finds pages for what every running sample appends next; when there are none left, the
   youngest goes back to wait, with the tokens it has.
2. `admit` fills free slots from the front of the queue as far as pages reach, and says what must be
   computed for that: the missing pages of prompts, copies of a prompt's last page, first tokens.
3. After the tokens of a dispatch, `retire` lets finished samples go.

Cached are a prompt and all tokens of a sample but the last, which decodes next.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rl.rollout.completion import Row
from rl.rollout.pages import Pages, num_pages_for


@dataclass(eq=False)
class Prompt:
    """A prompt, and what of it is kept for its group's samples that are still to come."""

    tokens: Sequence[int]
    number: int  # names it for the random numbers
    num_to_come: int
    full_pages: list[int] | None = None
    last_page: int | None = None  # its tokens after the last full page; each sample has a copy
    hidden_D: np.ndarray | None = None  # of its last token, from which first tokens are drawn


@dataclass(eq=False)
class Sample:
    """One completion in the making."""

    prompt: Prompt
    index: int  # in its group
    row: Row
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0  # of its first pages: full pages of the prompt
    since: float | None = None  # when it was first admitted, seconds

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt.tokens, *self.row.tokens]

    @property
    def position(self) -> int:
        """Of the token that decodes next, and how many are in the cache."""
        return len(self.prompt.tokens) + max(len(self.row.tokens) - 1, 0)

    @property
    def num_left(self) -> int:
        return self.row.max_tokens - len(self.row.tokens)


@dataclass(frozen=True)
class Chunk:
    """Tokens whose keys and values are to be computed, and the pages of all tokens up to them."""

    tokens: Sequence[int]
    position: int  # of the first
    pages: Sequence[int]
    prompt: Prompt | None = None  # which ends with this chunk's last token


@dataclass
class Admitted:
    """What newly admitted samples need before they decode: the chunks in order, then the copies,
    then a first token for the samples that have none."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # from page, to page
    samples: list[Sample] = field(default_factory=list)


class Scheduler:
    """The samples of one replica, waiting and running."""

    def __init__(self, pages: Pages, max_rows: int):
        self.pages = pages
        self.max_rows = max_rows
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []  # in the order of admission
        self.num_preempted = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def reserve(self, num_steps: int) -> None:
        """Pages for the next `num_steps` tokens of every running sample, the oldest first."""
        number = 0
        while number < len(self.running):
            sample = self.running[number]
            missing = self._num_pages(sample, num_steps) - len(sample.pages)
            if missing > self.pages.num_free:
                self._drop_kept()
            while missing > self.pages.num_free and len(self.running) > number + 1:
                self._preempt(self.running[-1])
            if missing > self.pages.num_free:
                self._preempt(sample)  # it is the youngest itself
                return
            sample.pages += self.pages.take(max(missing, 0))
            number += 1

    def admit(self, num_steps: int) -> Admitted:
        admitted = Admitted()
        while self.waiting and len(self.running) < self.max_rows:
            if not self._fits(self.waiting[0], num_steps):
                if self.running:
                    break
                self._drop_kept()
                assert self._fits(self.waiting[0], num_steps), "the pool holds no single sample"
            sample = self.waiting.popleft()
            start = self._resume if sample.row.tokens else self._begin
            start(sample, num_steps, admitted)
            self.running.append(sample)
        return admitted

    def retire(self) -> list[Sample]:
        """The samples that have ended; their pages are free."""
        ended = [s for s in (*self.running, *self.waiting) if s.row.finish_reason]
        self.running = [sample for sample in self.running if not sample.row.finish_reason]
        if any(sample.row.finish_reason for sample in self.waiting):
            self.waiting = deque(s for s in self.waiting if not s.row.finish_reason)
        for sample in ended:
            self._release(sample)
        return ended

    def close(self) -> None:
        """Let go of everything."""
        for sample in (*self.running, *self.waiting):
            self._release(sample)
            self._let_go(sample.prompt)
        self.running.clear()
        self.waiting.clear()

    # Admission

    def _fits(self, sample: Sample, num_steps: int) -> bool:
        """Whether pages reach, with one to spare for every other running sample."""
        needed = self._num_pages(sample, num_steps) - len(self._there(sample.prompt))
        needs_last_page = not sample.row.tokens and sample.prompt.last_page is None
        return needed + needs_last_page + len(self.running) <= self.pages.num_free

    def _begin(self, sample: Sample, num_steps: int, admitted: Admitted) -> None:
        prompt = sample.prompt
        prompt.num_to_come -= 1
        if prompt.full_pages is None:
            self._compute_prompt(prompt, admitted)
        self.pages.hold(prompt.full_pages)
        sample.pages, sample.num_shared = list(prompt.full_pages), len(prompt.full_pages)
        self._give_last_page(sample, admitted)
        self._fill_up(sample, num_steps)
        if not prompt.num_to_come:
            self._let_go(prompt)
        admitted.samples.append(sample)

    def _compute_prompt(self, prompt: Prompt, admitted: Admitted) -> None:
        """Pages for a prompt, and what of them is not there yet: its last token at least, unless
        its hidden state is known."""
        prompt.full_pages, num_there = self._take_full_pages(prompt)
        pages, start = list(prompt.full_pages), num_there * self.pages.page_size
        if len(prompt.tokens) % self.pages.page_size:
            (prompt.last_page,) = self.pages.take(1)
            pages.append(prompt.last_page)
        if start < len(prompt.tokens):
            admitted.chunks.append(Chunk(prompt.tokens[start:], start, pages, prompt))

    def _resume(self, sample: Sample, num_steps: int, admitted: Admitted) -> None:
        """A preempted sample: what it had in its pages is computed again."""
        sample.pages, num_there = self._take_full_pages(sample.prompt)
        sample.num_shared = len(sample.pages)
        self._fill_up(sample, num_steps)
        start = num_there * self.pages.page_size
        if start < sample.position:
            tokens = sample.tokens[start : sample.position]
            admitted.chunks.append(Chunk(tokens, start, list(sample.pages)))

    def _take_full_pages(self, prompt: Prompt) -> tuple[list[int], int]:
        """(the prompt's full pages, held once more; how many of them were there already)."""
        pages = self._there(prompt)
        num_there = len(pages)
        self.pages.hold(pages)
        pages += self.pages.take(len(prompt.tokens) // self.pages.page_size - num_there)
        self.pages.name(pages, prompt.tokens)
        return pages, num_there

    def _there(self, prompt: Prompt) -> list[int]:
        """Full pages that need no computing: the group's, or those of prompts that begin alike."""
        if prompt.full_pages is not None:
            return list(prompt.full_pages)
        is_known = prompt.hidden_D is not None
        return self.pages.find(prompt.tokens if is_known else prompt.tokens[:-1])

    def _give_last_page(self, sample: Sample, admitted: Admitted) -> None:
        """The prompt's last page itself to the group's last sample, a copy to those before."""
        prompt = sample.prompt
        if prompt.last_page is None:
            return
        if prompt.num_to_come:
            (copy,) = self.pages.take(1)
            admitted.copies.append((prompt.last_page, copy))
            sample.pages.append(copy)
        else:
            sample.pages.append(prompt.last_page)
            prompt.last_page = None

    # Pages

    def _fill_up(self, sample: Sample, num_steps: int) -> None:
        missing = self._num_pages(sample, num_steps) - len(sample.pages)
        sample.pages += self.pages.take(missing)

    def _num_pages(self, sample: Sample, num_steps: int) -> int:
        """Pages that a sample needs for `num_steps` more tokens to be appended."""
        num_tokens = sample.position + min(num_steps, sample.num_left)
        return num_pages_for(num_tokens, self.pages.page_size)

    def _preempt(self, sample: Sample) -> None:
        assert sample.row.tokens, "a sample runs from its first token on"
        self.running.remove(sample)
        self._release(sample)
        self.waiting.appendleft(sample)
        self.num_preempted += 1

    def _release(self, sample: Sample) -> None:
        self.pages.release(sample.pages)
        sample.pages, sample.num_shared = [], 0

    def _drop_kept(self) -> None:
        """Let go of what is kept for samples to come: it can be computed again."""
        for prompt in {id(sample.prompt): sample.prompt for sample in self.waiting}.values():
            self._let_go(prompt)

    def _let_go(self, prompt: Prompt) -> None:
        if prompt.last_page is not None:
            self.pages.release([prompt.last_page])
            prompt.last_page = None
        if prompt.full_pages is not None:
            self.pages.release(prompt.full_pages)
            prompt.full_pages = None
