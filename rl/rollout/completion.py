"""A completion while it grows, and where it ends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rl.errors import MeshdialError
from rl.rollout.sampling import SamplingConfig


class Tokenizer(Protocol):
    """What is needed of a tokenizer here."""

    eos_ids: tuple[int, ...]
    pad_id: int

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass
class Completion:
    """One sampled completion, its end-of-text token included.

    `logprobs` are of the whole distribution at the sampling temperature; `sampling_logprobs` of
    what truncation left, None where nothing is truncated. `text` ends before the stop text.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    sampling_logprobs: np.ndarray | None
    text: str
    finish_reason: str  # stop or length


@dataclass
class Row:
    """One sample in the making: tokens come in a few at a time until `finish_reason` is set."""

    tokenizer: Tokenizer
    sampling: SamplingConfig
    prompt_number: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    text: str | None = None
    finish_reason: str | None = None

    def extend(self, tokens, logprobs, sampling_logprobs) -> None:
        """Take the tokens up to the one that ends the completion; drop those after it."""
        if self.finish_reason:
            return
        if not all(map(math.isfinite, logprobs)):
            raise MeshdialError(
                f"the model's logits for a completion of prompt {self.prompt_number} are not finite"
            )
        num_before = len(self.tokens)
        self.tokens += tokens
        self._find_end(num_before)
        num_new = len(self.tokens) - num_before
        self.logprobs += logprobs[:num_new]
        self.sampling_logprobs += sampling_logprobs[:num_new]

    def _find_end(self, num_before: int) -> None:
        ends = self.tokenizer.eos_ids
        eos = next((i for i, t in enumerate(self.tokens) if i >= num_before and t in ends), None)
        limit = self.sampling.max_tokens
        if eos is not None and eos < limit:
            self._cut(eos + 1, "stop")
        elif len(self.tokens) >= limit:
            self._cut(limit, "length")
        if self.sampling.stop and self._stop_in(self._decoded(len(self.tokens))) is not None:
            lengths = range(num_before + 1, len(self.tokens) + 1)
            texts = ((num, self._decoded(num)) for num in lengths)
            num, text = next((n, t) for n, t in texts if self._stop_in(t) is not None)
            self._cut(num, "stop")
            self.text = text[: self._stop_in(text)]

    def _cut(self, num_tokens: int, reason: str) -> None:
        del self.tokens[num_tokens:]
        self.finish_reason = reason

    def _decoded(self, num_tokens: int) -> str:
        """The text of the first tokens; an end-of-text token has none, special or not."""
        tokens = self.tokens[:num_tokens]
        if tokens and tokens[-1] in self.tokenizer.eos_ids:
            tokens.pop()
        return self.tokenizer.decode(tokens)

    def _stop_in(self, text: str) -> int | None:
        """Where the first stop text begins."""
        found = [text.find(stop) for stop in self.sampling.stop if stop in text]
        return min(found, default=None)

    def completion(self) -> Completion:
        text = self._decoded(len(self.tokens)) if self.text is None else self.text
        truncated = np.asarray(self.sampling_logprobs, np.float32)
        return Completion(
            np.asarray(self.tokens, np.int32),
            np.asarray(self.logprobs, np.float32),
            truncated if self.sampling.is_truncating else None,
            text,
            self.finish_reason,
        )
