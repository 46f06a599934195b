"""Seconds of each stage on a mesh, at the bound of arithmetic, memory or the links inside it.

Arithmetic: a multiply-add is 2 FLOPs, so a forward pass takes 2 a parameter and token, and a
backward pass twice that: 6 N in all (Kaplan et al. 2020, section 2.1), and the attention's pairs
beside it (Chowdhery et al. 2022, appendix B; here masked pairs are computed too). A frozen kernel
needs no gradient of its own: 4 N. Decoding streams all weights and caches once a token (Pope et
al. 2022, section 2). Links: parameters are gathered over fsdp and gradients reduced (Rajbhandari et
al. 2020, section 7), activations summed over tensor (Shoeybi et al. 2019, section 3). Transfers may
run beside the arithmetic, so that a stage takes as long as its slowest part.
"""

import functools
import math
from dataclasses import dataclass, fields

from rl.models.token_scores import MAX_LOGITS
from rl.models.transformer import is_lora
from rl.plan.dial import PlannedMesh
from rl.plan.hardware import Device
from rl.plan.memory import cache_bytes_per_token, num_scores, num_targets
from rl.plan.shape import (
    FLOAT32,
    device_size,
    gathered_size,
    itemsize,
    num_parameters,
    tensors,
    trainable,
)
from rl.plan.work import Work
from rl.rollout.engine import suited_steps


@dataclass(frozen=True)
class Bound:
    """Seconds that each part of a stage takes at least; parts run beside each other."""

    arithmetic: float = 0.0
    memory: float = 0.0
    link: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.arithmetic, self.memory, self.link)

    @property
    def limit(self) -> str:
        """Which part is the slowest."""
        return max(("arithmetic", "memory", "link"), key=lambda part: getattr(self, part))


@dataclass(frozen=True)
class Kernels:
    """Parameters that each token is multiplied by: those of the layers, of the output or value
    head, and of the adapter; the embedding is looked up, and norms are negligible."""

    layers: int
    head: int
    adapter: int


@functools.cache
def kernels(work: Work) -> Kernels:
    config = work.spec.config
    every = tensors(work.spec)
    layers = sum(t.size for t in every if "layers." in t.name and t.name.endswith(".kernel"))
    adapter = num_parameters(tuple(t for t in every if is_lora(t.name)))
    outputs = 1 if work.spec.head == "value" else config.vocab_size
    return Kernels(layers, config.hidden_size * outputs, adapter)


# Arithmetic


def forward_flops(work: Work, tokens: int, scores: int, num_logits: int) -> float:
    """2 a parameter and token, and 4 a channel of each query-key pair: scores and their output."""
    n, config = kernels(work), work.spec.config
    channels = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    attention = 4 * channels * scores
    return 2 * (n.layers + n.adapter) * tokens + 2 * n.head * num_logits + attention


def gradient_flops(work: Work, tokens: int, scores: int, num_logits: int) -> float:
    """Forward and backward: 6 a trained parameter and token, 4 a frozen one, attention thrice;
    logits that are computed in chunks are computed twice, rematerialised layers too."""
    n, is_full, is_value = kernels(work), work.spec.lora is None, work.spec.head == "value"
    forward = forward_flops(work, tokens, scores, num_logits)
    frozen_head = 0 if is_value else 2 * n.head * num_logits
    saved = 0 if is_full else 2 * n.layers * tokens + frozen_head
    is_chunked = not is_value and num_logits * work.spec.config.vocab_size > MAX_LOGITS
    again = forward_flops(work, tokens, scores, 0) if work.is_rematerialised else 0
    return 3 * forward + again - saved + (2 * n.head * num_logits if is_chunked else 0)


# Stages


@functools.cache
def update_bound(work: Work, mesh: PlannedMesh, device: Device) -> Bound:
    """All updates of an iteration, in all of its epochs: each row shard computes one micro-batch at
    a time."""
    num_groups, shards = work.num_prompts // work.num_updates, mesh.num_row_shards
    num_parts, shape = work.micro_batches(num_groups, work.completion_tokens, shards)
    num_updates, tokens = work.num_epochs * work.num_updates, shape.num_tokens
    rounds = num_updates * math.ceil(num_parts / shards)
    flops = gradient_flops(work, tokens, num_scores(shape), num_targets(shape))
    moved = gather_bytes(work, mesh, work.spec.dtype) + reduce_bytes(work, mesh)
    moved += 2 * tensor_bytes(work, mesh, tokens, work.spec.dtype)
    return Bound(
        arithmetic=rounds * flops / mesh.tensor / device.flops(work.spec.dtype),
        link=rounds * moved / device.link,
    )


@functools.cache
def scoring_bound(work: Work, mesh: PlannedMesh, device: Device) -> Bound:
    """Log-probabilities, or values, of all rollouts: a forward pass."""
    shards = mesh.num_row_shards
    num_parts, shape = work.micro_batches(work.num_sampled, work.completion_tokens, shards)
    rounds, tokens = math.ceil(num_parts / shards), shape.num_tokens
    flops = forward_flops(work, tokens, num_scores(shape), num_targets(shape))
    moved = gather_bytes(work, mesh, work.spec.dtype)
    moved += tensor_bytes(work, mesh, tokens, work.spec.dtype)
    return Bound(
        arithmetic=rounds * flops / mesh.tensor / device.flops(work.spec.dtype),
        memory=rounds * streamed_bytes(work, mesh, work.spec.dtype) / device.bandwidth,
        link=rounds * moved / device.link,
    )


