"""Bytes on one device of each mesh, by role, at the moment when each role needs most.

Resident, as long as the mesh's process lives: parameters (sharded over fsdp and tensor) and the
optimizer's moments. In turn, since the stages of a mesh take turns: gradients, activations, the
key-value cache, and a second copy of parameters. A mesh's peak is what all of its roles hold, and
the most that one of them needs in turn.

What it does not count: versions that a process keeps only because its memory has room, the room
that a growing cache needs besides itself, the compiler's scratch space, fragmentation.
"""

import functools
from dataclasses import dataclass

from rl.models.transformer import MAX_LOGITS
from rl.plan.dial import Dial, PlannedMesh
from rl.plan.shape import (
    FLOAT32,
    Chosen,
    base,
    device_size,
    gathered_size,
    itemsize,
    tensors,
    trainable,
)
from rl.plan.work import Work
from rl.rollout.batching import bucket, prompt_slots

LOGIT_COPIES = 3
"""Float32 arrays over the vocabulary at once: logits, probabilities, and a gradient or a draw."""


@dataclass(frozen=True)
class RoleMemory:
    """Bytes on each device of a role's mesh. `copies`: parameters gathered over fsdp for use (XLA
    may hold less of them at once), and on a mesh of its own the rollout's next version, loaded
    while it still holds this one."""

    role: str
    mesh: PlannedMesh
    parameters: int
    optimizer: int
    gradients: int
    copies: int
    activations: int
    cache: int

    @property
    def resident(self) -> int:
        return self.parameters + self.optimizer

    @property
    def in_turn(self) -> int:
        return self.gradients + self.copies + self.activations + self.cache

    @property
    def peak(self) -> int:
        """Of the role alone."""
        return self.resident + self.in_turn


def memory_by_role(work: Work, dial: Dial) -> list[RoleMemory]:
    """One entry for each role that holds anything; arrays that two roles of a mesh share count for
    the first of them (actor, rollout, reference)."""
    held: set[tuple] = set()
    roles = []
    for role, mesh in dial.roles.items():
        parameters = 0
        for name, chosen, dtype in _parts(work, role):
            if (mesh, name, dtype) not in held:
                held.add((mesh, name, dtype))
                parameters += device_size(chosen, mesh.axes) * itemsize(dtype)
        roles.append(_role_memory(work, dial, role, mesh, parameters))
    return roles


def mesh_peak(roles: list[RoleMemory], mesh: PlannedMesh) -> int:
    """Bytes on each device of a mesh at its fullest moment."""
    here = [role for role in roles if role.mesh == mesh]
    return sum(role.resident for role in here) + max(role.in_turn for role in here)


def _parts(work: Work, role: str) -> list[tuple[str, Chosen, str]]:
    """(what, parameters, dtype) that a role computes with. The reference is the base, which under
    an adapter is the actor's frozen part too; fully trained, the policy has left the base."""
    spec = work.spec
    if role == "reference":
        return [("base", base(spec), spec.dtype)]
    dtype = work.rollout_dtype if role == "rollout" else spec.dtype
    frozen = [("base", base(spec), dtype)] if spec.lora else []
    return [*frozen, ("policy", trainable(spec), dtype)]


def _role_memory(
    work: Work, dial: Dial, role: str, mesh: PlannedMesh, parameters: int
) -> RoleMemory:
    spec, axes = work.spec, mesh.axes
    used = base(spec) if role == "reference" else tensors(spec)
    dtype = work.rollout_dtype if role == "rollout" else spec.dtype
    copies = gathered_size(used, axes) * itemsize(dtype) if mesh.fsdp > 1 else 0
    optimizer = gradients = cache = 0
    if role == "actor":
        size = device_size(trainable(spec), axes)
        optimizer = work.num_moments * size * FLOAT32
        # The sum over micro-batches is float32; each micro-batch's own is in the parameters' dtype.
        gradients = size * (FLOAT32 + itemsize(spec.dtype))
        activations = update_activations(work, mesh)
    elif role == "rollout":
        if not dial.is_colocated:
            incoming = device_size(trainable(spec), axes) * itemsize(dtype)
            copies = max(copies, incoming)
        activations = rollout_activations(work, mesh)
        cache = cache_bytes(work, mesh)
    else:
        activations = scoring_activations(work, mesh)
    return RoleMemory(role, mesh, parameters, optimizer, gradients, copies, activations, cache)


# What is kept between a forward and its backward pass


