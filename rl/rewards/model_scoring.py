"""Reward models: a sequence classifier's one score of a prompt and its completion.

A reward model has a tokenizer, and maybe a chat template, of its own, so that it reads the text of
a rollout rather than its tokens, in the form it was trained on.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from rl.errors import MeshdialError
from rl.learner import pack, score_batch, unpack
from rl.models.shared_prefix import common_length
from rl.models.spec import ModelSpec, Parameters
from rl.models.tokenizer import Tokenizer
from rl.rewards.processes import Score

Progress = Callable[[str], None]


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
    finite; each says why.
    """
    names = prompts["prompt_id"].to_pylist()
    chats = dict(zip(names, prompts["messages"].to_pylist(), strict=True))
    rows = rollouts.select(["prompt_id", "prompt", "completion", "group_id"]).to_pylist()
    for row in rows:
        if row["prompt_id"] not in chats:
            raise MeshdialError(
                f"the rollouts have a prompt {row['prompt_id']!r}, which is not in their table"
            )
    limit = spec.config.max_position_embeddings
    sequences, scores = [], []
    for row in rows:
        tokens, score = _read(tokenizer, _prompt(row, chats), row["completion"], limit)
        sequences.append(tokens)
        scores.append(score)
    kept = [number for number, score in enumerate(scores) if score is None]
    found = score_sequences(
        *(spec, parameters, [sequences[number] for number in kept]),
        *([rows[number]["group_id"] for number in kept], micro_batch_tokens, progress),
    )
    for number, value in zip(kept, found, strict=True):
        is_number = math.isfinite(value)
        scores[number] = Score(value) if is_number else Score(None, f"the model's score is {value}")
    return scores


def sequence_tokens(
    tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, str]], completion: str
) -> list[int]:
    """What a reward model reads: the two texts as one, or, of a prompt of messages, the chat with
    the completion as the assistant's message."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt + completion)
    chat = [*prompt, {"role": "assistant", "content": completion}]
    return tokenizer.encode(tokenizer.render_chat(chat, is_open=False), special_tokens=False)


def _prompt(row: Mapping, chats: Mapping[str, str | None]) -> str | list[dict]:
    messages = chats[row["prompt_id"]]
    return row["prompt"] if messages is None else json.loads(messages)


def _read(tokenizer: Tokenizer, prompt, completion: str, limit: int):
    """(tokens, None), or ([], why the model cannot read them)."""
    try:
        tokens = sequence_tokens(tokenizer, prompt, completion)
    except MeshdialError as error:
        return [], Score(None, str(error))
    if not tokens:
        return [], Score(None, "its prompt and completion have no tokens")
    if len(tokens) > limit:
        reason = f"its prompt and completion have {len(tokens)} tokens, the model reads {limit}"
        return [], Score(None, reason)
    return tokens, None


def score_sequences(
    spec: ModelSpec,
    parameters: Parameters,
    sequences: Sequence[Sequence[int]],
    group_ids: Sequence,
    micro_batch_tokens: int,
    progress: Progress = lambda line: None,
) -> list[float]:
    """The value at the last token of each sequence.

    What the sequences of a group begin with is computed once. They are packed by length, under the
    budget of a micro-batch.
    """
    if not sequences:
        return []
    keys, shared = _shared_prefixes(sequences, group_ids)
    heads = [tokens[: shared[key]] for tokens, key in zip(sequences, keys, strict=True)]
    # The value in a place is that of the state before its target: one target more is at the end.
    tails = [[*tokens[shared[key] :], 0] for tokens, key in zip(sequences, keys, strict=True)]
    batch = pack(group_ids=keys, prompt_tokens=heads, completion_tokens=tails, temperature=1.0)
    values_PGT = score_batch(spec, {}, parameters, batch, micro_batch_tokens, progress)
    return [float(values[-1]) for values in unpack(values_PGT, batch, keys)]


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
