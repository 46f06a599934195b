"""The optimizer: gradient clipping, the update rule, weight decay, the learning-rate schedule."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from rl.errors import MeshdialError
from rl.models.spec import Parameters
from rl.sharding import constrain, constrain_tree

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What the optimizer does. It is a pytree: the numbers that people sweep are traced, so that
    another learning rate runs the same compiled program.

    kind: adamw, adam (the same without weight decay), lion (arXiv:2302.06675), or sgd (no
        momentum).
    schedule: constant, linear or cosine, the last two falling from `learning_rate` to 0.
    warmup_updates: the first updates rise linearly; number n of w has n / w of the learning rate.
    schedule_updates: where linear and cosine arrive at 0, in updates from the start of training,
        warm-up included. It does not follow from how many iterations run.
    weight_decay: decoupled (arXiv:1711.05101), on matrices only: no norm and no bias.
    clip_norm: bound on the norm of the whole gradient; None for no bound.
    """

    kind: Literal["adamw", "adam", "lion", "sgd"] = field(metadata=_STATIC)
    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"] = field(metadata=_STATIC)
    warmup_updates: int
    schedule_updates: int
    beta1: float = field(metadata=_STATIC)
    beta2: float = field(metadata=_STATIC)
    epsilon: float = field(metadata=_STATIC)
    weight_decay: float
    clip_norm: float | None


def init_optimizer(config: OptimizerConfig, trainable: Parameters) -> Any:
    """The optimizer's state before the first update; under `jax.eval_shape`, its shapes.

    Its moments are float32 whatever the parameters are, as the gradients are.
    Raises MeshdialError for a config that contradicts itself.
    """
    _refuse_contradictions(config)
    zeros = {name: jnp.zeros(value.shape, jnp.float32) for name, value in trainable.items()}
    return make_optimizer(config).init(zeros)


def _refuse_contradictions(config: OptimizerConfig) -> None:
    if config.kind == "adam" and config.weight_decay:
        raise MeshdialError(
            f"optimizer: kind is adam, which has no weight decay, and weight_decay is "
            f"{config.weight_decay}: set it to 0 or take adamw"
        )
    if config.schedule != "constant" and config.schedule_updates <= config.warmup_updates:
        raise MeshdialError(
            f"optimizer: schedule_updates is {config.schedule_updates}, expected more than "
            f"warmup_updates, {config.warmup_updates}, for the schedule {config.schedule}"
        )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optimizer as one optax chain; the numbers in `config` may be traced."""
    return optax.chain(
        _clip(config.clip_norm),
        _rule(config),
        optax.add_decayed_weights(config.weight_decay, mask=_is_matrix),
        optax.scale_by_learning_rate(partial(learning_rate_at, config)),
    )


def _clip(clip_norm) -> optax.GradientTransformation:
    return optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)


def _rule(config: OptimizerConfig) -> optax.GradientTransformation:
    if config.kind in ("adamw", "adam"):
        return optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    if config.kind == "lion":
        return optax.scale_by_lion(config.beta1, config.beta2)
    if config.kind == "sgd":
        return optax.identity()
    raise MeshdialError(f"optimizer: unknown kind {config.kind!r}")


def _is_matrix(parameters: Parameters) -> dict[str, bool]:
    return {name: parameter.ndim >= 2 for name, parameter in parameters.items()}


def learning_rate_at(config: OptimizerConfig, num_updates: jax.Array | int) -> jax.Array:
    """The learning rate of the update that follows `num_updates` earlier ones; a float32 scalar."""
    done = jnp.asarray(num_updates, jnp.float32)
    warmup = jnp.minimum((done + 1.0) / jnp.maximum(config.warmup_updates, 1), 1.0)
    length = jnp.maximum(config.schedule_updates - config.warmup_updates, 1)
    progress = jnp.clip((done - config.warmup_updates) / length, 0.0, 1.0)
    if config.schedule == "constant":
        decay = jnp.ones_like(progress)
    elif config.schedule == "linear":
        decay = 1.0 - progress
    elif config.schedule == "cosine":
        decay = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    else:
        raise MeshdialError(f"optimizer: unknown schedule {config.schedule!r}")
    return config.learning_rate * warmup * decay


def num_updates_done(optimizer_state: Any) -> jax.Array:
    """How many updates this state has seen: the schedule's position, the last link's count."""
    return optimizer_state[-1].count


@partial(jax.jit, donate_argnames=("trainable", "optimizer_state"))
def apply_gradient(
    config: OptimizerConfig, trainable: Parameters, optimizer_state: Any, gradient: Parameters
) -> tuple[Parameters, Any, dict[str, jax.Array]]:
    """(trainable, optimizer state, figures) after one update; overwrites the first two."""
    figures = {
        "gradient_norm": optax.tree.norm(gradient),
        "learning_rate": learning_rate_at(config, num_updates_done(optimizer_state)),
    }
    changes, optimizer_state = make_optimizer(config).update(gradient, optimizer_state, trainable)
    trainable = jax.tree.map(_changed, trainable, changes)
    figures = {name: constrain(value) for name, value in figures.items()}
    return constrain_tree(trainable), constrain_tree(optimizer_state), figures


def _changed(parameter: jax.Array, change: jax.Array) -> jax.Array:
    # -0.0 + 0.0 is 0.0: without the selection a change of nothing could change a bit.
    moved = parameter + change.astype(parameter.dtype)
    return jnp.where(change == 0, parameter, moved)
