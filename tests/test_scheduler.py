"""The scheduler against a pool that remembers which token lies where.

Every sample decodes made-up tokens. Before each of them its pages must hold, in order, its prompt
and the tokens that it has, whoever computed or copied them there.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.rollout.pages import Pages
from rl.rollout.scheduler import Prompt, Sample, Scheduler


@dataclass
class FakeRow:
    """Ends after `length` tokens, or at `max_tokens`."""

    length: int
    max_tokens: int
    name: int
    tokens: list = field(default_factory=list)
    finish_reason: str | None = None

    def extend(self, count):
        for _ in range(count):
            if not self.finish_reason:
                self.tokens.append(1000 * self.name + len(self.tokens))
                if len(self.tokens) >= min(self.length, self.max_tokens):
                    self.finish_reason = "stop"


class Stopped(Exception):
    pass


class Simulation:
    """Runs a scheduler with no model: tokens in place of keys and values."""

    def __init__(self, prompts, lengths, num_pages, page_size, max_rows, num_steps):
        self.pages = Pages(num_pages, page_size)
        self.scheduler = Scheduler(self.pages, max_rows)
        self.held = {}  # (page, slot) -> token
        self.num_steps = num_steps
        self.samples = []
        for p, (tokens, group) in enumerate(zip(prompts, lengths, strict=True)):
            prompt = Prompt(tokens, p, len(group))
            for g, length in enumerate(group):
                row = FakeRow(length, 12, len(self.samples) + 1)
                self.samples.append(Sample(prompt, g, row))
        self.scheduler.waiting.extend(self.samples)
        self.computed = []

    def run(self, stop_after=None):
        number = 0
        try:
            while self.scheduler.has_work:
                self.advance()
                number += 1
                if number == stop_after:
                    raise Stopped
        finally:
            self.scheduler.close()

    def advance(self):
        self.scheduler.reserve(self.num_steps)
        admitted = self.scheduler.admit(self.num_steps)
        assert self.scheduler.running
        for chunk in admitted.chunks:
            self.computed.append((chunk.position, tuple(chunk.tokens)))
            for offset, token in enumerate(chunk.tokens):
                self.put(chunk.pages, chunk.position + offset, token)
            assert self.read(chunk.pages, chunk.position) == self.prefix(chunk)
            if chunk.prompt:
                chunk.prompt.hidden_D = True
        for source, target in admitted.copies:
            for slot in range(self.pages.page_size):
                self.held[target, slot] = self.held.get((source, slot))
        for sample in admitted.samples:
            assert self.read(sample.pages, len(sample.prompt.tokens)) == list(sample.prompt.tokens)
            sample.row.extend(1)
        self.scheduler.retire()
        for sample in self.scheduler.running:
            self.decode(sample)
        for sample in self.scheduler.retire():
            assert sample.row.finish_reason and not sample.pages

    def decode(self, sample):
        for _ in range(min(self.num_steps, sample.num_left)):
            if sample.row.finish_reason:
                return
            assert self.read(sample.pages, sample.position) == sample.tokens[:-1]
            self.put(sample.pages, sample.position, sample.tokens[-1])
            sample.row.extend(1)

    def put(self, pages, position, token):
        page, slot = pages[position // self.pages.page_size], position % self.pages.page_size
        assert page, "the trash page is nobody's"
        self.held[page, slot] = token

    def read(self, pages, count):
        size = self.pages.page_size
        return [self.held.get((pages[i // size], i % size)) for i in range(count)]

    def prefix(self, chunk):
        """What a chunk continues, by the sample that it is of."""
        for sample in self.samples:
            tokens = sample.tokens
            end = chunk.position + len(chunk.tokens)
            if tokens[chunk.position : end] == list(chunk.tokens):
                if self.read(chunk.pages, chunk.position) == tokens[: chunk.position]:
                    return tokens[: chunk.position]
        raise AssertionError(f"no sample has {chunk}")


GROUPS = [[3, 1, 12, 7], [2, 2, 9, 4]]


@st.composite
def simulations(draw):
    page_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    token = st.integers(0, 2)  # so few that prompts share their beginnings
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=11), min_size=1, max_size=5))
    group_size = draw(st.integers(1, 5))
    lengths = [[draw(st.integers(1, 12)) for _ in range(group_size)] for _ in prompts]
    longest = -(-(max(map(len, prompts)) + 12) // page_size)
    num_pages = longest + 2 + draw(st.integers(0, 3 * longest))
    sizes = (draw(st.integers(1, 7)), draw(st.integers(1, 5)))
    return Simulation(prompts, lengths, num_pages, page_size, *sizes)


@settings(max_examples=300, deadline=None)
@given(simulations(), st.one_of(st.none(), st.integers(1, 12)))
def test_every_sample_ends_and_every_page_is_free_after(simulation, stop_after):
    try:
        simulation.run(stop_after)
    except Stopped:
        pass
    else:
        assert all(sample.row.finish_reason for sample in simulation.samples)
        for sample in simulation.samples:
            assert len(sample.row.tokens) == min(sample.row.length, 12)
    assert simulation.pages.num_held == 0
    assert simulation.pages.find(simulation.samples[0].prompt.tokens) == []


def test_a_group_computes_its_prompt_once_and_copies_its_last_page():
    simulation = Simulation([[5, 6, 7, 8, 9, 10]], [[5, 5, 5]], 30, 4, 8, 2)
    simulation.advance()
    assert simulation.computed == [(0, (5, 6, 7, 8, 9, 10))]
    first, second, third = (sample.pages for sample in simulation.samples)
    assert first[0] == second[0] == third[0]
    assert len({first[1], second[1], third[1]}) == 3
    assert simulation.pages.num_held == 4  # one shared, three last pages: the third is the prompt's


def test_prompts_share_the_full_pages_that_they_begin_with():
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8]]
    simulation = Simulation(prompts, [[3], [3]], 30, 4, 8, 1)
    simulation.advance()
    assert simulation.computed == [(0, (1, 2, 3, 4, 5, 6)), (4, (7, 8))]
    one, other = (sample.pages for sample in simulation.samples)
    assert one[0] == other[0] and one[1] != other[1]


def test_pages_run_out_and_the_youngest_waits_with_the_tokens_it_has():
    simulation = Simulation([[1], [2]], [[12], [12]], 5, 4, 8, 1)
    for _ in range(7):  # two pages each
        simulation.advance()
    old, young = simulation.samples
    assert [len(sample.row.tokens) for sample in (old, young)] == [8, 8]
    simulation.advance()  # the older needs a third page
    assert simulation.scheduler.running == [old] and simulation.scheduler.num_preempted == 1
    assert young.row.tokens == [2000 + i for i in range(8)] and not young.pages
    simulation.run()
    assert simulation.computed[-1] == (0, (2, *range(2000, 2007)))
    assert [sample.row.tokens[-1] for sample in (old, young)] == [1011, 2011]


def test_a_preempted_sample_may_end_while_it_waits():
    simulation = Simulation([[1], [2]], [[12], [12]], 5, 4, 8, 1)
    for _ in range(8):
        simulation.advance()
    old, young = simulation.samples
    assert list(simulation.scheduler.waiting) == [young]
    young.row.finish_reason = "timeout"
    assert simulation.scheduler.retire() == [young]
    assert not simulation.scheduler.waiting and simulation.scheduler.running == [old]
    simulation.run()
    assert len(young.row.tokens) == 8 and simulation.pages.num_held == 0


def test_slots_are_filled_at_once_when_a_sample_ends():
    simulation = Simulation([[1, 2]], [[1, 5, 5, 5]], 60, 4, 2, 1)
    simulation.advance()
    assert [s.index for s in simulation.scheduler.running] == [1]
    simulation.advance()
    assert [s.index for s in simulation.scheduler.running] == [1, 2]


@pytest.mark.parametrize("num_pages", [6, 7, 9])
def test_the_smallest_pool_that_holds_one_sample_is_enough(num_pages):
    simulation = Simulation([[1, 2, 3, 4, 5], [9, 9, 9, 9, 9]], GROUPS, num_pages, 4, 8, 3)
    simulation.run()
    assert all(sample.row.finish_reason for sample in simulation.samples)
