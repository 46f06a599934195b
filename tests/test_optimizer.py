from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.errors import MeshdialError
from rl.learner.optimizer import (
    OptimizerConfig,
    apply_gradient,
    init_optimizer,
    learning_rate_at,
    num_updates_done,
)

SGD = OptimizerConfig(
    kind="sgd",
    learning_rate=0.5,
    schedule="constant",
    warmup_updates=0,
    schedule_updates=0,
    beta1=0.9,
    beta2=0.99,
    epsilon=1e-8,
    weight_decay=0.0,
    clip_norm=None,
)
KERNEL, SCALE = np.array([[1.0, -2.0]], np.float32), np.array([3.0], np.float32)
GRADIENTS = [
    {"kernel": np.array([[0.5, 2.0]], np.float32), "scale": np.array([-1.0], np.float32)},
    {"kernel": np.array([[-0.25, 2.0]], np.float32), "scale": np.array([0.0], np.float32)},
]


def fresh():
    return {"kernel": jnp.array(KERNEL), "scale": jnp.array(SCALE)}


def run(config, gradients=GRADIENTS[:1], trainable=None):
    trainable = fresh() if trainable is None else trainable
    state, figures = init_optimizer(config, trainable), []
    for gradient in gradients:
        gradient = {name: jnp.array(value) for name, value in gradient.items()}
        trainable, state, figure = apply_gradient(config, trainable, state, gradient)
        figures.append({name: float(value) for name, value in figure.items()})
    return trainable, state, figures


def test_sgd():
    trainable, state, figures = run(SGD)
    np.testing.assert_allclose(trainable["kernel"], [[0.75, -3.0]])
    np.testing.assert_allclose(trainable["scale"], [3.5])
    assert figures == [{"gradient_norm": np.float32(np.sqrt(5.25)), "learning_rate": 0.5}]
    assert num_updates_done(state) == 1


def adam_by_hand(parameter, gradients, config):
    parameter, mean, square = np.float64(parameter), 0.0, 0.0
    for number, gradient in enumerate(gradients, start=1):
        mean = config.beta1 * mean + (1 - config.beta1) * np.float64(gradient)
        square = config.beta2 * square + (1 - config.beta2) * np.float64(gradient) ** 2
        unbiased = mean / (1 - config.beta1**number), square / (1 - config.beta2**number)
        change = unbiased[0] / (np.sqrt(unbiased[1]) + config.epsilon)
        decay = config.weight_decay * parameter if parameter.ndim == 2 else 0.0
        parameter = parameter - config.learning_rate * (change + decay)
    return parameter


def test_adam_and_adamw_decay_matrices_only():
    for config in (replace(SGD, kind="adam"), replace(SGD, kind="adamw", weight_decay=0.1)):
        trainable, _, _ = run(config, GRADIENTS)
        for name, start in (("kernel", KERNEL), ("scale", SCALE)):
            expected = adam_by_hand(start, [gradient[name] for gradient in GRADIENTS], config)
            np.testing.assert_allclose(trainable[name], expected, rtol=1e-5)


def test_lion_moves_by_the_sign_of_the_interpolated_momentum():
    trainable, _, _ = run(replace(SGD, kind="lion"), GRADIENTS)
    # Momentum after one update is 0.01 g1; then 0.9 * 0.01 * 0.5 - 0.1 * 0.25 < 0 turns back.
    np.testing.assert_allclose(trainable["kernel"], [[1 - 0.5 + 0.5, -2 - 0.5 - 0.5]])
    np.testing.assert_allclose(trainable["scale"], [3 + 0.5 + 0.5])


def test_weight_decay_skips_norms_and_biases():
    still = [{"kernel": np.zeros((1, 2), np.float32), "scale": np.zeros(1, np.float32)}]
    trainable, _, _ = run(replace(SGD, weight_decay=0.1), still)
    np.testing.assert_allclose(trainable["kernel"], KERNEL * (1 - 0.5 * 0.1))
    np.testing.assert_array_equal(trainable["scale"], SCALE)


@pytest.mark.parametrize(("clip_norm", "factor"), [(1.0, 0.2), (5.0, 1.0), (7.0, 1.0)])
def test_the_whole_gradient_is_clipped_and_its_norm_reported_unclipped(clip_norm, factor):
    gradient = [{"kernel": np.array([[3.0, 0]], np.float32), "scale": np.array([4.0], np.float32)}]
    trainable, _, figures = run(replace(SGD, clip_norm=clip_norm), gradient)
    np.testing.assert_allclose(trainable["kernel"], [[1 - 0.5 * 3 * factor, -2]], rtol=1e-6)
    np.testing.assert_allclose(trainable["scale"], [3 - 0.5 * 4 * factor], rtol=1e-6)
    assert figures[0]["gradient_norm"] == 5.0


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
    st.floats(-100, 100, width=32),
    st.sampled_from(["adamw", "lion", "sgd"]),
)
def test_learning_rate_zero_changes_no_bit(parameter, gradient, kind):
    start = np.array([[*parameter, -0.0, 0.0, 1e-45]], np.float32)
    gradients = [{"kernel": np.full((1, 5), sign * gradient, np.float32)} for sign in (1, -1)]
    trainable, _, _ = run(
        replace(SGD, kind=kind, learning_rate=0.0), gradients, {"kernel": jnp.array(start)}
    )
    assert np.asarray(trainable["kernel"]).tobytes() == start.tobytes()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1 / 2, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [1 / 2, 1, 1, 3 / 4, 1 / 2, 1 / 4, 0, 0]),
        ("cosine", [1 / 2, 1, 1, (1 + 0.5**0.5) / 2, 1 / 2, (1 - 0.5**0.5) / 2, 0, 0]),
    ],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_schedule(schedule, expected, transform):
    config = replace(SGD, schedule=schedule, warmup_updates=2, schedule_updates=6)
    rates = [transform(learning_rate_at)(config, number) for number in range(8)]
    np.testing.assert_allclose(rates, 0.5 * np.array(expected), rtol=1e-6, atol=1e-7)


def test_the_horizon_does_not_follow_from_how_many_updates_run():
    config = replace(SGD, schedule="linear", schedule_updates=4)
    long, short = run(config, GRADIENTS * 3)[2], run(config, GRADIENTS)[2]
    assert [figure["learning_rate"] for figure in long] == [0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    assert short == long[:2]


def test_another_learning_rate_runs_the_same_program():
    run(replace(SGD, kind="adamw", weight_decay=0.01, clip_norm=1.0))
    before = apply_gradient._cache_size()
    run(replace(SGD, kind="adamw", weight_decay=0.02, clip_norm=2.0, learning_rate=0.1))
    assert apply_gradient._cache_size() == before


def test_trainable_and_state_are_overwritten():
    trainable, gradient = fresh(), {k: jnp.array(v) for k, v in GRADIENTS[0].items()}
    config = replace(SGD, kind="adamw")
    state = init_optimizer(config, trainable)
    apply_gradient(config, trainable, state, gradient)
    assert all(array.is_deleted() for array in jax.tree.leaves((trainable, state)))


def test_the_shapes_of_the_state_need_no_arrays():
    config = replace(SGD, kind="adamw")
    shapes = jax.eval_shape(lambda trainable: init_optimizer(config, trainable), fresh())
    state = init_optimizer(config, fresh())
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "adam", "weight_decay": 0.1}, "has no weight decay"),
        ({"schedule": "cosine", "warmup_updates": 1, "schedule_updates": 1}, "schedule_updates"),
        ({"kind": "adagrad"}, "adagrad"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(MeshdialError, match=message):
        init_optimizer(replace(SGD, **changes), fresh())