def models_bound(work: Work, mesh: PlannedMesh, device: Device) -> Bound:
    """All reward models, one after the other; sequences are taken to be as long as the policy's."""
    found = [scoring_bound(work.of_model(m.spec), mesh, device) for m in work.reward_models]
    return Bound(*(sum(getattr(one, f.name) for one in found) for f in fields(Bound)))


@dataclass(frozen=True)
class Decoding:
    """`rows` are those of all replicas, decoded at once; a step adds a token to each of them.
    `num_turns`: how often all of them are filled anew."""

    rows: int
    num_turns: float
    prefill: Bound
    step: Bound
    num_steps: int

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.step.seconds

    @property
    def seconds(self) -> float:
        """Of an iteration's rollouts."""
        return self.num_turns * (self.prefill.seconds + self.num_steps * self.step.seconds)


@functools.cache
def decoding(work: Work, mesh: PlannedMesh, device: Device) -> Decoding:
    """A step streams the weights of its tensor shard once for all rows of a replica, and their
    caches at half of their completions' length; what a group shares is read once."""
    demand = work.demand(mesh.num_row_shards)
    rows, flop_rate = demand.num_rows, device.flops(work.rollout_dtype)
    prompts = rows / work.group_size
    weights = streamed_bytes(work, mesh, work.rollout_dtype)
    half = work.completion_tokens / 2
    cached = (prompts * work.prompt_tokens + rows * half) * cache_bytes_per_token(work)
    scores = round(rows * (work.prompt_tokens + half))
    gathered = gather_bytes(work, mesh, work.rollout_dtype)
    step = Bound(
        arithmetic=forward_flops(work, rows, scores, rows) / mesh.tensor / flop_rate,
        memory=(weights + cached / mesh.tensor) / device.bandwidth,
        link=(
            gathered / steps_per_dispatch(work, rows * mesh.num_row_shards)
            + tensor_bytes(work, mesh, rows, work.rollout_dtype)
        )
        / device.link,
    )
    tokens, prompt_scores = prompts * work.prompt_tokens, prompts * work.prompt_tokens**2
    prefill = Bound(
        arithmetic=forward_flops(work, tokens, prompt_scores, prompts) / mesh.tensor / flop_rate,
        memory=weights / device.bandwidth,
        link=(gathered + tensor_bytes(work, mesh, tokens, work.rollout_dtype)) / device.link,
    )
    num_turns = demand.num_prompts * work.group_size / rows
    num_rows = rows * mesh.num_row_shards
    num_steps = work.completion_tokens - 1  # the first token comes with the prompts
    return Decoding(num_rows, num_turns, prefill, step, num_steps)


def steps_per_dispatch(work: Work, num_rows: int) -> int:
    """As the rollout engine chooses them on accelerators; weights are gathered once a dispatch."""
    return suited_steps(work.spec, num_rows, "accelerator", gathers=False)


# Bytes that each device reads or sends


def streamed_bytes(work: Work, mesh: PlannedMesh, dtype: str) -> float:
    """Weights that a forward pass reads on each device: a tensor shard of all kernels."""
    n = kernels(work)
    return (n.layers + n.adapter + n.head) * itemsize(dtype) / mesh.tensor


def gather_bytes(work: Work, mesh: PlannedMesh, dtype: str) -> float:
    """What each device receives when all parameters are gathered over fsdp."""
    size = gathered_size(tensors(work.spec), mesh.axes)
    return size * (mesh.fsdp - 1) / mesh.fsdp * itemsize(dtype)


def reduce_bytes(work: Work, mesh: PlannedMesh) -> float:
    """Gradients of one micro-batch: reduced and scattered over fsdp, then summed over data."""
    chosen, size = trainable(work.spec), itemsize(work.spec.dtype)
    scattered = gathered_size(chosen, mesh.axes) * (mesh.fsdp - 1) / mesh.fsdp
    summed = device_size(chosen, mesh.axes) * 2 * (mesh.data - 1) / mesh.data
    return (scattered + summed) * size


def tensor_bytes(work: Work, mesh: PlannedMesh, tokens: int, dtype: str) -> float:
    """Two sums of [tokens, width] a layer in a forward pass, after attention and feed-forward."""
    config = work.spec.config
    sent = 2 * (mesh.tensor - 1) / mesh.tensor * config.hidden_size * itemsize(dtype)
    return 2 * config.num_hidden_layers * tokens * sent


def checkpoint_bytes(work: Work) -> int:
    """What an update writes: trained parameters and the optimizer's moments."""
    per_parameter = itemsize(work.spec.dtype) + work.num_moments * FLOAT32
    return num_parameters(trainable(work.spec)) * per_parameter
