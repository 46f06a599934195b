"""How the losses of single tokens become the loss of a batch."""

from typing import Literal

import numpy as np

Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum-norm"]


def token_weights(
    completion_mask: np.ndarray, kind: Aggregation, max_tokens: int | None = None
) -> np.ndarray:
    """Weights w, float32 in the mask's shape [..., T], such that loss = sum(w * token_loss).

    token-mean: every token of the batch counts the same (DAPO, arXiv:2503.14476).
    sequence-mean-token-mean: the mean over sequences of each one's mean (GRPO, arXiv:2402.03300).
    sequence-mean-token-sum-norm: the mean over sequences of each one's sum, divided by the constant
    `max_tokens` (Dr. GRPO, arXiv:2503.20783); the weights then need not add up to 1.

    The mask is that of all sequences of one update, so micro-batches simply add up. Tokens outside
    the mask weigh exactly 0; a sequence without any token in it is no sequence of the mean.
    """
    mask = np.asarray(completion_mask, bool)
    num_tokens = mask.sum(axis=-1, keepdims=True, dtype=np.int64)
    num_sequences = max(int(np.count_nonzero(num_tokens)), 1)
    if kind == "token-mean":
        denominator = np.maximum(num_tokens.sum(keepdims=True), 1)
    elif kind == "sequence-mean-token-mean":
        denominator = num_sequences * np.maximum(num_tokens, 1)
    elif kind == "sequence-mean-token-sum-norm":
        if not max_tokens:
            raise ValueError(f"{kind} divides by max_tokens, which is {max_tokens}")
        denominator = np.full_like(num_tokens, num_sequences * max_tokens)
    else:
        raise ValueError(f"unknown loss aggregation {kind!r}")
    return (mask / denominator).astype(np.float32)
