"""A completion while it grows, and where it ends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rl.errors import MeshdialError
from rl.rollout.sampling import SamplingConfig
from rl.rollout.stop_search import StopSearch


class Tokenizer(Protocol):
    """What is needed of a tokenizer here."""

    eos_ids: tuple[int, ...]
    pad_id: int

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass
class Completion:
    """One sampled completion, its end-of-text token included.

    `logprobs` are of the whole distribution at the sampling temperature; `sampling_logprobs` of
    what truncation and bans left, None where nothing is truncated. `text` ends before the stop
    text.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    sampling_logprobs: np.ndarray | None
    text: str
    finish_reason: str  # stop, length or timeout


@dataclass
class Row:
    """One sample in the making: tokens come in a few at a time until `finish_reason` is set.

    max_tokens: the most that this sample may have; as the sampling's where it is None.
    """

    tokenizer: Tokenizer
    sampling: SamplingConfig
    prompt_number: int
    max_tokens: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    text: str | None = None
    finish_reason: str | None = None

    def __post_init__(self):
        most = self.sampling.max_tokens
        self.max_tokens = most if self.max_tokens is None else self.max_tokens
        if not 1 <= self.max_tokens <= most:
            raise MeshdialError(
                f"prompt {self.prompt_number}: a completion's limit is {self.max_tokens} tokens, "
                f"expected 1 to rollout.max_tokens = {most}"
            )
        self._ends = frozenset(self.sampling.ends(self.tokenizer.eos_ids))
        self._stops = None
        if self.sampling.stop:
            stop, min_tokens = self.sampling.stop, self.sampling.min_tokens
            self._stops = StopSearch(self.tokenizer.decode, stop, min_tokens)

    def extend(self, tokens, logprobs, sampling_logprobs) -> None:
        """Take the tokens up to the one that ends the completion; drop those after it."""
        if self.finish_reason:
            return
        num_before = len(self.tokens)
        for token in tokens:
            self._append(token)
            if self.finish_reason:
                break
        num_new = len(self.tokens) - num_before
        if not all(map(math.isfinite, logprobs[:num_new])):
            raise MeshdialError(
                f"the model's logits for a completion of prompt {self.prompt_number} are not finite"
            )
        self.logprobs += logprobs[:num_new]
        self.sampling_logprobs += sampling_logprobs[:num_new]

    def expire(self) -> None:
        """Its time is over: end it with what it has, which is one token at least."""
        if self.tokens and not self.finish_reason:
            self.finish_reason = "timeout"

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        if token in self._ends:
            self.finish_reason = "stop"
            return
        self.text = self._stops.text_before_stop(self.tokens) if self._stops else None
        if self.text is not None:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.max_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        truncated = np.asarray(self.sampling_logprobs, np.float32)
        return Completion(
            np.asarray(self.tokens, np.int32),
            np.asarray(self.logprobs, np.float32),
            truncated if self.sampling.is_truncating else None,
            self._decoded() if self.text is None else self.text,
            self.finish_reason,
        )

    def _decoded(self) -> str:
        """An end-of-text token has no text, special or not."""
        tokens = self.tokens[:-1] if self.tokens[-1] in self._ends else self.tokens
        return self.tokenizer.decode(tokens)
