"""What the prompts of a batch have in common, such as the worked examples of a few-shot task."""

from collections.abc import Sequence

import numpy as np

PREFIX_MULTIPLE = 16
"""The shared length is rounded down to it, so that like batches compile the same shapes."""


def num_shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens, the same in all prompts, to compute once: a few-shot preamble, say.

    Each prompt keeps at least one token of its own.
    """
    if len(prompts) < 2:
        return 0
    most = min(len(prompt) for prompt in prompts) - 1
    heads = np.array([prompt[:most] for prompt in prompts])
    is_same_T = (heads == heads[:1]).all(axis=0)
    num_same = most if is_same_T.all() else int(is_same_T.argmin())
    return num_same // PREFIX_MULTIPLE * PREFIX_MULTIPLE


def common_length(sequences: Sequence[Sequence[int]]) -> int:
    """How many first tokens are the same in all sequences, up to the whole of the shortest."""
    columns = enumerate(zip(*sequences, strict=False))
    return next((n for n, tokens in columns if len(set(tokens)) > 1), min(map(len, sequences)))
