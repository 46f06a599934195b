"""What is measured: two model shapes, and the requests that every contender gets.

Only the standard library, so that contenders in other environments can import it.
"""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Llama decoder with tied embeddings and no biases."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int

    @property
    def num_parameters(self) -> int:
        return self.num_kernel_parameters + (2 * self.layers + 1) * self.width

    @property
    def num_kernel_parameters(self) -> int:
        """Those that every token is multiplied by: projections, and the embedding as LM head."""
        return self.num_projection_parameters + self.vocabulary * self.width

    @property
    def num_projection_parameters(self) -> int:
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_size
        return self.layers * (attention + 3 * self.width * self.ffn)

    def flops_per_token(self, context: float) -> float:
        """Of a forward pass: two for each parameter, and those of attention to so many keys."""
        return 2 * self.num_kernel_parameters + self.attention_flops(context)

    def attention_flops(self, num_keys: float) -> float:
        """Four for each feature of a query and each key."""
        return 4 * self.layers * self.heads * self.head_size * num_keys


SHAPES = {
    "tiny": Shape(2, 32, 4, 2, 8, 64, 128),
    "a": Shape(4, 256, 4, 2, 64, 1024, 4096),
    "b": Shape(30, 576, 9, 3, 64, 1536, 49152),  # SmolLM2-135M
}

GROUP_SIZE = 8
FIRST_TOKEN = 10  # prompts hold no special token


@dataclass(frozen=True)
class Requests:
    """Prompts of token ids, and how many tokens each sample of a prompt gets."""

    prompts: list[list[int]]
    limits_PG: list[list[int]]

    @property
    def samples(self) -> list[tuple[int, int]]:
        """(prompt, limit) of every sample, in order."""
        return [(p, limit) for p, limits in enumerate(self.limits_PG) for limit in limits]

    @property
    def num_new_tokens(self) -> int:
        return sum(map(sum, self.limits_PG))

    @property
    def mean_context(self) -> float:
        """How many keys the average new token attends to."""
        seen = [len(self.prompts[p]) * n + n * (n + 1) / 2 for p, n in self.samples]
        return sum(seen) / self.num_new_tokens


def make_requests(
    shape: Shape,
    num_requests: int = 128,
    prompt_lengths: tuple[int, int] = (64, 128),
    mean_new: float = 48,
    max_new: int = 128,
    seed: int = 0,
) -> Requests:
    """Groups of GROUP_SIZE samples whose lengths are min(max_new, geometric of mean `mean_new`).

    Fewer requests are the first of more: no prompt's draws depend on how many follow.
    """
    prompts, limits_PG = [], []
    for number in range(-(-num_requests // GROUP_SIZE)):
        generator = random.Random(1000 * seed + number)
        length = generator.randint(*prompt_lengths)
        ids = range(FIRST_TOKEN, shape.vocabulary)
        prompts.append(generator.choices(ids, k=length))
        lengths = [geometric(generator, mean_new) for _ in range(GROUP_SIZE)]
        limits_PG.append([min(max_new, length) for length in lengths])
    return Requests(prompts, limits_PG)


@dataclass(frozen=True)
class Batch:
    """What an update trains on: P groups, every completion with an advantage."""

    prompts: list[list[int]]
    completions_PG: list[list[list[int]]]
    advantages_PG: list[list[float]]

    @property
    def num_trained_tokens(self) -> int:
        return sum(len(completion) for group in self.completions_PG for completion in group)

    @property
    def rows(self) -> list[tuple[list[int], list[int], float]]:
        """(prompt, completion, advantage) of every completion, in order."""
        return [
            (prompt, completion, advantage)
            for prompt, group, advantages in zip(
                self.prompts, self.completions_PG, self.advantages_PG, strict=True
            )
            for completion, advantage in zip(group, advantages, strict=True)
        ]

    def flops(self, shape: Shape) -> float:
        """Of an update: three forward passes, a prompt once, the LM head on completions only."""
        num_tokens = sum(map(len, self.prompts)) + self.num_trained_tokens
        num_keys = sum(n * (n + 1) / 2 for n in map(len, self.prompts)) + sum(
            len(prompt) * len(completion) + len(completion) * (len(completion) + 1) / 2
            for prompt, completion, _ in self.rows
        )
        head = shape.vocabulary * shape.width * self.num_trained_tokens
        parameters = shape.num_projection_parameters * num_tokens + head
        return 3 * (2 * parameters + shape.attention_flops(num_keys))


def make_batch(
    shape: Shape, num_groups: int, group_size: int, prompt_length: int, lengths: tuple[float, int]
) -> Batch:
    """Completions of min(longest, geometric) tokens; `lengths` are the mean and the longest.

    A mean of at least the longest makes all of them that long.
    """
    mean, longest = lengths
    generator = random.Random(num_groups)
    ids = range(FIRST_TOKEN, shape.vocabulary)

    def completion() -> list[int]:
        length = longest if mean >= longest else min(longest, geometric(generator, mean))
        return generator.choices(ids, k=length)

    return Batch(
        prompts=[generator.choices(ids, k=prompt_length) for _ in range(num_groups)],
        completions_PG=[[completion() for _ in range(group_size)] for _ in range(num_groups)],
        advantages_PG=[[generator.gauss() for _ in range(group_size)] for _ in range(num_groups)],
    )


def geometric(generator: random.Random, mean: float) -> int:
    """At least 1."""
    return 1 + int(math.log(1 - generator.random()) / math.log(1 - 1 / mean))


def reward_of(tokens: list[int]) -> float:
    """Something to learn from that differs from sample to sample."""
    return float(sum(tokens) % 7)
