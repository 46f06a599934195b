"""A batch of rollouts laid out by groups, and the arrays of its micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice

import jax
import numpy as np

from rl.errors import MeshdialError
from rl.learner.loss import MicroBatch
from rl.learner.packing import Part, Shape, divide
from rl.models.packed import Packed
from rl.models.shared_prefix import num_shared_tokens
from rl.sharding import num_row_shards, on_rows


@dataclass(frozen=True, kw_only=True)
class UpdateBatch:
    """P groups of G rollouts, numpy, right-padded. A row of length 0 is no rollout at all.

    `completion_mask_PGT` keeps the tokens that are trained on: what the others hold, NaN included,
    does not matter. `proximal_logprobs_PGT` is None where the current policy is the proximal one,
    `reference_logprobs_PGT` where there is no KL term, `off_policy_weights_PGT` where the proximal
    policy is also the one that sampled; else it is proximal / behaviour, which multiplies the loss.
    `values_PGT`, of the state before each token, and `returns_PGT` are there for a critic alone.
    `max_tokens` is the longest that a completion can be, if known.
    """

    prompt_tokens_PT: np.ndarray
    prompt_lengths_P: np.ndarray
    completion_tokens_PGT: np.ndarray
    completion_lengths_PG: np.ndarray
    completion_mask_PGT: np.ndarray
    advantages_PGT: np.ndarray
    rollout_logprobs_PGT: np.ndarray
    proximal_logprobs_PGT: np.ndarray | None
    reference_logprobs_PGT: np.ndarray | None
    off_policy_weights_PGT: np.ndarray | None = None
    values_PGT: np.ndarray | None = None
    returns_PGT: np.ndarray | None = None
    temperature: float
    max_tokens: int | None = None

    @property
    def group_shape(self) -> tuple[int, int]:
        return self.completion_lengths_PG.shape

    def num_shared(self) -> int:
        """How many first tokens all prompts share: they are computed once a micro-batch."""
        rows = zip(self.prompt_tokens_PT, self.prompt_lengths_P, strict=True)
        return num_shared_tokens([tokens[:length] for tokens, length in rows])

    def divide(self, is_needed_PG: np.ndarray, budget: int) -> tuple[Shape, list[Part]]:
        """Micro-batches of at most `budget` tokens for each row shard: see `packing.divide`."""
        return divide(
            is_needed_PG,
            self.completion_lengths_PG,
            self.prompt_lengths_P,
            budget,
            num_shared=self.num_shared(),
            max_tokens=self.max_tokens,
            num_shards=num_row_shards(),
        )

    def trained_mask(self) -> np.ndarray:
        """The completion mask without padding, boolean [P, G, T]."""
        positions_T = np.arange(self.completion_tokens_PGT.shape[2])
        is_token_PGT = positions_T[None, None, :] < self.completion_lengths_PG[:, :, None]
        return is_token_PGT & self.completion_mask_PGT.astype(bool)

    def groups(self, start: int, stop: int) -> "UpdateBatch":
        """The groups `start` to `stop` - 1, as a batch of their own."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        cut = {k: v[start:stop] for k, v in values.items() if isinstance(v, np.ndarray)}
        return UpdateBatch(**{**values, **cut})


