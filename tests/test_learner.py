"""The learner on a model of one layer, against textbook formulas."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.algorithms.off_policy import off_policy_weights
from rl.errors import MeshdialError
from rl.learner import (
    LossConfig,
    OptimizerConfig,
    init_optimizer,
    pack,
    pack_supervised,
    packing,
    score_batch,
    supervised_update,
    unpack,
    update,
)
from rl.learner.batch import micro_batches
from rl.learner.gradient import (
    Program,
    add_gradient,
    gradient_function,
    reinforcement_objective,
    sum_gradients,
)
from rl.models import shared_prefix
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec
from rl.models.transformer import init_lora, init_parameters

from .padded import completion_logprobs

CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    tie_word_embeddings=True,
)
FULL = ModelSpec(CONFIG)
LORA = ModelSpec(CONFIG, LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "down_proj")))
LOSS = LossConfig(
    ratio="token",
    clip="ppo",
    clip_low=0.2,
    clip_high=0.2,
    clip_dual=3.0,
    kl_coefficient=0.0,
    kl_estimator="k3",
    entropy_coefficient=None,
    aggregation="token-mean",
    max_tokens=8,
)
SGD = OptimizerConfig(
    kind="sgd",
    learning_rate=0.1,
    schedule="constant",
    warmup_updates=0,
    schedule_updates=0,
    beta1=0.9,
    beta2=0.99,
    epsilon=1e-8,
    weight_decay=0.0,
    clip_norm=None,
)
ADAM = replace(SGD, kind="adam", learning_rate=0.01)
P, G = 4, 5
CAP = 1.5
PARTS = ("prompt", "completion")
WHOLE = 10**6
"""A micro-batch of so many tokens holds the whole batch."""


@pytest.fixture(autouse=True)
def _small_bins(monkeypatch):
    """Of the longest completion's length: a group of five then needs several."""
    monkeypatch.setattr(packing, "LEAST_BIN", 1)


def parameters(spec=LORA):
    """Sharper than a fresh model, so that log-probabilities differ from token to token."""
    base = {k: 20 * v if v.ndim == 2 else v for k, v in init_parameters(spec.config, 0).items()}
    if spec.lora is None:
        return base, {}
    keys = iter(jax.random.split(jax.random.key(1), 8))
    shapes = {name: value.shape for name, value in init_lora(spec, 1).items()}
    return {k: 0.3 * jax.random.normal(next(keys), shape) for k, shape in shapes.items()}, base


def rollouts(seed=0, zero_groups=(1,)):
    """Arguments of `pack`: P groups of G, advantages of `zero_groups` 0, one token masked."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 8, P * G)
    group_ids = np.repeat(np.arange(P), G)
    prompts = [rng.integers(0, 11, rng.integers(1, 8)).tolist() for _ in range(P)]
    per_token = lambda: [(-3 * rng.random(n)).astype(np.float32) for n in lengths]  # noqa: E731
    mask = [np.ones(n, bool) for n in lengths]
    mask[np.argmax(lengths)][1] = False
    advantages = rng.standard_normal(P * G) * ~np.isin(group_ids, zero_groups)
    return {
        "group_ids": group_ids.tolist(),
        "prompt_tokens": [prompts[group] for group in group_ids],
        "completion_tokens": [rng.integers(0, 11, n).tolist() for n in lengths],
        "completion_mask": mask,
        "advantages": each_token(advantages, lengths),
        "rollout_logprobs": per_token(),
        "proximal_logprobs": per_token(),
        "reference_logprobs": per_token(),
        "temperature": 0.8,
    }


def each_token(advantages, lengths):
    return [np.full(n, value, np.float32) for value, n in zip(advantages, lengths, strict=True)]


def batch(zero_groups=(1,), **changes):
    return pack(**{**rollouts(zero_groups=zero_groups), **changes})


def weighted(packed):
    """The batch with off-policy weights, which at this cap truncates a good part of them."""
    logprobs = packed.proximal_logprobs_PGT, packed.rollout_logprobs_PGT
    found = off_policy_weights(*logprobs, packed.trained_mask(), "token", CAP)
    assert 0.1 < found.truncated_share < 0.9
    return replace(packed, off_policy_weights_PGT=found.weights)


ON_POLICY = {"proximal_logprobs": None, "reference_logprobs": None}
EVERY_TERM = replace(LOSS, kl_coefficient=0.3, entropy_coefficient=0.05)


def gradient(loss_config, packed, micro_batch_tokens, spec=LORA):
    objective = reinforcement_objective(packed, loss_config)
    return sum_gradients(
        spec, *parameters(spec), packed, objective, micro_batch_tokens, lambda line: None
    )


def run(packed, loss_config=LOSS, optimizer=SGD, micro=WHOLE, updates=1, spec=LORA, **options):
    trainable, frozen = parameters(spec)
    state = init_optimizer(optimizer, trainable)
    return update(
        *(spec, trainable, frozen, state, packed, loss_config, optimizer, micro, updates), **options
    )


def num_bins(packed, groups):
    """How many bins these groups' completions take."""
    lengths_PG = packed.completion_lengths_PG[list(groups)]
    size = packing.bin_size(lengths_PG)
    return sum(len(packing.first_fit(row, size)) for row in lengths_PG)


