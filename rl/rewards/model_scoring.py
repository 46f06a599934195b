"""Reward models: a sequence classifier's one score of a prompt and its completion.

A reward model has a tokenizer, and maybe a chat template, of its own, so that it reads the text of
a rollout rather than its tokens, in the form it was trained on.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from rl.errors import MeshdialError
from rl.learner import UpdateBatch, pack, score_batch, unpack
from rl.models.shared_prefix import common_length
from rl.models.spec import ModelSpec, Parameters
from rl.models.tokenizer import Tokenizer
from rl.rewards.processes import Score

Progress = Callable[[str], None]

SHORTEST_CLASS = 64
"""Sequences up to so many tokens are batched together, whatever their lengths."""


def model_scores(
    spec: ModelSpec,
    parameters: Parameters,
    tokenizer: Tokenizer,
    rollouts: pa.Table,
    prompts: pa.Table,
    micro_batch_tokens: int,
    progress: Progress = lambda line: None,
) -> list[Score]:
    """The score of each rollout by a model with a value head, in their order.

    `prompts` is the table that the rollouts' prompts came from: where a prompt was a chat there,
    and the model has a chat template, the completion is the assistant's message of that chat. A
    sequence longer than the model's positions has no score, and neither has one whose score is not
    finite; each says why. MeshdialError for a rollout whose prompt is not in the table.
    """
    names = prompts["prompt_id"].to_pylist()
    chats = dict(zip(names, prompts["messages"].to_pylist(), strict=True))
    rows = rollouts.select(["prompt_id", "prompt", "completion", "group_id"]).to_pylist()
    limit = spec.config.max_position_embeddings
    read = [_read(tokenizer, row, chats, limit) for row in rows]
    kept = [number for number, (_, failure) in enumerate(read) if failure is None]
    found = score_sequences(
        *(spec, parameters, [read[number][0] for number in kept]),
        *([rows[number]["group_id"] for number in kept], micro_batch_tokens, progress),
    )
    scores = [Score(None, failure) for _, failure in read]
    for number, value in zip(kept, found, strict=True):
        is_number = math.isfinite(value)
        scores[number] = Score(value) if is_number else Score(None, f"the model's score is {value}")
    return scores


def sequence_tokens(
    tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, str]], completion: str
) -> list[int]:
    """What a reward model reads: the two texts as one, or, of a prompt of messages, the chat with
    the completion as the assistant's message. Its last token is the one that is scored.

    transformers scores the last token that is not what config.json has as pad_token_id, even where
    a chat template ends with that token; so does a model that was trained with it.
    """
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt + completion)
    else:
        chat = [*prompt, {"role": "assistant", "content": completion}]
        tokens = tokenizer.encode(tokenizer.render_chat(chat, is_open=False), special_tokens=False)
    while len(tokens) > 1 and tokens[-1] == tokenizer.model_pad_id:
        tokens.pop()
    return tokens


def _read(
    tokenizer: Tokenizer, row: Mapping[str, str], chats: Mapping[str, str | None], limit: int
) -> tuple[list[int], str | None]:
    """(what the model reads of a rollout, None), or ([], why it cannot read it)."""
    if row["prompt_id"] not in chats:
        raise MeshdialError(
            f"the rollouts have a prompt {row['prompt_id']!r}, which is not in their table"
        )
    messages = chats[row["prompt_id"]]
    is_chat = messages is not None and tokenizer.template is not None
    try:
        prompt = json.loads(messages) if is_chat else row["prompt"]
        tokens = sequence_tokens(tokenizer, prompt, row["completion"])
    except MeshdialError as error:
        return [], str(error)
    if not tokens:
        return [], "its prompt and completion have no tokens"
    if len(tokens) > limit:
        return [], f"its prompt and completion have {len(tokens)} tokens, the model reads {limit}"
    return tokens, None


def score_sequences(
    spec: ModelSpec,
    parameters: Parameters,
    sequences: Sequence[Sequence[int]],
    group_ids: Sequence,
    micro_batch_tokens: int,
    progress: Progress = lambda line: None,
) -> list[float]:
    """The value at the last token of each sequence, none of which is empty.

    What the sequences of a group begin with is computed once. Groups are batched with those of
    about their length, and packed under the budget of a micro-batch. What is not finite is computed
    once more by itself: it may have been the others that it shared a bin with.
    """
    whole = [(group, tuple(row)) for group, row in zip(group_ids, sequences, strict=True)]
    # The same twice in a group has the same score to the last bit.
    groups, rows = zip(*dict.fromkeys(whole), strict=True) if whole else ((), ())
    scores = np.zeros(len(rows))

    def score(numbers: Sequence[int], keys: Sequence) -> None:
        chosen = [rows[number] for number in numbers]
        scores[numbers] = _batch_scores(
            spec, parameters, chosen, keys, micro_batch_tokens, progress
        )

    for numbers in _length_classes(rows, groups):
        score(numbers, [groups[number] for number in numbers])
    alone = np.flatnonzero(~np.isfinite(scores)).tolist()
    if alone:
        score(alone, alone)
    found = dict(zip(dict.fromkeys(whole), scores.tolist(), strict=True))
    return [found[key] for key in whole]


def _length_classes(sequences: Sequence[Sequence[int]], group_ids: Sequence) -> list[list[int]]:
    """The sequences whose group's longest has about the same length, within a factor of two."""
    longest: dict = {}
    for tokens, group in zip(sequences, group_ids, strict=True):
        longest[group] = max(longest.get(group, SHORTEST_CLASS), len(tokens))
    classes: dict[int, list[int]] = {}
    for number, group in enumerate(group_ids):
        classes.setdefault((longest[group] - 1).bit_length(), []).append(number)
    return [classes[key] for key in sorted(classes)]