def pack(
    *,
    group_ids: Sequence,
    prompt_tokens: Sequence[Sequence[int]],
    completion_tokens: Sequence[Sequence[int]],
    completion_mask: Sequence[Sequence[bool]] | None = None,
    advantages: Sequence[Sequence[float]] | None = None,
    rollout_logprobs: Sequence[Sequence[float]] | None = None,
    proximal_logprobs: Sequence[Sequence[float]] | None = None,
    reference_logprobs: Sequence[Sequence[float]] | None = None,
    values: Sequence[Sequence[float]] | None = None,
    returns: Sequence[Sequence[float]] | None = None,
    temperature: float,
    max_tokens: int | None = None,
) -> UpdateBatch:
    """Lay N rollouts, one entry each in every argument, out by groups.

    Groups stand in the order of their first rollout, and rollouts keep their order within a group;
    `unpack` undoes it. A group smaller than the largest is filled with rows of length 0. Left out,
    the mask keeps every token, and advantages and rollout log-probabilities are 0: enough for
    `score_batch`. `max_tokens` is the longest that a completion can be, if known.
    Raises MeshdialError where a rollout is empty, its lists differ in length, or a group has more
    than one prompt.
    """
    row_PG = _slots(group_ids)
    lengths = [len(tokens) for tokens in completion_tokens]
    _refuse_empty(prompt_tokens, lengths)
    _refuse_mixed(prompt_tokens, group_ids, row_PG)
    T = max(lengths)
    prompts = [prompt_tokens[row] for row in row_PG[:, 0]]

    def per_token(name, lists, dtype, default=None):
        if lists is None:
            return None if default is None else np.full((*row_PG.shape, T), default, dtype)
        _refuse_other_lengths(name, lists, lengths)
        return _regroup(_padded(lists, T, dtype), row_PG)

    return UpdateBatch(
        prompt_tokens_PT=_padded(prompts, max(map(len, prompts)), np.int32),
        prompt_lengths_P=np.array([len(prompt) for prompt in prompts], np.int32),
        completion_tokens_PGT=per_token("completion_tokens", completion_tokens, np.int32),
        completion_lengths_PG=_regroup(np.array(lengths, np.int32), row_PG),
        completion_mask_PGT=per_token("completion_mask", completion_mask, bool, True),
        advantages_PGT=per_token("advantages", advantages, np.float32, 0.0),
        rollout_logprobs_PGT=per_token("rollout_logprobs", rollout_logprobs, np.float32, 0.0),
        proximal_logprobs_PGT=per_token("proximal_logprobs", proximal_logprobs, np.float32),
        reference_logprobs_PGT=per_token("reference_logprobs", reference_logprobs, np.float32),
        values_PGT=per_token("values", values, np.float32),
        returns_PGT=per_token("returns", returns, np.float32),
        temperature=temperature,
        max_tokens=max_tokens,
    )


def pack_supervised(
    prompt_tokens: Sequence[Sequence[int]], completion_tokens: Sequence[Sequence[int]]
) -> UpdateBatch:
    """Given completions, one a prompt, as a batch of groups of one."""
    return pack(
        group_ids=range(len(prompt_tokens)),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        temperature=1.0,
    )


def unpack(values_PGT: np.ndarray, batch: UpdateBatch, group_ids: Sequence) -> list[np.ndarray]:
    """The per-token values of each rollout, in the order of the `group_ids` given to `pack`."""
    row_PG = _slots(group_ids)
    is_rollout_PG = row_PG >= 0
    values = zip(values_PGT[is_rollout_PG], batch.completion_lengths_PG[is_rollout_PG], strict=True)
    by_row = dict(zip(row_PG[is_rollout_PG], (row[:length] for row, length in values), strict=True))
    return [by_row[row] for row in range(len(by_row))]


def _slots(group_ids: Sequence) -> np.ndarray:
    """row_PG: which rollout stands in each slot; -1 where a group has no more."""
    members: dict = {}
    for row, group in enumerate(group_ids):
        members.setdefault(group, []).append(row)
    if not members:
        raise MeshdialError("the batch holds no rollouts")
    row_PG = np.full((len(members), max(map(len, members.values()))), -1)
    for slots, rows in zip(row_PG, members.values(), strict=True):
        slots[: len(rows)] = rows
    return row_PG


def _regroup(values_B: np.ndarray, row_PG: np.ndarray) -> np.ndarray:
    padded = np.concatenate([values_B, np.zeros_like(values_B[:1])])  # row -1: an empty slot
    return padded[row_PG]


def _padded(lists, length: int, dtype) -> np.ndarray:
    rows = np.zeros((len(lists), length), dtype)
    for row, values in zip(rows, lists, strict=True):
        row[: len(values)] = values
    return rows


def _refuse_empty(prompt_tokens, lengths) -> None:
    for row, (prompt, length) in enumerate(zip(prompt_tokens, lengths, strict=True)):
        if len(prompt) == 0 or length == 0:
            part = "prompt" if len(prompt) == 0 else "completion"
            raise MeshdialError(f"the {part} of rollout {row} has no tokens, expected at least one")