def flat(tree):
    return np.concatenate([np.ravel(tree[name]) for name in sorted(tree)]).astype(np.float64)


def assert_close(actual, expected, tolerance=1e-5):
    actual, expected = flat(actual), flat(expected)
    assert np.linalg.norm(expected) > 0
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


# The loss, its gradient and its figures, against the textbook


def padded(lists, dtype):
    rows = np.zeros((len(lists), 8), dtype)
    for row, values in zip(rows, lists, strict=True):
        row[: len(values)] = values
    return jnp.array(rows)


def one_by_one(trainable, frozen, data):
    """(logprobs_BT, entropy_BT) with each rollout in a group of its own."""
    lengths = [np.array([len(row) for row in data[f"{kind}_tokens"]]) for kind in PARTS]
    prompts, completions = (padded(data[f"{kind}_tokens"], int) for kind in PARTS)
    logprobs, entropy = jax.jit(completion_logprobs, static_argnums=0)(
        *(LORA, trainable, frozen, prompts, lengths[0]),
        *(completions[:, None], lengths[1][:, None], data["temperature"]),
    )
    return logprobs[:, 0], entropy[:, 0]


def by_hand(trainable, frozen, data, config, is_on_policy):
    """(loss, figures) by the textbook formulas, every token of the batch at once: token-mean."""
    logprobs, entropy = one_by_one(trainable, frozen, data)
    fixed = jax.lax.stop_gradient(logprobs)
    given = {k: padded(data[f"{k}_logprobs"], float) for k in ("rollout", "proximal", "reference")}
    mask, advantage = (padded(data[key], float) for key in ("completion_mask", "advantages"))
    proximal = fixed if is_on_policy else given["proximal"]
    ratio = jnp.exp(logprobs - proximal)
    bounded = jnp.clip(ratio, 0.8, 1.2)
    d = logprobs - given["reference"]
    kl_gradient = jax.lax.stop_gradient(ratio * d) * (logprobs - fixed)
    kl = jax.lax.stop_gradient(ratio * (jnp.exp(-d) - 1 + d)) + kl_gradient
    token_loss = -jnp.minimum(ratio * advantage, bounded * advantage)
    token_loss += config.kl_coefficient * kl - (config.entropy_coefficient or 0.0) * entropy
    if not is_on_policy:
        token_loss *= jnp.minimum(jnp.exp(proximal - given["rollout"]), CAP)
    clipped = ratio * advantage > bounded * advantage
    values = {"clipped": clipped, "ratio": ratio, "entropy": entropy, "kl": kl}
    figures = {name: jnp.sum(mask * value) / mask.sum() for name, value in values.items()}
    return jnp.sum(mask * token_loss) / mask.sum(), figures | {"num_tokens": mask.sum()}


