"""Bytes on one device of each mesh, by role, at the moment when each role needs most.

Resident, as long as the mesh's process lives: parameters (sharded over fsdp and tensor) and the
optimizer's moments. In turn, since the stages of a mesh take turns: gradients, activations, the
key-value cache, and a second copy of parameters. A mesh's peak is what all of its roles hold, and
the most that one of them needs in turn.

What it does not count: versions that a process keeps only because its memory has room, the pages
that plain XLA attention gathers besides the pool, the compiler's scratch space, fragmentation.
"""

import functools
from dataclasses import dataclass, replace

from rl.learner.packing import Shape
from rl.models.token_scores import MAX_LOGITS
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
from rl.rollout.attention.pool import page_bytes
from rl.rollout.pages import pages_within
from rl.rollout.shapes import MAX_PREFILL_PAIRS, MAX_PREFILL_TOKENS

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
    """One entry for each role; arrays that two roles of a mesh share count for the first of them
    (actor, rollout, reference, reward, critic)."""
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
    an adapter is the actor's frozen part too, and a critic's; fully trained, the policy has left
    the base. A reference that is refreshed is a version of its own. A model of one source is the
    same, whoever reads it."""
    spec = work.spec
    if role == "reward":
        return [(m.source, tensors(m.spec), m.spec.dtype) for m in work.reward_models]
    if role == "critic":
        return _critic_parts(work)
    if role == "reference" and work.is_reference_refreshed:
        frozen = [("base", base(spec), spec.dtype)] if spec.lora else []
        return [*frozen, ("reference", trainable(spec), spec.dtype)]
    if role == "reference":
        return [("base", base(spec), spec.dtype)]
    dtype = work.rollout_dtype if role == "rollout" else spec.dtype
    frozen = [("base", base(spec), dtype)] if spec.lora else []
    return [*frozen, ("policy", trainable(spec), dtype)]


def _critic_parts(work: Work) -> list[tuple[str, Chosen, str]]:
    critic = work.critic
    trained = [("critic", trainable(critic.spec), critic.spec.dtype)]
    if critic.spec.lora is None:
        return trained
    if critic.source is None:  # the base as it is, its output head too
        return [("base", base(work.spec), work.spec.dtype), *trained]
    whole = tensors(replace(critic.spec, lora=None))
    return [(critic.source, whole, critic.spec.dtype), *trained]


def _role_memory(
    work: Work, dial: Dial, role: str, mesh: PlannedMesh, parameters: int
) -> RoleMemory:
    if role in ("actor", "critic"):
        held = _training(work.of_critic if role == "critic" else work, mesh)
    elif role == "rollout":
        held = _sampling(work, mesh, dial.is_colocated)
    elif role == "reference":
        held = _scoring(work, mesh, base(work.spec))
    else:  # one model is computed with at a time
        works = [work.of_model(model.spec) for model in work.reward_models]
        each = [_scoring(one, mesh, tensors(one.spec)) for one in works]
        held = {name: max(one[name] for one in each) for name in each[0]}
    nothing = dict.fromkeys(("optimizer", "gradients", "cache"), 0)
    return RoleMemory(role, mesh, parameters, **nothing | held)


def _training(work: Work, mesh: PlannedMesh) -> dict[str, int]:
    spec = work.spec
    size = device_size(trainable(spec), mesh.axes)
    return {
        "optimizer": work.num_moments * size * FLOAT32,
        # The sum over micro-batches is float32; each micro-batch's own is in the parameters' dtype.
        "gradients": size * (FLOAT32 + itemsize(spec.dtype)),
        "copies": _gathered(tensors(spec), mesh, spec.dtype),
        "activations": update_activations(work, mesh),
    }


def _sampling(work: Work, mesh: PlannedMesh, is_colocated: bool) -> dict[str, int]:
    spec, dtype = work.spec, work.rollout_dtype
    incoming = device_size(trainable(spec), mesh.axes) * itemsize(dtype)
    return {
        "copies": max(_gathered(tensors(spec), mesh, dtype), 0 if is_colocated else incoming),
        "activations": rollout_activations(work, mesh),
        "cache": cache_bytes(work, mesh),
    }


def _scoring(work: Work, mesh: PlannedMesh, used: Chosen) -> dict[str, int]:
    copies = _gathered(used, mesh, work.spec.dtype)
    return {"copies": copies, "activations": scoring_activations(work, mesh)}


def _gathered(used: Chosen, mesh: PlannedMesh, dtype: str) -> int:
    return gathered_size(used, mesh.axes) * itemsize(dtype) if mesh.fsdp > 1 else 0


# What is kept between a forward and its backward pass


@functools.cache
def update_activations(work: Work, mesh: PlannedMesh) -> int:
    """Bytes of one micro-batch's activations on each device.

    layers x (tokens x `bytes_per_token` + scores x `bytes_per_score`), and the logits: what JAX
    saves for the backward pass of `rl.models.layers` and `attention`, read off its residuals; the
    last layer keeps less. Rematerialised, only each layer's input, and one layer at a time whole.
    Each row shard has a micro-batch of its own. XLA keeps about 0.8 of this on a CPU.
    """
    num_groups = work.num_prompts // work.num_updates
    _, shape = work.micro_batches(num_groups, work.max_tokens, mesh.num_row_shards)
    config, tensor = work.spec.config, mesh.tensor
    a_layer = shape.num_tokens * bytes_per_token(work, tensor)
    a_layer += num_scores(shape) * bytes_per_score(work, tensor)
    inputs = shape.num_tokens * config.hidden_size * itemsize(work.spec.dtype)
    layers = config.num_hidden_layers
    kept = a_layer + layers * inputs if work.is_rematerialised else layers * a_layer
    return int(kept) + logit_bytes(work, num_targets(shape), tensor)


def num_targets(shape: Shape) -> int:
    """Places of a micro-batch whose token is predicted."""
    return shape.num_prompts * shape.num_bins * shape.bin_size


def num_scores(shape: Shape) -> int:
    """Query-key pairs of one head in a micro-batch: prompts see themselves, and each place of a bin
    sees the prompt and the bin; masked pairs too."""
    prompt = shape.prompt_size
    return shape.num_prompts * prompt**2 + num_targets(shape) * (prompt + shape.bin_size)


def bytes_per_token(work: Work, tensor: int) -> float:
    """Kept of each token by each layer, in the model's dtype. D, the width, is whole on every
    device; heads and feed-forward are split over `tensor`.

    D: the input of each norm, and its output where a kernel or adapter behind it is trained. Heads:
    queries, keys, values and the output, which is kept once more where o_proj is trained.
    Feed-forward: gate, up, and their product where down_proj is trained. Adapters: their inner
    activation.
    """
    spec, config = work.spec, work.spec.config
    targets = spec.lora.targets if spec.lora else ()

    def is_trained(*names: str) -> bool:
        return spec.lora is None or any(name in targets for name in names)

    norms = 2 + is_trained("q_proj", "k_proj", "v_proj") + is_trained("gate_proj", "up_proj")
    heads = 2 + is_trained("o_proj")
    channels = heads * config.num_attention_heads + 2 * config.num_key_value_heads
    feed_forward = (2 + is_trained("down_proj")) * config.intermediate_size
    adapters = len(targets) * spec.lora.rank if spec.lora else 0
    split = (channels * config.head_dim + feed_forward) / tensor
    return itemsize(spec.dtype) * (norms * config.hidden_size + adapters + split)


def bytes_per_score(work: Work, tensor: int) -> float:
    """Kept of each query-key pair by each layer: for each head exp(score), in the model's dtype."""
    return itemsize(work.spec.dtype) * work.spec.config.num_attention_heads / tensor