@functools.cache
def update_activations(work: Work, mesh: PlannedMesh) -> int:
    """Bytes of one micro-batch's activations on each device, without rematerialisation.

    layers x (tokens x `bytes_per_token` + scores x `bytes_per_score`), and the logits: what JAX
    saves for the backward pass of `rl.models.layers` and `attention`, read off its residuals.
    Each row shard has a micro-batch of its own. XLA keeps about 0.8 of this on a CPU.
    """
    _, prompts, members = work.micro_batches(work.num_prompts // work.num_updates)
    rows = prompts * members
    tokens, scores = tokens_and_scores(work, prompts, rows, work.max_tokens)
    a_layer = tokens * bytes_per_token(work, mesh.tensor) + scores * bytes_per_score(
        work, mesh.tensor
    )
    return int(a_layer * work.spec.config.num_hidden_layers) + logit_bytes(
        work, rows * work.max_tokens, mesh.tensor
    )


def tokens_and_scores(work: Work, prompts: int, rows: int, length: int) -> tuple[int, int]:
    """(tokens through the layers, query-key pairs of one head) of a micro-batch with completions
    of this length: each prompt once, every completion token but its last; masked pairs too."""
    prompt, own = work.prompt_tokens, length - 1
    tokens = prompts * prompt + rows * own
    return tokens, prompts * prompt * prompt + rows * own * (prompt + own)


def bytes_per_token(work: Work, tensor: int) -> float:
    """Kept of each token by each layer. D, the width, is whole on every device; heads and
    feed-forward are split over `tensor`.

    D: float32, the input of each norm and its square's derivative; in the model's dtype, the
    normalised input where scales are trained, and each norm's output where a kernel or adapter
    behind it is trained. Heads: queries, keys, values, and the output where o_proj is trained.
    Feed-forward: gate, up and three of SiLU, and the product where down_proj is trained. Adapters:
    their inner activation.
    """
    spec, config = work.spec, work.spec.config
    targets = spec.lora.targets if spec.lora else ()

    def is_trained(*names: str) -> bool:
        return spec.lora is None or any(name in targets for name in names)

    norm_outputs = is_trained("q_proj", "k_proj", "v_proj") + is_trained("gate_proj", "up_proj")
    normalised = 0 if spec.lora else 2
    heads = 1 + is_trained("o_proj")
    channels = heads * config.num_attention_heads + 2 * config.num_key_value_heads
    feed_forward = (5 + is_trained("down_proj")) * config.intermediate_size
    adapters = len(targets) * spec.lora.rank if spec.lora else 0
    split = (channels * config.head_dim + feed_forward) / tensor
    whole = (norm_outputs + normalised) * config.hidden_size + adapters
    return itemsize(spec.dtype) * (whole + split) + FLOAT32 * 4 * config.hidden_size


def bytes_per_score(work: Work, tensor: int) -> float:
    """Kept of each query-key pair by each layer: for each head the masked score and its
    exponential (float32), the weight (in the model's dtype), and the mask."""
    spec = work.spec
    return (2 * FLOAT32 + itemsize(spec.dtype) + 1) * spec.config.num_attention_heads / tensor


def logit_bytes(work: Work, num_tokens: int, tensor: int) -> int:
    """`completion_logprobs` holds at most MAX_LOGITS logits at once and computes more in chunks."""
    logits = min(num_tokens * work.spec.config.vocab_size, MAX_LOGITS)
    is_split = work.spec.config.vocab_size % tensor == 0
    return LOGIT_COPIES * FLOAT32 * logits // (tensor if is_split else 1)


# What a forward pass needs


@functools.cache
def scoring_activations(work: Work, mesh: PlannedMesh) -> int:
    """Bytes of a micro-batch's forward pass alone: one layer at a time, and the logits."""
    _, prompts, members = work.micro_batches(work.num_prompts)
    tokens, scores = tokens_and_scores(work, prompts, prompts * members, work.max_tokens)
    num_logits = prompts * members * work.max_tokens
    return _forward_bytes(work, work.spec.dtype, tokens, scores, mesh.tensor) + logit_bytes(
        work, num_logits, mesh.tensor
    )


@functools.cache
def rollout_activations(work: Work, mesh: PlannedMesh) -> int:
    """Bytes of computing a batch's prompts, or of drawing a token for each row: whichever is more.
    Every row's logits are whole where a token is drawn."""
    plan = work.decode_plan(mesh.num_row_shards)
    prompts = plan.num_prompts // mesh.num_row_shards
    tokens, scores = prompts * work.prompt_tokens, prompts * work.prompt_tokens**2
    prefill = _forward_bytes(work, work.rollout_dtype, tokens, scores, mesh.tensor)
    logits = prompts * plan.group_size * work.spec.config.vocab_size
    return max(prefill, LOGIT_COPIES * FLOAT32 * logits)


def _forward_bytes(work: Work, dtype: str, tokens: int, scores: int, tensor: int) -> int:
    """The widest moments of a layer: three feed-forward arrays, or two of scores, beside three of
    the model's width."""
    config = work.spec.config
    wide = 3 * config.intermediate_size * tokens * itemsize(dtype)
    attention = 2 * FLOAT32 * config.num_attention_heads * scores
    narrow = 3 * config.hidden_size * tokens * itemsize(dtype)
    return int(narrow + max(wide, attention) / tensor)


# The key-value cache


def cache_bytes_per_token(work: Work) -> int:
    """2 x layers x key-value heads x head size x bytes of the rollout's dtype: 524,288 for
    Llama-2-7B in 16 bits."""
    config = work.spec.config
    channels = config.num_key_value_heads * config.head_dim
    return 2 * config.num_hidden_layers * channels * itemsize(work.rollout_dtype)


@functools.cache
def cache_bytes(work: Work, mesh: PlannedMesh) -> int:
    """The largest batch's cache on each device: a group's prompt once and every row's completion,
    in the engine's padded slots, rows over data and fsdp, heads over tensor."""
    plan = work.decode_plan(mesh.num_row_shards)
    prompts = plan.num_prompts // mesh.num_row_shards
    own_slots = bucket(work.max_tokens - 1) if work.max_tokens > 1 else 0
    slots = prompts * (prompt_slots(bucket(work.prompt_tokens)) + plan.group_size * own_slots)
    return slots * cache_bytes_per_token(work) // mesh.tensor
