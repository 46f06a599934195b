"""The critic's loss: how far each value is from the return that followed."""

import jax
import jax.numpy as jnp


def clipped_value_loss(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, clip: float | None
) -> tuple[jax.Array, jax.Array]:
    """(loss, is_clipped) of each token, any one shape.

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2: the clipped value loss that
    came with the implementations of PPO (Schulman et al., "High-dimensional continuous control
    using generalized advantage estimation", and its use in arXiv:2006.05990, section 3.2). Where
    the value has moved further than `clip` towards the return, its gradient is 0. None does not
    clip.
    """
    loss = 0.5 * jnp.square(values - returns)
    if clip is None:
        return loss, jnp.zeros(loss.shape, bool)
    bounded = old_values + jnp.clip(values - old_values, -clip, clip)
    bounded_loss = 0.5 * jnp.square(bounded - returns)
    # Selected rather than taken as a maximum, whose gradient is halved where both are equal.
    is_clipped = bounded_loss > loss
    return jnp.where(is_clipped, bounded_loss, loss), is_clipped
