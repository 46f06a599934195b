"""The gradient of one update: what it minimises, summed over micro-batches in place."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl.algorithms.aggregation import token_weights
from rl.errors import MeshdialError
from rl.learner.batch import UpdateBatch, micro_batches, spread
from rl.learner.figures import added
from rl.learner.loss import (
    LossConfig,
    MicroBatch,
    Sums,
    ValueLossConfig,
    reinforcement_loss,
    supervised_loss,
    value_loss,
)
from rl.learner.scores import Progress, Remat, completion_scores
from rl.models.spec import ModelSpec, Parameters
from rl.sharding import by_row_shard, constrain, constrain_tree, num_row_shards


class Objective(NamedTuple):
    """What one update minimises: sum(weights * the loss of each token)."""

    loss_function: Callable
    config: LossConfig | ValueLossConfig | None
    weights_PGT: np.ndarray
    is_needed_PG: np.ndarray


def reinforcement_objective(batch: UpdateBatch, config: LossConfig) -> Objective:
    weights_PGT = token_weights(batch.trained_mask(), config.aggregation, config.max_tokens)
    # The weights say it all: one program serves every aggregation.
    on_device = replace(config, aggregation="token-mean", max_tokens=None)
    return Objective(reinforcement_loss, on_device, weights_PGT, _needed(batch, config))


def value_objective(batch: UpdateBatch, config: ValueLossConfig) -> Objective:
    mask_PGT = batch.trained_mask()
    return Objective(
        value_loss, config, token_weights(mask_PGT, "token-mean"), mask_PGT.any(axis=2)
    )


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
    config, add_to = as_floats(objective.config), gradient_function(remat)
    gradient, totals = _zeros(trainable), {}
    rows_of_parts = micro_batches(batch, objective.weights_PGT, shape, parts)
    num_batches = -(-len(parts) // num_row_shards())
    for number, rows in enumerate(spread(rows_of_parts), start=1):
        gradient, sums = add_to(program, config, trainable, frozen, gradient, rows)
        sums = as_floats(jax.device_get(sums))
        refuse_non_finite("loss", sums["loss"], f"micro-batch {number} of {num_batches}")
        totals = added(totals, sums)
        progress(f"micro-batch {number} of {num_batches}")
    return gradient, totals


def as_floats(tree):
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
    config: LossConfig | ValueLossConfig | None,
    trainable: Parameters,
    frozen: Parameters,
    total: Parameters,
    rows: MicroBatch,
) -> tuple[Parameters, Sums]:
    """(total + this micro-batch's gradient of the trainable parameters, its sums)."""
    is_entropy_fixed = getattr(config, "entropy_coefficient", None) is None

    def loss(trainable):
        def loss_of_shard(rows):
            model = (program.spec, trainable, frozen)
            scores = completion_scores(
                *model, rows, program.num_shared, program.remat, is_entropy_fixed
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


def _zeros(trainable: Parameters) -> Parameters:
    """Where the gradient adds up: float32 whatever the parameters are, and laid out like them."""
    return {name: jnp.zeros_like(value, jnp.float32) for name, value in trainable.items()}


def _needed(batch: UpdateBatch, config: LossConfig) -> np.ndarray:
    """Which rollouts to run, boolean [P, G]: of a group all or none."""
    has_tokens_PG = batch.trained_mask().any(axis=2)
    has_kl = batch.reference_logprobs_PGT is not None and config.kl_coefficient != 0
    if has_kl or config.entropy_coefficient is not None:
        return has_tokens_PG
    has_signal_P = np.any(batch.trained_mask() & (batch.advantages_PGT != 0), axis=(1, 2))
    is_needed_PG = has_tokens_PG & has_signal_P[:, None]
    if not is_needed_PG.any():  # one group all the same, so that drift and entropy are measured
        is_needed_PG[np.argmax(has_tokens_PG.any(axis=1))] = True
    return is_needed_PG


def refuse_non_finite(what: str, value: float, where: str) -> None:
    if not math.isfinite(value):
        raise MeshdialError(f"the {what} is {value} in {where}: training has diverged")