@pytest.mark.parametrize("is_on_policy", [True, False])
def test_gradient_and_figures_equal_the_textbook(is_on_policy):
    data = rollouts()
    config = LOSS if is_on_policy else EVERY_TERM
    packed = pack(**{**data, **ON_POLICY}) if is_on_policy else weighted(pack(**data))
    (loss, figures), expected = jax.value_and_grad(by_hand, has_aux=True)(
        *parameters(), data, config, is_on_policy
    )
    actual, _ = gradient(config, packed, WHOLE)
    assert_close(actual, expected)
    _, _, reported = run(packed, config)
    np.testing.assert_allclose(reported["loss"], loss, rtol=2e-5)
    assert reported["num_tokens"] == figures["num_tokens"]
    if is_on_policy:
        assert reported["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
        assert reported["clip_fraction"] == 0.0
        assert "kl" not in reported
    else:
        assert 0.1 < figures["clipped"] < 0.9
        for name, key in (("clipped", "clip_fraction"), ("ratio", "ratio_mean"), ("kl", "kl")):
            np.testing.assert_allclose(reported[key], figures[name], rtol=2e-5)
        np.testing.assert_allclose(reported["entropy"], figures["entropy"], rtol=2e-5)


def test_on_policy_every_ratio_is_exactly_one():
    _, sums = gradient(LOSS, batch(**ON_POLICY), WHOLE)
    assert sums["ratio"] == sums["weight"]
    assert sums["clipped"] == 0


def uniform():
    """A model whose logits are all 0: every log-probability is -log 11, the entropy log 11."""
    trainable, frozen = parameters()
    return trainable, {**frozen, "embed_tokens.embedding": jnp.zeros((11, 8))}


def test_figures_of_a_uniform_policy():
    trainable, frozen = uniform()
    exact = -np.log(11)
    data = {
        "group_ids": ["a", "a", "b", "b"],
        "prompt_tokens": [[1, 2], [1, 2], [3], [3]],
        "completion_tokens": [[1, 2, 3], [4], [5, 6], [7, 8]],
        "completion_mask": [[True, True, False], [True], [True, True], [True, True]],
        "advantages": [[2.0, 2.0, 99.0], [-1.0], [0.0, 0.0], [0.0, 0.0]],
        "rollout_logprobs": [[exact - 0.5, exact, 99.0], [exact + 1], [-1, -1], [-1, -1]],
        "temperature": 1.0,
    }
    state = init_optimizer(SGD, trainable)
    _, _, figures = update(LORA, trainable, frozen, state, pack(**data), LOSS, SGD, 16, 1)
    expected = {
        "loss": -(2 * 2.0 - 1.0) / 7,  # seven trained tokens, those of group b with advantage 0
        "policy_loss": -(2 * 2.0 - 1.0) / 7,
        "entropy": np.log(11),
        "ratio_mean": 1.0,
        "clip_fraction": 0.0,
        "logprob_drift_mean": (0.5 + 0.0 + 1.0) / 3,  # group b is not run
        "logprob_drift_max": 1.0,
        "gradient_norm": 0.0,  # no hidden state moves a logit
        "learning_rate": 0.1,
        "num_tokens": 7.0,
        "completion_length_mean": 8 / 4,
        "num_degenerate_groups": 1.0,
    }
    assert figures.keys() == expected.keys()
    assert all(type(value) is float for value in figures.values())
    for name, value in expected.items():
        np.testing.assert_allclose(figures[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


# What must not matter


@pytest.mark.parametrize(
    ("config", "changes", "sizes"), [(LOSS, ON_POLICY, (1, 60)), (EVERY_TERM, {}, (20, 45, 120))]
)
def test_micro_batch_tokens_change_neither_gradient_nor_figures(config, changes, sizes):
    config = replace(config, aggregation="sequence-mean-token-mean")
    packed = batch(**changes)
    packed = packed if changes else weighted(packed)
    expected, _ = gradient(config, packed, WHOLE)
    _, _, figures = run(packed, config)
    for size in sizes:  # from one bin at a time to several groups
        actual, _ = gradient(config, packed, size)
        assert_close(actual, expected)
        _, _, others = run(packed, config, micro=size)
        assert others.keys() == figures.keys()
        for name, value in figures.items():
            np.testing.assert_allclose(others[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_what_all_prompts_share_is_computed_once_and_changes_nothing(monkeypatch):
    data = rollouts() | ON_POLICY
    preamble = np.random.default_rng(5).integers(0, 11, 19).tolist()
    data["prompt_tokens"] = [[*preamble, *prompt] for prompt in data["prompt_tokens"]]
    packed = pack(**data)
    assert packed.num_shared() == 16
    found, sums = gradient(LOSS, packed, 60, FULL)
    monkeypatch.setattr(shared_prefix, "PREFIX_MULTIPLE", 1000)
    assert packed.num_shared() == 0
    expected, others = gradient(LOSS, packed, WHOLE, FULL)
    assert_close(found, expected)
    assert sums == pytest.approx(others, rel=1e-5, abs=1e-6)


def test_masked_tokens_never_contribute_even_when_they_are_nan():
    clean, dirty = weighted(batch()), weighted(batch())
    outside = ~dirty.trained_mask()
    assert outside[dirty.completion_mask_PGT.shape[0] - 1].any()
    for name in ("rollout", "proximal", "reference"):
        getattr(dirty, f"{name}_logprobs_PGT")[outside] = np.nan
    dirty.off_policy_weights_PGT[outside] = np.nan
    is_padding = np.arange(outside.shape[2]) >= dirty.completion_lengths_PG[:, :, None]
    dirty.completion_mask_PGT[is_padding] = True
    dirty.completion_tokens_PGT[is_padding] = -7
    clean_gradient, clean_sums = gradient(EVERY_TERM, clean, WHOLE)
    dirty_gradient, dirty_sums = gradient(EVERY_TERM, dirty, WHOLE)
    np.testing.assert_array_equal(flat(dirty_gradient), flat(clean_gradient))
    assert dirty_sums == clean_sums
    assert np.isfinite(list(run(dirty, EVERY_TERM)[2].values())).all()


def test_an_unscored_rollout_without_trained_tokens_may_have_a_nan_advantage():
    data = rollouts()
    data["completion_mask"][2][:] = False
    clean, _ = gradient(EVERY_TERM, pack(**data), WHOLE)
    data["advantages"][2][:] = np.nan
    dirty, _ = gradient(EVERY_TERM, pack(**data), WHOLE)
    np.testing.assert_array_equal(flat(dirty), flat(clean))


def test_skipping_groups_without_signal_changes_no_gradient_and_runs_less():
    zero_groups = (0, 2)
    packed = pack(**{**rollouts(zero_groups=zero_groups), **ON_POLICY})
    lines: list[list[str]] = [[], []]
    skipping = reinforcement_objective(packed, LOSS)
    everything = skipping._replace(is_needed_PG=np.ones((P, G), bool))
    results = [
        sum_gradients(LORA, *parameters(), packed, objective, 1, said.append)
        for objective, said in zip((skipping, everything), lines, strict=True)
    ]
    assert len(lines[1]) == num_bins(packed, range(P))  # one at a time
    assert len(lines[0]) == num_bins(packed, [1, 3])
    assert_close(results[0][0], results[1][0], 1e-6)
    assert results[0][1]["loss"] == pytest.approx(results[1][1]["loss"], rel=1e-6)
    assert run(packed)[2]["num_degenerate_groups"] == 2


def test_a_kl_or_entropy_term_skips_nothing():
    packed = batch()
    for config in (replace(LOSS, kl_coefficient=0.1), replace(LOSS, entropy_coefficient=0.1)):
        assert reinforcement_objective(packed, config).is_needed_PG.all()


def test_a_batch_without_any_signal_measures_drift_and_changes_nothing():
    packed = batch(advantages=None, **ON_POLICY)
    trainable, _, figures = run(packed)
    np.testing.assert_array_equal(flat(trainable), flat(parameters()[0]))
    assert figures["gradient_norm"] == 0.0
    assert figures["logprob_drift_max"] > 0
    assert figures["num_degenerate_groups"] == P


def test_full_parameters_train_too():
    packed = batch(**ON_POLICY)
    expected, _ = gradient(LOSS, packed, WHOLE, FULL)
    actual, _ = gradient(LOSS, packed, 30, FULL)
    assert_close(actual, expected)
    trainable, _, figures = run(packed, spec=FULL)
    assert trainable.keys() == init_parameters(CONFIG, 0).keys()
    norm = np.linalg.norm(flat(expected))
    np.testing.assert_allclose(figures["gradient_norm"], norm, rtol=1e-5)


# Updates


def test_sgd_subtracts_the_gradient():
    packed = batch(**ON_POLICY)
    direction, _ = gradient(LOSS, packed, WHOLE)
    trainable, state, _ = run(packed)
    expected = flat(parameters()[0]) - 0.1 * flat(direction)
    np.testing.assert_allclose(flat(trainable), expected, rtol=1e-5, atol=1e-7)
    assert state[-1].count == 1


def test_learning_rate_zero_leaves_parameters_bit_identical():
    trainable, _, _ = run(batch(), EVERY_TERM, replace(ADAM, learning_rate=0.0))
    for name, value in parameters()[0].items():
        assert np.asarray(trainable[name]).tobytes() == np.asarray(value).tobytes()


def test_updates_per_batch_are_updates_on_consecutive_groups():
    packed = batch()
    lines: list[str] = []
    trainable, state, figures = run(packed, LOSS, ADAM, 5, updates=2, progress=lines.append)
    assert state[-1].count == 2
    first, last = num_bins(packed, [0]), num_bins(packed, [2, 3])  # group 1 has no signal
    assert lines[0] == f"update 1 of 2: micro-batch 1 of {first}"
    assert lines[-1] == f"update 2 of 2: micro-batch {last} of {last}"

    expected, frozen = parameters()
    expected_state, parts = init_optimizer(ADAM, expected), []
    for groups in ((0, 2), (2, 4)):
        part = packed.groups(*groups)
        expected, expected_state, figure = update(
            LORA, expected, frozen, expected_state, part, LOSS, ADAM, 5, 1
        )
        parts.append(figure)
    np.testing.assert_array_equal(flat(trainable), flat(expected))
    for name in ("loss", "policy_loss", "gradient_norm"):
        assert figures[name] == pytest.approx((parts[0][name] + parts[1][name]) / 2)
    for name in ("logprob_drift_mean", "logprob_drift_max"):  # later ones are no longer the start's
        assert figures[name] == parts[0][name]
    assert figures["num_tokens"] == parts[0]["num_tokens"] + parts[1]["num_tokens"]


def test_the_update_takes_ownership():
    trainable, frozen = parameters()
    state = init_optimizer(ADAM, trainable)
    update(LORA, trainable, frozen, state, batch(**ON_POLICY), LOSS, ADAM, WHOLE, 1)
    assert all(array.is_deleted() for array in jax.tree.leaves((trainable, state)))
    assert not any(array.is_deleted() for array in frozen.values())


def test_one_gradient_program_whatever_the_numbers_are():
    packed = batch(**ON_POLICY)
    run(packed, micro=60)
    before = add_gradient._cache_size()
    for optimizer in (SGD, replace(SGD, learning_rate=0)):
        for loss in (LOSS, replace(LOSS, clip_high=1, kl_coefficient=0)):
            run(batch(zero_groups=(), **ON_POLICY), loss, optimizer, micro=60)
            run(packed, replace(loss, aggregation="sequence-mean-token-mean"), optimizer, micro=60)
    assert add_gradient._cache_size() - before <= 1  # a group more may be another shape


def test_layers_that_are_computed_again_change_no_gradient():
    packed = batch(**ON_POLICY)
    trainable, _, figures = run(packed, spec=FULL)
    other, _, others = run(packed, spec=FULL, remat="layer")
    assert_close(other, trainable, 1e-6)
    assert others == pytest.approx(figures, rel=1e-5, abs=1e-7)


def compiled_gradient(packed, micro_batch_tokens, remat="none", spec=FULL):
    """The program of one micro-batch, as `update` would run it."""
    objective = reinforcement_objective(packed, LOSS)
    shape, parts = packed.divide(objective.is_needed_PG, micro_batch_tokens)
    rows = next(micro_batches(packed, objective.weights_PGT, shape, parts))
    program = Program(spec, objective.loss_function, shape.num_shared, remat)
    trainable, frozen = parameters(spec)
    arrays = objective.config, trainable, frozen, trainable, rows
    return gradient_function(remat).lower(program, *arrays).compile()


def test_the_memory_of_an_update_follows_the_budget_and_not_the_batch():
    def many(num_groups):
        ids = np.repeat(np.arange(num_groups), 8)
        return pack(
            group_ids=ids,
            prompt_tokens=[[1, 2, 3, int(group) % 11] for group in ids],
            completion_tokens=[[4] * 8] * len(ids),
            advantages=[[1.0] * 8] * len(ids),
            temperature=1.0,
        )

    def peak(num_groups, tokens, remat="none", spec=FULL):
        compiled = compiled_gradient(many(num_groups), tokens, remat, spec)
        return compiled.memory_analysis().temp_size_in_bytes

    assert peak(16, 400) == peak(32, 400)
    assert peak(16, 1600) > 3 * peak(16, 400)
    deep = ModelSpec(replace(CONFIG, num_hidden_layers=6))
    assert peak(16, 1600, "layer", deep) < 0.75 * peak(16, 1600, "none", deep)


def test_a_gradient_in_bfloat16_is_summed_in_float32():
    packed = batch(**ON_POLICY)
    half = ModelSpec(CONFIG, dtype="bfloat16")
    objective = reinforcement_objective(packed, LOSS)
    rounded = {name: value.astype("bfloat16") for name, value in parameters(FULL)[0].items()}
    whole = {name: value.astype("float32") for name, value in rounded.items()}
    totals = [
        sum_gradients(spec, trainable, {}, packed, objective, 40, lambda line: None)[0]
        for spec, trainable in ((half, rounded), (FULL, whole))
    ]
    assert {value.dtype for value in totals[0].values()} == {jnp.dtype("float32")}
    assert_close(totals[0], totals[1], 0.05)


def test_training_raises_the_probability_of_what_was_rewarded():
    data = rollouts() | ON_POLICY
    lengths = [len(tokens) for tokens in data["completion_tokens"]]
    data["advantages"] = each_token([2.0, -0.5, -0.5, -0.5, -0.5] * P, lengths)
    packed = pack(**data)
    trainable, frozen = parameters()
    before = score_batch(LORA, trainable, frozen, packed, WHOLE).sum(axis=2)
    state = init_optimizer(ADAM, trainable)
    for _ in range(3):
        trainable, state, _ = update(LORA, trainable, frozen, state, packed, LOSS, ADAM, WHOLE, 1)
    after = score_batch(LORA, trainable, frozen, packed, WHOLE).sum(axis=2)
    assert (after - before)[:, 0].mean() > (after - before)[:, 1:].mean()


# Supervised


def test_supervised_loss_of_a_uniform_policy_is_the_log_of_the_vocabulary():
    trainable, frozen = uniform()
    packed = pack_supervised([[1], [2, 3], [4]], [[1, 2], [3], [4, 5, 6]])
    state = init_optimizer(SGD, trainable)
    _, _, figures = supervised_update(LORA, trainable, frozen, state, packed, SGD, 16)
    np.testing.assert_allclose(figures["loss"], np.log(11), rtol=1e-6)
    np.testing.assert_allclose(figures["entropy"], np.log(11), rtol=1e-6)
    assert (figures["num_tokens"], figures["completion_length_mean"]) == (6.0, 2.0)


def test_supervised_update_learns_and_does_not_depend_on_the_micro_batch():
    prompts, completions = [[1], [2, 3], [4]], [[1, 2, 5], [3], [4, 5, 6]]
    packed, losses = pack_supervised(prompts, completions), []
    for size in (1, 20):
        trainable, frozen = parameters()
        state = init_optimizer(ADAM, trainable)
        for _ in range(5):
            trainable, state, figures = supervised_update(
                LORA, trainable, frozen, state, packed, ADAM, size
            )
            losses.append(figures["loss"])
    np.testing.assert_allclose(losses[:5], losses[5:], rtol=1e-4)
    assert losses[4] < losses[0]
    scored = score_batch(LORA, *parameters(), packed, 20)
    np.testing.assert_allclose(losses[0], -scored.sum() / 7, rtol=1e-5)


# Scoring


def test_scores_come_back_in_the_order_of_the_rollouts():
    data = rollouts()
    order = np.random.default_rng(1).permutation(P * G)
    for name, values in data.items():
        if name != "temperature":
            data[name] = [values[row] for row in order]
    packed = pack(**data)
    trainable, frozen = parameters()
    expected, _ = one_by_one(trainable, frozen, data)
    for size in (30, WHOLE):
        scores = unpack(
            score_batch(LORA, trainable, frozen, packed, size), packed, data["group_ids"]
        )
        for row, tokens in enumerate(data["completion_tokens"]):
            np.testing.assert_allclose(
                scores[row], expected[row, : len(tokens)], rtol=2e-5, atol=1e-6
            )


# The layout


def test_pack_lays_rollouts_out_by_group():
    packed = pack(
        group_ids=["b", "a", "b"],
        prompt_tokens=[[1, 2], [3], [1, 2]],
        completion_tokens=[[4, 5], [6], [7, 8, 9]],
        advantages=[[0.5, 0.25], [1.5], [-0.5, 0.0, 0.5]],
        temperature=0.7,
    )
    assert packed.group_shape == (2, 2)
    np.testing.assert_array_equal(packed.prompt_tokens_PT, [[1, 2], [3, 0]])
    np.testing.assert_array_equal(packed.prompt_lengths_P, [2, 1])
    np.testing.assert_array_equal(packed.completion_lengths_PG, [[2, 3], [1, 0]])
    np.testing.assert_array_equal(packed.completion_tokens_PGT[0, 1], [7, 8, 9])
    np.testing.assert_array_equal(packed.advantages_PGT[0], [[0.5, 0.25, 0.0], [-0.5, 0.0, 0.5]])
    np.testing.assert_array_equal(packed.advantages_PGT[1], [[1.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert packed.trained_mask().sum() == 6
    assert packed.completion_tokens_PGT.shape == (2, 2, 3)


def test_groups_of_different_sizes_train_like_their_rollouts():
    data = rollouts(zero_groups=())
    kept = [row for row in range(P * G) if row not in (1, 7, 8)]
    cut = {k: [v[row] for row in kept] if k != "temperature" else v for k, v in data.items()}
    mask = [values & (row in kept) for row, values in enumerate(data["completion_mask"])]
    masked = {**data, "completion_mask": mask}
    for config in (LOSS, replace(LOSS, aggregation="sequence-mean-token-mean")):
        actual, _ = gradient(config, pack(**{**cut, **ON_POLICY}), WHOLE)
        expected, _ = gradient(config, pack(**{**masked, **ON_POLICY}), WHOLE)
        assert_close(actual, expected)


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_tokens": [[1]] * 19 + [[]]}, "completion of rollout 19"),
        ({"rollout_logprobs": [[-1.0] * 9] * 20}, "rollout_logprobs of rollout 0 has 9 entries"),
        ({"prompt_tokens": [[1]] * 19 + [[2]]}, "group 3 has more than one prompt"),
    ],
)
def test_pack_refuses(changes, message):
    with pytest.raises(MeshdialError, match=message):
        batch(**changes)


def test_an_unfit_batch_is_refused():
    with pytest.raises(MeshdialError, match="updates_per_batch is 3, which does not divide"):
        run(batch(), updates=3)
    with pytest.raises(MeshdialError, match="no proximal"):
        run(batch(proximal_logprobs=None), updates=2)
    with pytest.raises(MeshdialError, match="no reference"):
        run(batch(reference_logprobs=None), replace(LOSS, kl_coefficient=0.1))
    packed = batch()
    packed.rollout_logprobs_PGT[packed.trained_mask()] = np.nan
    with pytest.raises(MeshdialError, match="rollout log-probabilities of the batch"):
        run(packed)
    packed = weighted(batch())
    packed.off_policy_weights_PGT[packed.trained_mask()] = np.inf
    with pytest.raises(MeshdialError, match="the off-policy weights of the batch"):
        run(packed)
    with pytest.raises(MeshdialError, match="the advantages of the batch"):
        packed = batch()
        packed.advantages_PGT[0] = np.inf
        run(packed)


def test_divergence_is_refused():
    trainable, frozen = parameters()
    trainable = {name: value.at[0, 0].set(jnp.nan) for name, value in trainable.items()}
    state = init_optimizer(SGD, trainable)
    with pytest.raises(MeshdialError, match="the loss is nan in micro-batch 1 of 1"):
        update(LORA, trainable, frozen, state, batch(**ON_POLICY), LOSS, SGD, WHOLE, 1)