def logit_bytes(work: Work, num_tokens: int, tensor: int) -> int:
    """`token_scores` holds at most MAX_LOGITS logits at once and computes more in chunks; a value
    head has one number a token, which is not counted."""
    if work.spec.head == "value":
        return 0
    logits = min(num_tokens * work.spec.config.vocab_size, MAX_LOGITS)
    is_split = work.spec.config.vocab_size % tensor == 0
    return LOGIT_COPIES * FLOAT32 * logits // (tensor if is_split else 1)


# What a forward pass needs


@functools.cache
def scoring_activations(work: Work, mesh: PlannedMesh) -> int:
    """Bytes of a micro-batch's forward pass alone: one layer at a time, and the logits."""
    _, shape = work.micro_batches(work.num_sampled, work.max_tokens, mesh.num_row_shards)
    sizes = (shape.num_tokens, num_scores(shape), mesh.tensor)
    return _forward_bytes(work, work.spec.dtype, *sizes) + logit_bytes(
        work, num_targets(shape), mesh.tensor
    )


@functools.cache
def rollout_activations(work: Work, mesh: PlannedMesh) -> int:
    """Bytes of computing the prompts of a dispatch, or of drawing a token for each row: whichever
    is more. Every row's logits are whole where a token is drawn."""
    demand = work.demand(mesh.num_row_shards)
    tokens = min(demand.num_open_prompts * work.prompt_tokens, MAX_PREFILL_TOKENS)
    scores = min(tokens * work.prompt_tokens, MAX_PREFILL_PAIRS)
    prefill = _forward_bytes(work, work.rollout_dtype, tokens, scores, mesh.tensor)
    logits = demand.num_rows * work.spec.config.vocab_size
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
    return page_bytes(replace(work.spec, dtype=work.rollout_dtype), 1)


@functools.cache
def cache_bytes(work: Work, mesh: PlannedMesh) -> int:
    """A replica's pages on each of its devices, heads over tensor, within the config's budget."""
    of_page = work.page_size * cache_bytes_per_token(work)
    num_pages = work.demand(mesh.num_row_shards).num_pages(work.page_size)
    if work.kv_cache_bytes is not None:
        longest = work.prompt_tokens + work.max_tokens
        budget = (work.kv_cache_bytes, "rollout.kv_cache_mb")
        num_pages = pages_within(*budget, of_page, num_pages, longest, work.page_size)
    return num_pages * of_page // mesh.tensor
