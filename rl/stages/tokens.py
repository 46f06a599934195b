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
    array = table[column].combine_chunks()
    offsets = array.offsets.to_numpy()
    values = array.values.to_numpy(zero_copy_only=False)
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def update_batch(
    rollouts: pa.Table,
    temperature: float,
    max_tokens: int,
    tables: Mapping[str, tuple[pa.Table, str]] = MappingProxyType({}),
) -> UpdateBatch:
    """Rollouts with the columns of other tables, laid out by groups.

    `max_tokens` is the longest that a completion can be; `tables` maps an argument of `pack` to
    the table and the column that it comes from.
    """
    more = {}
    for argument, (table, column) in tables.items():
        joined = join(rollouts.select(["sample_id"]), table, [column])
        is_list = pa.types.is_list(joined.schema.field(column).type)
        more[argument] = lists(joined, column) if is_list else joined[column].to_numpy()
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
