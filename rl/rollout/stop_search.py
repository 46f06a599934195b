"""Finds the stop text that ends a completion, as its tokens come in.

Decoding all tokens anew for each one would take quadratic time, and the text of a few tokens is not
always a part of the text of all: a token may be a part of a character, and some decoders drop a
space at the start of a text. So the text of the last tokens alone says whether a stop text may be
there, and that of all tokens whether it is.

1. The tail of the tokens, up to the new one, is decoded and searched.
2. If it holds a stop text, all tokens are decoded, and that decides.
3. From time to time the first half of the tail goes, provided that what is left has the text that
   it had in the longer tail, enough for the longest stop text, and ends in a whole character.
"""

from collections.abc import Callable, Sequence

UNDECODED = "\N{REPLACEMENT CHARACTER}"
NUM_UNSURE = 4  # first characters of a tail that may differ from those in the whole text


class StopSearch:
    """`decode` turns tokens into text. A stop text counts once it ends after the first `min_tokens`
    tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str], min_tokens=0):
        self.decode = decode
        self.stop = stop
        self.min_tokens = min_tokens
        self.num_needed = max(map(len, stop)) + NUM_UNSURE  # characters of a tail
        self.start = 0  # of the tail
        self.next_cut = 2 * self.num_needed  # tokens of the tail when it is to be shortened

    def text_before_stop(self, tokens: Sequence[int]) -> str | None:
        """The text of all tokens up to the first stop text, or None where there is none.

        To be asked after each token, until there is one.
        """
        if len(tokens) <= self.min_tokens:
            return None
        tail = self.decode(tokens[self.start :])
        if any(stop in tail for stop in self.stop):
            text = self.decode(tokens)
            if (end := self._find(text, tokens)) is not None:
                return text[:end]
        if len(tokens) - self.start >= self.next_cut:
            self._shorten(tokens, tail)
        return None

    def _find(self, text: str, tokens: Sequence[int]) -> int | None:
        """Where the first stop text that counts begins."""
        ignored = self.decode(tokens[: self.min_tokens]) if self.min_tokens else ""
        # The end of a text may be a part of a character that later tokens complete.
        num_ignored = len(ignored.rstrip(UNDECODED))
        starts = [max(num_ignored - len(stop) + 1, 0) for stop in self.stop]
        found = [text.find(stop, at) for stop, at in zip(self.stop, starts, strict=True)]
        return min((at for at in found if at >= 0), default=None)

    def _shorten(self, tokens: Sequence[int], tail: str) -> None:
        middle = (self.start + len(tokens) + 1) // 2
        rest = self.decode(tokens[middle:])
        is_long_enough = len(rest) >= self.num_needed
        is_whole = not rest.endswith(UNDECODED)
        if is_long_enough and is_whole and tail.endswith(rest[NUM_UNSURE:]):
            self.start = middle
        self.next_cut = len(tokens) - self.start + self.num_needed