def _refuse_mixed(prompt_tokens, group_ids, row_PG) -> None:
    for rows in row_PG:
        for row in rows[rows >= 0]:
            if not np.array_equal(prompt_tokens[row], prompt_tokens[rows[0]]):
                raise MeshdialError(
                    f"group {group_ids[row]} has more than one prompt: those of its rollouts "
                    f"{rows[0]} and {row} differ"
                )


def _refuse_other_lengths(name, lists, lengths) -> None:
    for row, (values, length) in enumerate(zip(lists, lengths, strict=True)):
        if len(values) != length:
            raise MeshdialError(
                f"{name} of rollout {row} has {len(values)} entries, and its completion "
                f"{length} tokens"
            )


def micro_batches(
    batch: UpdateBatch, weights_PGT: np.ndarray, shape: Shape, parts: list[Part]
) -> Iterator[MicroBatch]:
    """The tokens of each part, what is not trained on replaced by zeros."""
    prompts_PS = np.zeros((len(batch.prompt_tokens_PT), shape.prompt_size), np.int32)
    width = min(shape.prompt_size, batch.prompt_tokens_PT.shape[1])
    prompts_PS[:, :width] = batch.prompt_tokens_PT[:, :width]
    for part in parts:
        rows_P11 = part.prompt_P[:, None, None]
        places = rows_P11, part.member_PBT, part.token_PBT
        weights = np.where(part.is_real_PBT, weights_PGT[places], np.float32(0))

        def trained(values_PGT, places=places, is_trained=weights > 0):
            if values_PGT is None:
                return None
            return np.where(is_trained, values_PGT[places], np.float32(0))

        yield MicroBatch(
            packed=_packed(batch, prompts_PS, part),
            temperature=np.float32(batch.temperature),
            weights_PBT=weights,
            advantages_PBT=trained(batch.advantages_PGT),
            rollout_logprobs_PBT=trained(batch.rollout_logprobs_PGT),
            proximal_logprobs_PBT=trained(batch.proximal_logprobs_PGT),
            reference_logprobs_PBT=trained(batch.reference_logprobs_PGT),
            off_policy_weights_PBT=trained(batch.off_policy_weights_PGT),
            values_PBT=trained(batch.values_PGT),
            returns_PBT=trained(batch.returns_PGT),
        )


def _packed(batch: UpdateBatch, prompts_PS: np.ndarray, part: Part) -> Packed:
    rows_P11, token_PBT = part.prompt_P[:, None, None], part.token_PBT
    context_P = batch.prompt_lengths_P - 1  # all but the last token, which is fed with the bins
    last_P = batch.prompt_tokens_PT[np.arange(len(context_P)), context_P]
    targets_PBT = batch.completion_tokens_PGT[rows_P11, part.member_PBT, token_PBT]
    before_PBT = np.maximum(token_PBT - 1, 0)
    fed_PBT = batch.completion_tokens_PGT[rows_P11, part.member_PBT, before_PBT]
    inputs_PBT = np.where(token_PBT == 0, last_P[rows_P11], fed_PBT)
    positions_PBT = context_P[rows_P11] + token_PBT
    return Packed(
        prompt_tokens_PS=prompts_PS[part.prompt_P],
        prompt_lengths_P=context_P[part.prompt_P],
        inputs_PBT=np.where(part.is_real_PBT, inputs_PBT, 0),
        targets_PBT=np.where(part.is_real_PBT, targets_PBT, 0),
        positions_PBT=np.where(part.is_real_PBT, positions_PBT, 0),
        segments_PBT=np.where(part.is_real_PBT, part.member_PBT, -1),
    )


def spread(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """One micro-batch for each row shard of the mesh, stacked: [shards, P, ...], each shard's
    on its devices. What the last stack lacks is filled with rows of weight 0.

    On a mesh of one row shard the micro-batches pass as they are.
    """
    size = num_row_shards()
    while size > 1 and (stack := list(islice(batches, size))):
        nothing = stack[0]._replace(weights_PBT=np.zeros_like(stack[0].weights_PBT))
        stack += [nothing] * (size - len(stack))
        yield jax.tree.map(lambda *rows: on_rows(np.stack(rows)), *stack)
    yield from batches
