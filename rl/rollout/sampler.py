"""Sample groups of completions.

1. Prompts are sorted by length and packed into batches of equal shape.
2. A batch's prompts are computed once each, and every row draws its first token.
3. All rows decode a few tokens a dispatch; the host looks for their ends.
4. When every row of the batch has ended, the next batch runs.

A sample's tokens depend on its prompt and its keys alone: not on its batch or its place there.
"""

import time
from collections.abc import Callable, Sequence

from rl.errors import MeshdialError
from rl.models.shared_prefix import num_shared_tokens
from rl.models.spec import ModelSpec, Parameters
from rl.rollout.batching import plan_batches
from rl.rollout.completion import Completion, Row, Tokenizer
from rl.rollout.engine import Engine
from rl.rollout.sampling import SamplingConfig
from rl.sharding import num_row_shards


def generate(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    sample_keys: tuple[int, int, Sequence[int]],
    group_size: int,
    sampling: SamplingConfig,
    max_rows: int,
    progress: Callable[[str], None] = lambda line: None,
    check_alive: Callable[[], None] = lambda: None,
    figures: dict | None = None,
    steps_per_dispatch: int | None = None,
) -> list[list[Completion]]:
    """`group_size` completions of each prompt (its token ids), in the prompts' order.

    sample_keys: (seed, iteration, a number for each prompt), which with a sample's index in its
    group and a token's position decide every random draw; each is from 0 to 2**32 - 1.
    max_rows: most samples at once, on each replica of the model that the mesh holds.
    check_alive: called between dispatches; what it raises ends the call. figures: a dict that
    receives num_tokens (sampled), seconds, decode_steps (of the model, after the prompts),
    row_steps (decode steps times rows, unused ones too), num_batches.
    steps_per_dispatch: 1 to 8; by the model's size where it is not given.

    Raises MeshdialError for a prompt that is empty or too long, and for logits that are NaN.
    """
    began = time.perf_counter()
    _check_prompts(spec, prompts, sample_keys[2], sampling)
    lengths = [len(prompt) for prompt in prompts]
    plan = plan_batches(lengths, group_size, max_rows, num_row_shards())
    engine = Engine(
        spec,
        trainable,
        frozen,
        tokenizer,
        prompts,
        sample_keys,
        sampling,
        plan,
        num_shared_tokens(prompts) if plan.num_prompts > 1 else 0,
        steps_per_dispatch,
        progress,
        check_alive,
    )
    groups: list[list[Row]] = [[] for _ in prompts]
    for batch in plan.batches:
        for prompt, rows in zip(batch.prompts, engine.run(batch), strict=True):
            groups[prompt] += rows
    if figures is not None:
        figures.update(
            num_tokens=sum(len(row.tokens) for rows in groups for row in rows),
            seconds=time.perf_counter() - began,
            decode_steps=engine.decode_steps,
            row_steps=engine.row_steps,
            num_batches=len(plan.batches),
        )
    return [[row.completion() for row in rows] for rows in groups]


def _check_prompts(spec, prompts, prompt_numbers, sampling: SamplingConfig) -> None:
    context = spec.config.max_position_embeddings
    longest = context - sampling.max_tokens
    if longest < 1:
        raise MeshdialError(
            f"rollout.max_tokens is {sampling.max_tokens}, expected less than the model's "
            f"max_position_embeddings, {context}"
        )
    for number, prompt in zip(prompt_numbers, prompts, strict=True):
        if not len(prompt):
            raise MeshdialError(f"prompt {number} has no tokens, expected at least one")
        if len(prompt) > longest:
            raise MeshdialError(
                f"prompt {number} has {len(prompt)} tokens, expected at most {longest}: the model's"
                f" max_position_embeddings less max_tokens, {sampling.max_tokens}"
            )