def _batch_scores(spec, parameters, sequences, group_ids, budget: int, progress: Progress):
    """The scores of sequences that are packed into one batch."""
    batch, keys = pack_sequences(sequences, group_ids)
    values_PGT = score_batch(spec, {}, parameters, batch, budget, progress)
    return [float(values[-1]) for values in unpack(values_PGT, batch, keys)]


def pack_sequences(
    sequences: Sequence[Sequence[int]],
    group_ids: Sequence,
    weights: Sequence[float] | None = None,
) -> tuple[UpdateBatch, list[tuple]]:
    """(sequences as a batch, the key of the group that each is in there).

    The value in the last place of each is that of its last token, and so is its weight, which
    stands among the advantages with zeros before it. A key begins with the sequence's group id:
    sequences of one group that share no first token are in groups of their own.
    """
    keys, shared = _shared_prefixes(sequences, group_ids)
    heads = [tokens[: shared[key]] for tokens, key in zip(sequences, keys, strict=True)]
    # The value in a place is that of the state before its target: one target more is at the end.
    tails = [[*tokens[shared[key] :], 0] for tokens, key in zip(sequences, keys, strict=True)]
    advantages = weights and [
        [0.0] * (len(tail) - 1) + [weight] for tail, weight in zip(tails, weights, strict=True)
    ]
    batch = pack(
        group_ids=keys,
        prompt_tokens=heads,
        completion_tokens=tails,
        advantages=advantages,
        temperature=1.0,
    )
    return batch, keys


def _shared_prefixes(sequences: Sequence[Sequence[int]], group_ids: Sequence):
    """(a key for each sequence, how many first tokens those of a key share, at least one).

    The sequences of a group have one key, unless they share nothing.
    """
    members: dict = {}
    for number, group in enumerate(group_ids):
        members.setdefault(group, []).append(number)
    keys: list = [None] * len(sequences)
    shared = {}
    for group, numbers in members.items():
        length = common_length([sequences[number] for number in numbers])
        for number in numbers:
            keys[number] = (group, number) if length == 0 else (group, numbers[0])
            shared[keys[number]] = max(length, 1)
    return keys, shared
