"""Updates of the policy: gradients summed over micro-batches in place, then one optimizer step."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl.algorithms.aggregation import token_weights
from rl.errors import MeshdialError
from rl.learner.batch import UpdateBatch, micro_batches, spread
from rl.learner.figures import added, batch_figures, count_tokens, describe_batch, ratio
from rl.learner.loss import LossConfig, MicroBatch, Sums, reinforcement_loss, supervised_loss
from rl.learner.optimizer import OptimizerConfig, apply_gradient
from rl.models.scoring import completion_logprobs
from rl.models.spec import ModelSpec, Parameters
from rl.sharding import by_row_shard, constrain, constrain_tree, num_row_shards

Progress = Callable[[str], None]
Updated = tuple[Parameters, Any, dict[str, float]]
Remat = Literal["none", "layer"]


def update(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    optimizer_state: Any,
    batch: UpdateBatch,
    loss_config: LossConfig,
    optimizer: OptimizerConfig,
    micro_batch_tokens: int,
    updates_per_batch: int,
    progress: Progress = lambda line: None,
    remat: Remat = "none",
) -> Updated:
    """(trainable, optimizer state, figures) after `updates_per_batch` updates on one batch.

    Takes ownership of `trainable` and `optimizer_state`: their arrays are overwritten. The batch
    is divided by whole groups in order. `micro_batch_tokens` is what goes through the layers at
    once, for each row shard of the mesh, padding counted, and `remat` whether a layer keeps its
    input alone for the backward pass (`layer`); both are a matter of memory and speed: neither
    gradient nor figures depend on them. Groups whose advantages are all 0 are not run where no KL
    or entropy term needs them; they count in every denominator of the loss all the same.

    Figures are floats over the whole batch. loss and policy_loss are means over its updates; kl
    (where there is a reference), entropy, clip_fraction and ratio_mean are averages over the tokens
    that were run, with the loss's weights; logprob_drift_mean and _max, |rollout - trainer| before
    the first update, are over its tokens; gradient_norm, before clipping, is the updates' mean;
    learning_rate is the last one.
    Raises MeshdialError for a batch that does not fit the config, and where loss or gradient is
    not finite.
    """
    _refuse_unfit(batch, loss_config, updates_per_batch)
    # Zero and no bonus are the same, and only the latter saves the gradient of the entropy.
    loss_config = replace(loss_config, entropy_coefficient=loss_config.entropy_coefficient or None)
    size = batch.group_shape[0] // updates_per_batch
    reports = []
    for number in range(updates_per_batch):
        part = batch.groups(number * size, (number + 1) * size)
        objective = reinforcement_objective(part, loss_config)
        prefixed = _prefixed(progress, f"update {number + 1} of {updates_per_batch}")
        gradient, sums = sum_gradients(
            spec, trainable, frozen, part, objective, micro_batch_tokens, prefixed, remat
        )
        trainable, optimizer_state, applied = _apply(
            optimizer, trainable, optimizer_state, gradient
        )
        reports.append(sums | applied)
    return trainable, optimizer_state, batch_figures(reports) | describe_batch(batch)


def supervised_update(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    optimizer_state: Any,
    batch: UpdateBatch,
    optimizer: OptimizerConfig,
    micro_batch_tokens: int,
    progress: Progress = lambda line: None,
) -> Updated:
    """One update towards given completions: their negative log-likelihood, averaged over tokens.

    The batch is one of `pack_supervised`. As `update` it overwrites `trainable` and
    `optimizer_state`. Figures: loss, entropy, gradient_norm, learning_rate, num_tokens,
    completion_length_mean.
    """
    objective = supervised_objective(batch)
    prefixed = _prefixed(progress, "supervised update")
    gradient, sums = sum_gradients(
        spec, trainable, frozen, batch, objective, micro_batch_tokens, prefixed
    )
    trainable, optimizer_state, figures = _apply(optimizer, trainable, optimizer_state, gradient)
    figures |= {"loss": sums["loss"], "entropy": ratio(sums["entropy"], sums["weight"])}
    return trainable, optimizer_state, figures | count_tokens(batch)


def score_batch(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    batch: UpdateBatch,
    micro_batch_tokens: int,
    progress: Progress = lambda line: None,
) -> np.ndarray:
    """The log-probability of every completion token, float32 [P, G, T], 0 on padding.

    For the log-probabilities of a reference or a proximal policy; `unpack` undoes the layout.
    """
    T = batch.completion_tokens_PGT.shape[2]
    is_token_PGT = np.arange(T)[None, None, :] < batch.completion_lengths_PG[:, :, None]
    shape, parts = batch.divide(is_token_PGT.any(axis=2), micro_batch_tokens)
    spread_rows = spread(micro_batches(batch, is_token_PGT.astype(np.float32), shape, parts))
    scores_PGT = np.zeros(is_token_PGT.shape, np.float32)
    starts = range(0, len(parts), num_row_shards())
    for number, (start, rows) in enumerate(zip(starts, spread_rows, strict=True), start=1):
        scores = np.asarray(_scores(spec, trainable, frozen, rows, shape.num_shared))
        scores = scores.reshape(num_row_shards(), *scores.shape[-3:])
        for part, scores_PBT in zip(parts[start : start + len(scores)], scores, strict=False):
            prompt_PBT = np.broadcast_to(part.prompt_P[:, None, None], part.token_PBT.shape)
            places = prompt_PBT, part.member_PBT, part.token_PBT
            real = part.is_real_PBT
            scores_PGT[tuple(place[real] for place in places)] = scores_PBT[real]
        progress(f"scoring: micro-batch {number} of {len(starts)}")
    return scores_PGT


# One update


class Objective(NamedTuple):
    """What one update minimises: sum(weights * the loss of each token)."""

    loss_function: Callable
    config: LossConfig | None
    weights_PGT: np.ndarray
    is_needed_PG: np.ndarray


def reinforcement_objective(batch: UpdateBatch, config: LossConfig) -> Objective:
    weights_PGT = token_weights(batch.trained_mask(), config.aggregation, config.max_tokens)
    # The weights say it all: one program serves every aggregation.
    on_device = replace(config, aggregation="token-mean", max_tokens=None)
    return Objective(reinforcement_loss, on_device, weights_PGT, _needed(batch, config))


def supervised_objective(batch: UpdateBatch) -> Objective:
    mask_PGT = batch.trained_mask()
    weights_PGT = token_weights(mask_PGT, "token-mean")
    return Objective(supervised_loss, None, weights_PGT, mask_PGT.any(axis=2))


def sum_gradients(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    batch: UpdateBatch,
    objective: Objective,
    micro_batch_tokens: int,
    progress: Progress,
    remat: Remat = "none",
) -> tuple[Parameters, dict[str, float]]:
    """(gradient, sums) over all micro-batches of what is needed of the batch."""
    shape, parts = batch.divide(objective.is_needed_PG, micro_batch_tokens)
    program = Program(spec, objective.loss_function, shape.num_shared, remat)
    config, add_to = _as_floats(objective.config), gradient_function(remat)
    gradient, totals = _zeros(trainable), {}
    rows_of_parts = micro_batches(batch, objective.weights_PGT, shape, parts)
    num_batches = -(-len(parts) // num_row_shards())
    for number, rows in enumerate(spread(rows_of_parts), start=1):
        gradient, sums = add_to(program, config, trainable, frozen, gradient, rows)
        sums = _as_floats(jax.device_get(sums))
        _refuse_non_finite("loss", sums["loss"], f"micro-batch {number} of {num_batches}")
        totals = added(totals, sums)
        progress(f"micro-batch {number} of {num_batches}")
    return gradient, totals


def _apply(
    optimizer: OptimizerConfig, trainable: Parameters, optimizer_state: Any, gradient: Parameters
) -> Updated:
    trainable, optimizer_state, figures = apply_gradient(
        _as_floats(optimizer), trainable, optimizer_state, gradient
    )
    figures = _as_floats(jax.device_get(figures))
    _refuse_non_finite("norm of the gradient", figures["gradient_norm"], "this update")
    return trainable, optimizer_state, figures


def _as_floats(tree):
    """Every number as a Python float: a whole number in a config runs the same program too."""
    return jax.tree.map(float, tree)


class Program(NamedTuple):
    """What a gradient program is compiled for, besides the shapes of its arrays."""

    spec: ModelSpec
    loss_function: Callable
    num_shared: int
    remat: Remat


def _add_gradient(
    program: Program,
    config: LossConfig | None,
    trainable: Parameters,
    frozen: Parameters,
    total: Parameters,
    rows: MicroBatch,
) -> tuple[Parameters, Sums]:
    """(total + this micro-batch's gradient of the trainable parameters, its sums)."""
    is_entropy_fixed = config is None or config.entropy_coefficient is None

    def loss(trainable):
        def loss_of_shard(rows):
            scores = completion_logprobs(
                *(program.spec, trainable, frozen, rows.packed, rows.temperature),
                num_shared=program.num_shared,
                is_rematerialised=program.remat == "layer",
                is_entropy_fixed=is_entropy_fixed,
            )
            return program.loss_function(config, rows, *scores)

        losses, sums = by_row_shard(loss_of_shard, rows)
        return jnp.sum(losses), sums

    gradient, sums = jax.grad(loss, has_aux=True)(trainable)
    total = jax.tree.map(lambda total, part: total + part.astype(total.dtype), total, gradient)
    return constrain_tree(total), {name: constrain(_whole(name, sums[name])) for name in sums}


_jit = partial(jax.jit, static_argnames=("program",), donate_argnames=("total",))
add_gradient = _jit(_add_gradient)
# For a CPU, XLA would schedule what is computed again early, beside the forward pass.
_add_gradient_late = _jit(
    _add_gradient,
    compiler_options={"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
)


def gradient_function(remat: Remat) -> Callable:
    """`add_gradient` as it is to be compiled here."""
    is_late = remat == "layer" and jax.default_backend() == "cpu"
    return _add_gradient_late if is_late else add_gradient


def _whole(name: str, values: jax.Array) -> jax.Array:
    """One sum of a micro-batch out of those of its row shards."""
    return jnp.max(values) if name == "drift_max" else jnp.sum(values)


@partial(jax.jit, static_argnames=("spec", "num_shared"))
def _scores(
    spec: ModelSpec, trainable: Parameters, frozen: Parameters, rows: MicroBatch, num_shared: int
):
    def score(rows):
        model = (spec, trainable, frozen)
        return completion_logprobs(*model, rows.packed, rows.temperature, num_shared)[0]

    return constrain(by_row_shard(score, rows))


def _zeros(trainable: Parameters) -> Parameters:
    """Where the gradient adds up: float32 whatever the parameters are, and laid out like them."""
    return {name: jnp.zeros_like(value, jnp.float32) for name, value in trainable.items()}


def _needed(batch: UpdateBatch, config: LossConfig) -> np.ndarray:
    """Which rollouts to run, boolean [P, G]: of a group all or none."""
    has_tokens_PG = batch.trained_mask().any(axis=2)
    has_kl = batch.reference_logprobs_PGT is not None and config.kl_coefficient != 0
    if has_kl or config.entropy_coefficient is not None:
        return has_tokens_PG
    has_signal_P = np.any(has_tokens_PG & (batch.advantages_PG != 0), axis=1)
    is_needed_PG = has_tokens_PG & has_signal_P[:, None]
    if not is_needed_PG.any():  # one group all the same, so that drift and entropy are measured
        is_needed_PG[np.argmax(has_tokens_PG.any(axis=1))] = True
    return is_needed_PG


def _prefixed(progress: Progress, prefix: str) -> Progress:
    return lambda line: progress(f"{prefix}: {line}")


# What is refused


def _refuse_unfit(batch: UpdateBatch, config: LossConfig, updates_per_batch: int) -> None:
    num_groups = batch.group_shape[0]
    if num_groups % updates_per_batch:
        raise MeshdialError(
            f"updates_per_batch is {updates_per_batch}, which does not divide the batch's "
            f"{num_groups} groups"
        )
    if updates_per_batch > 1 and batch.proximal_logprobs_PGT is None:
        raise MeshdialError(
            f"updates_per_batch is {updates_per_batch}, and the batch has no proximal "
            f"log-probabilities, which more than one update needs"
        )
    if config.kl_coefficient and batch.reference_logprobs_PGT is None:
        raise MeshdialError(
            f"kl_coefficient is {config.kl_coefficient}, and the batch has no reference "
            f"log-probabilities"
        )
    mask_PGT = batch.trained_mask()
    for name, values in _trained_values(batch, mask_PGT):
        if not np.all(np.isfinite(values)):
            raise MeshdialError(f"{name} of the batch are not finite on tokens that are trained on")


def _trained_values(batch: UpdateBatch, mask_PGT: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield "the advantages", batch.advantages_PG[mask_PGT.any(axis=2)]
    for producer in ("rollout", "proximal", "reference"):
        values_PGT = getattr(batch, f"{producer}_logprobs_PGT")
        if values_PGT is not None:
            yield f"the {producer} log-probabilities", values_PGT[mask_PGT]
    if batch.off_policy_weights_PGT is not None:
        yield "the off-policy weights", batch.off_policy_weights_PGT[mask_PGT]


def _refuse_non_finite(what: str, value: float, where: str) -> None:
    if not math.isfinite(value):
        raise MeshdialError(f"the {what} is {value} in {where}: training has diverged")
