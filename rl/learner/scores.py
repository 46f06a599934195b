"""What a model says of every place of a batch: log-probabilities, or a critic's values."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import numpy as np

from rl.learner.batch import UpdateBatch, micro_batches, spread
from rl.learner.loss import MicroBatch
from rl.models.scoring import completion_logprobs, completion_values
from rl.models.spec import ModelSpec, Parameters
from rl.sharding import by_row_shard, constrain, num_row_shards

Progress = Callable[[str], None]
Remat = Literal["none", "layer"]


def score_batch(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    batch: UpdateBatch,
    micro_batch_tokens: int,
    progress: Progress = lambda line: None,
) -> np.ndarray:
    """The log-probability of every completion token, float32 [P, G, T], 0 on padding; of a spec
    with a value head the value of the state before it.

    For the log-probabilities of a reference or a proximal policy, and a critic's values; `unpack`
    undoes the layout.
    """
    T = batch.completion_tokens_PGT.shape[2]
    is_token_PGT = np.arange(T)[None, None, :] < batch.completion_lengths_PG[:, :, None]
    shape, parts = batch.divide(is_token_PGT.any(axis=2), micro_batch_tokens)
    spread_rows = spread(micro_batches(batch, is_token_PGT.astype(np.float32), shape, parts))
    scores_PGT = np.zeros(is_token_PGT.shape, np.float32)
    starts = range(0, len(parts), num_row_shards())
    for number, (start, rows) in enumerate(zip(starts, spread_rows, strict=True), start=1):
        scores = np.asarray(_scores(spec, trainable, frozen, rows, shape.num_shared))
        scores = scores.reshape(num_row_shards(), *scores.shape[-3:])
        for part, scores_PBT in zip(parts[start : start + len(scores)], scores, strict=False):
            prompt_PBT = np.broadcast_to(part.prompt_P[:, None, None], part.token_PBT.shape)
            places = prompt_PBT, part.member_PBT, part.token_PBT
            real = part.is_real_PBT
            scores_PGT[tuple(place[real] for place in places)] = scores_PBT[real]
        progress(f"scoring: micro-batch {number} of {len(starts)}")
    return scores_PGT


@partial(jax.jit, static_argnames=("spec", "num_shared"))
def _scores(
    spec: ModelSpec, trainable: Parameters, frozen: Parameters, rows: MicroBatch, num_shared: int
):
    def score(rows):
        return completion_scores(spec, trainable, frozen, rows, num_shared)[0]

    return constrain(by_row_shard(score, rows))


def completion_scores(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    rows: MicroBatch,
    num_shared: int,
    remat: Remat = "none",
    is_entropy_fixed: bool = True,
) -> tuple[jax.Array, ...]:
    """What the spec's head says of each place: (logprobs, entropy), or (values,)."""
    model, is_rematerialised = (spec, trainable, frozen, rows.packed), remat == "layer"
    if spec.head == "value":
        return (completion_values(*model, num_shared, is_rematerialised),)
    return completion_logprobs(
        *model, rows.temperature, num_shared, is_rematerialised, is_entropy_fixed
    )
