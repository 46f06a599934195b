"""Between tables and the model: prompts become tokens once, rollouts become an update batch."""

import itertools
import json
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from rl.artifacts import join
from rl.learner import UpdateBatch, pack
from rl.models.tokenizer import Tokenizer


def encode_prompts(prompts: pa.Table, tokenizer: Tokenizer) -> tuple[list[str], list[list[int]]]:
    """(text, tokens) of each prompt; a conversation goes through the tokenizer's chat template,
    which writes the special tokens itself."""
    texts, tokens = [], []
    for row in prompts.select(["prompt", "messages"]).to_pylist():
        is_chat = row["prompt"] is None
        text = tokenizer.render_chat(json.loads(row["messages"])) if is_chat else row["prompt"]
        texts.append(text)
        tokens.append(tokenizer.encode(text, special_tokens=not is_chat))
    return texts, tokens


def lists(table: pa.Table, column: str) -> list[np.ndarray]:
    """A list column as one NumPy array a row."""
    return _lists(table[column])


def _lists(column: pa.ChunkedArray) -> list[np.ndarray]:
    array = column.combine_chunks()
    offsets = array.offsets.to_numpy()
    values = array.values.to_numpy(zero_copy_only=False)
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def update_batch(
    rollouts: pa.Table,
    temperature: float,
    max_tokens: int,
    tables: Mapping[str, tuple[pa.Table, str]] = MappingProxyType({}),
    advantages: pa.Table | None = None,
) -> UpdateBatch:
    """Rollouts with the columns of other tables, laid out by groups.

    `max_tokens` is the longest that a completion can be; `tables` maps an argument of `pack` to
    the table and the list column that it comes from. Only the groups that the table `advantages`
    says are used; without it, all.
    """
    joined = {
        argument: join(rollouts.select(["sample_id"]), table, [column])[column]
        for argument, (table, column) in tables.items()
    }
    if advantages is not None:
        is_used = join(rollouts.select(["sample_id"]), advantages, ["is_used"])["is_used"]
        rollouts = rollouts.filter(is_used)
        joined = {argument: column.filter(is_used) for argument, column in joined.items()}
    more = {argument: _lists(column) for argument, column in joined.items()}
    return pack(
        group_ids=rollouts["group_id"].to_pylist(),
        prompt_tokens=lists(rollouts, "prompt_tokens"),
        completion_tokens=lists(rollouts, "completion_tokens"),
        completion_mask=lists(rollouts, "completion_mask"),
        rollout_logprobs=lists(rollouts, "rollout_logprobs"),
        temperature=temperature,
        max_tokens=max_tokens,
        **more,
    )
