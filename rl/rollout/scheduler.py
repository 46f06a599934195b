"""Which samples decode now: pages and slots of one replica of the model.

1. `reserve` finds pages for what every running sample appends next; when there are none left, the
   youngest goes back to wait, with the tokens it has.
2. `admit` fills free slots from the front of the queue as far as pages reach, and says what must be
   computed for that: the missing pages of prompts, and copies of a prompt's last page.
3. After the tokens of a dispatch, `retire` lets finished samples go.

The last known token of a sample is never in the cache: it is what decodes next.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

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

    @property
    def num_cached(self) -> int:
        """Tokens that all samples share."""
        return len(self.tokens) - 1


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
        """Of the last token there is, which decodes next; so many are in the cache."""
        return len(self.prompt.tokens) + len(self.row.tokens) - 1

    @property
    def num_left(self) -> int:
        return self.row.max_tokens - len(self.row.tokens)


@dataclass(frozen=True)
class Chunk:
    """Tokens whose keys and values are to be computed, and the pages of all tokens up to them."""

    tokens: Sequence[int]
    position: int  # of the first
    pages: Sequence[int]


@dataclass
class Admitted:
    """What newly admitted samples need before they decode: the chunks in order, then the copies."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # from page, to page


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
            self._start(self.waiting.popleft(), num_steps, admitted)
        return admitted

    def retire(self) -> list[Sample]:
        """The samples that have ended; their pages are free."""
        ended = [sample for sample in self.running if sample.row.finish_reason]
        self.running = [sample for sample in self.running if not sample.row.finish_reason]
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
        found = self.pages.find(self._full_tokens(sample.prompt))
        needed = self._num_pages(sample, num_steps) - len(found) + self._needs_last_page(sample)
        return needed + len(self.running) // 2 <= self.pages.num_free

    def _needs_last_page(self, sample: Sample) -> bool:
        prompt = sample.prompt
        has_rest = prompt.num_cached % self.pages.page_size > 0
        return has_rest and not sample.row.tokens and prompt.last_page is None

    def _start(self, sample: Sample, num_steps: int, admitted: Admitted) -> None:
        prompt, is_new = sample.prompt, not sample.row.tokens
        shared, num_found = self._share_prompt(prompt)
        sample.pages, sample.num_shared = shared, len(shared)
        if is_new:
            prompt.num_to_come -= 1
            self._compute_prompt(prompt, shared, num_found, admitted)
            self._give_last_page(sample, admitted)
        missing = self._num_pages(sample, num_steps) - len(sample.pages)
        sample.pages += self.pages.take(missing)
        if not is_new:
            start = num_found * self.pages.page_size
            tokens = sample.tokens[start : sample.position]
            admitted.chunks.append(Chunk(tokens, start, list(sample.pages)))
        if not prompt.num_to_come:
            self._let_go(prompt)
        self.running.append(sample)

    def _share_prompt(self, prompt: Prompt) -> tuple[list[int], int]:
        """(the prompt's full pages, held for one sample; how many of them were there already)."""
        tokens = self._full_tokens(prompt)
        pages = self.pages.find(tokens)
        num_found = len(pages)
        self.pages.hold(pages)
        pages += self.pages.take(len(tokens) // self.pages.page_size - num_found)
        self.pages.name(pages, tokens)
        if prompt.full_pages is None and prompt.num_to_come > 1:
            prompt.full_pages = list(pages)
            self.pages.hold(pages)
        return pages, num_found

    def _compute_prompt(
        self, prompt: Prompt, pages: list[int], num_found: int, admitted: Admitted
    ) -> None:
        """Have computed what is not there of a prompt; its last page too."""
        start = num_found * self.pages.page_size
        end = len(pages) * self.pages.page_size
        if prompt.num_cached > end and prompt.last_page is None:
            (prompt.last_page,) = self.pages.take(1)
            pages, end = [*pages, prompt.last_page], prompt.num_cached
        if end > start:
            admitted.chunks.append(Chunk(prompt.tokens[start:end], start, list(pages)))

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

    def _full_tokens(self, prompt: Prompt) -> Sequence[int]:
        size = self.pages.page_size
        return prompt.tokens[: prompt.num_cached // size * size]

    def _num_pages(self, sample: Sample, num_steps: int) -> int:
        """Pages that a sample needs for `num_steps` more tokens to be appended."""
        num_tokens = sample.position + min(num_steps, sample.num_left)
        return num_pages_for(num_tokens, self.pages.page_size)

    def _preempt(self, sample: Sample) -> None:
        self.running.remove(sample)
        self._release(sample)
        if not sample.row.tokens:
            sample.prompt.num_to_come += 1
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
