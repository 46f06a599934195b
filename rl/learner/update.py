"""Updates of a policy or a critic: the gradient of a mini-batch, then the optimizer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

from rl.errors import MeshdialError
from rl.learner.batch import UpdateBatch
from rl.learner.figures import batch_figures, count_tokens, describe_batch, ratio, value_figures
from rl.learner.gradient import (
    Objective,
    as_floats,
    refuse_non_finite,
    reinforcement_objective,
    sum_gradients,
    supervised_objective,
    value_objective,
)
from rl.learner.loss import LossConfig, ValueLossConfig
from rl.learner.optimizer import OptimizerConfig, apply_gradient
from rl.learner.scores import Progress, Remat
from rl.models.spec import ModelSpec, Parameters

Updated = tuple[Parameters, Any, dict[str, float]]


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
    epochs: int = 1,
    is_applied: bool = True,
) -> Updated:
    """(trainable, optimizer state, figures) after `epochs` times `updates_per_batch` updates.

    Takes ownership of `trainable` and `optimizer_state`: their arrays are overwritten. The batch
    is divided by whole groups in order, in each epoch alike. `micro_batch_tokens` is what goes
    through the layers at once, for each row shard of the mesh, padding counted, and `remat` whether
    a layer keeps its input alone for the backward pass (`layer`); both are a matter of memory and
    speed: neither gradient nor figures depend on them. Groups whose advantages are all 0 are not
    run where no KL or entropy term needs them; they count in every denominator of the loss all the
    same. With `is_applied` False the figures are those of the first epoch, and nothing changes.

    Figures are floats over the whole batch. loss and policy_loss are means over its updates; kl
    (where there is a reference), entropy, clip_fraction and ratio_mean are averages over the tokens
    that were run, with the loss's weights; logprob_drift_mean and _max, |rollout - trainer| before
    the first update, are over its tokens; gradient_norm, before clipping, is the updates' mean;
    learning_rate is the last one, 0 where nothing is applied.
    Raises MeshdialError for a batch that does not fit the config, and where loss or gradient is
    not finite.
    """
    _refuse_unfit(batch, loss_config, updates_per_batch, epochs)
    # Zero and no bonus are the same, and only the latter saves the gradient of the entropy.
    loss_config = replace(loss_config, entropy_coefficient=loss_config.entropy_coefficient or None)
    trainable, optimizer_state, reports = _updates(
        *(spec, trainable, frozen, optimizer_state),
        _mini_batches(batch, updates_per_batch, epochs if is_applied else 1),
        lambda part: reinforcement_objective(part, loss_config),
        *(optimizer, micro_batch_tokens, progress, remat, is_applied),
    )
    return trainable, optimizer_state, batch_figures(reports) | describe_batch(batch)


def update_values(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    optimizer_state: Any,
    batch: UpdateBatch,
    loss_config: ValueLossConfig,
    optimizer: OptimizerConfig,
    micro_batch_tokens: int,
    updates_per_batch: int,
    progress: Progress = lambda line: None,
    remat: Remat = "none",
    epochs: int = 1,
) -> Updated:
    """As `update`, of a critic (a spec with a value head) towards the batch's returns.

    The loss is the mean over tokens. Figures: see `figures.value_figures`.
    """
    _refuse_not_finite(batch, ("values", "returns"))
    trainable, optimizer_state, reports = _updates(
        *(spec, trainable, frozen, optimizer_state),
        _mini_batches(batch, updates_per_batch, epochs),
        lambda part: value_objective(part, loss_config),
        *(optimizer, micro_batch_tokens, progress, remat),
    )
    return trainable, optimizer_state, value_figures(reports, batch)


def _mini_batches(batch: UpdateBatch, updates: int, epochs: int) -> list[UpdateBatch]:
    _refuse_undivided(batch, updates)
    size = batch.group_shape[0] // updates
    return [batch.groups(n * size, (n + 1) * size) for n in range(updates)] * epochs


def _updates(
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
    optimizer_state: Any,
    parts: list[UpdateBatch],
    objective_of: Callable[[UpdateBatch], Objective],
    optimizer: OptimizerConfig,
    micro_batch_tokens: int,
    progress: Progress,
    remat: Remat,
    is_applied: bool = True,
) -> tuple[Parameters, Any, list[dict[str, float]]]:
    """(trainable, optimizer state, what each update says of itself) after one update a part."""
    reports = []
    for number, part in enumerate(parts, start=1):
        objective = objective_of(part)
        if not objective.is_needed_PG.any():
            continue  # a critic without a single return
        prefixed = _prefixed(progress, f"update {number} of {len(parts)}")
        gradient, sums = sum_gradients(
            *(spec, trainable, frozen, part, objective),
            *(micro_batch_tokens, prefixed, remat),
        )
        if is_applied:
            trainable, optimizer_state, applied = _apply(
                optimizer, trainable, optimizer_state, gradient
            )
        else:
            norm = float(optax.tree.norm(gradient))
            applied = {"gradient_norm": norm, "learning_rate": 0.0}
        reports.append(sums | applied)
    return trainable, optimizer_state, reports


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


def _apply(
    optimizer: OptimizerConfig, trainable: Parameters, optimizer_state: Any, gradient: Parameters
) -> Updated:
    trainable, optimizer_state, figures = apply_gradient(
        as_floats(optimizer), trainable, optimizer_state, gradient
    )
    figures = as_floats(jax.device_get(figures))
    refuse_non_finite("norm of the gradient", figures["gradient_norm"], "this update")
    return trainable, optimizer_state, figures


def _prefixed(progress: Progress, prefix: str) -> Progress:
    return lambda line: progress(f"{prefix}: {line}")


# What is refused


def _refuse_undivided(batch: UpdateBatch, updates_per_batch: int) -> None:
    num_groups = batch.group_shape[0]
    if num_groups % updates_per_batch:
        raise MeshdialError(
            f"updates_per_batch is {updates_per_batch}, which does not divide the batch's "
            f"{num_groups} groups"
        )


def _refuse_unfit(batch: UpdateBatch, config: LossConfig, updates: int, epochs: int) -> None:
    _refuse_undivided(batch, updates)
    if updates * epochs > 1 and batch.proximal_logprobs_PGT is None:
        raise MeshdialError(
            f"updates_per_batch is {updates} and epochs is {epochs}, and the batch has no proximal "
            f"log-probabilities, which more than one update needs"
        )
    if config.kl_coefficient and batch.reference_logprobs_PGT is None:
        raise MeshdialError(
            f"kl_coefficient is {config.kl_coefficient}, and the batch has no reference "
            f"log-probabilities"
        )
    names = ("advantages", "rollout_logprobs", "proximal_logprobs", "reference_logprobs")
    _refuse_not_finite(batch, (*names, "off_policy_weights"))


def _refuse_not_finite(batch: UpdateBatch, names: tuple[str, ...]) -> None:
    mask_PGT = batch.trained_mask()
    for name in names:
        values_PGT = getattr(batch, f"{name}_PGT")
        if values_PGT is not None and not np.all(np.isfinite(values_PGT[mask_PGT])):
            said = name.replace("_logprobs", " log-probabilities").replace(
                "off_policy_", "off-policy "
            )
            raise MeshdialError(
                f"the {said} of the batch are not finite on tokens that are trained on"
            )
