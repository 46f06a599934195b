"""Every ratio and clip through the learner, epochs, and the critic, against plain formulas."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from rl import sharding
from rl.learner import ValueLossConfig, init_optimizer, pack, update, update_values
from rl.models.spec import ModelSpec
from rl.models.transformer import VALUE_HEAD

from .plain_llama import plain_logits
from .test_learner import (
    ADAM,
    CONFIG,
    LORA,
    LOSS,
    SGD,
    WHOLE,
    G,
    P,
    _small_bins,  # noqa: F401
    assert_close,
    batch,
    flat,
    gradient,
    one_by_one,
    parameters,
    rollouts,
    run,
)
from .test_sharding import mesh

# Narrow enough that sequences are clipped on both sides, and some not.
BOUNDS = {"clip_low": 0.15, "clip_high": 0.25, "clip_dual": 1.4}
LOW, HIGH, DUAL = BOUNDS.values()
CASES = [
    (level, clip) for level in ("token", "sequence") for clip in ("ppo", "dual", "cispo", "none")
]
FEW = [("token", "ppo"), ("sequence", "dual")]
AGGREGATION = {"token": "token-mean", "sequence": "sequence-mean-token-mean"}


def loss_of(level, clip):
    return replace(LOSS, ratio=level, clip=clip, aggregation=AGGREGATION[level], **BOUNDS)


# The policy


@cache
def scored():
    """(log-probabilities of the rollouts [N, T], how their slopes become the parameters')."""
    trainable, frozen = parameters()
    data = rollouts()
    return jax.vjp(lambda trainable: one_by_one(trainable, frozen, data)[0], trainable)


def near_the_policy():
    """Rollouts whose proximal policy is near the current one, on either side of it."""
    data, rng = rollouts(), np.random.default_rng(6)
    logprobs, _ = scored()
    data["proximal_logprobs"] = [
        np.asarray(logprobs[row, : len(tokens)]) + 0.5 * rng.standard_normal(len(tokens))
        for row, tokens in enumerate(data["completion_tokens"])
    ]
    return data


def token_slopes(clip, ratio, advantage):
    """d loss / d log-probability of a token, or of a sequence's mean log-probability."""
    if clip == "cispo":
        return -min(max(ratio, 1 - LOW), 1 + HIGH) * advantage
    is_flat = clip != "none" and (
        (advantage > 0 and ratio > 1 + HIGH) or (advantage < 0 and ratio < 1 - LOW)
    )
    is_flat = is_flat or (clip == "dual" and advantage < 0 and ratio > DUAL)
    return 0.0 if is_flat else -ratio * advantage


def slopes_by_hand(level, clip, data, logprobs):
    """d loss / d log-probability [N, T], float64, one sequence after the other."""
    masks = [np.array(mask) for mask in data["completion_mask"]]
    num_tokens = sum(mask.sum() for mask in masks)
    slopes = np.zeros(logprobs.shape)
    for row, mask in enumerate(masks):
        own = np.flatnonzero(mask)
        advantage = float(data["advantages"][row][0])
        proximal = np.array(data["proximal_logprobs"][row], np.float64)
        log_ratios = logprobs[row, own] - proximal[own]
        if level == "token":
            of_tokens = [token_slopes(clip, np.exp(d), advantage) for d in log_ratios]
            slopes[row, own] = np.array(of_tokens) / num_tokens
        else:  # a sequence's loss is a function of the mean of its tokens' log-probabilities
            slope = token_slopes(clip, np.exp(log_ratios.mean()), advantage)
            slopes[row, own] = slope / len(own) / len(masks)
    return slopes


@pytest.mark.parametrize(("level", "clip"), CASES)
def test_the_gradient_is_the_plain_one_whatever_the_micro_batch_and_masked_tokens_hold(level, clip):
    data = near_the_policy()
    logprobs, pull = scored()
    slopes = slopes_by_hand(level, clip, data, np.asarray(logprobs, np.float64))
    (expected,) = pull(slopes.astype(np.float32))

    config, packed = loss_of(level, clip), pack(**data)
    found, sums = gradient(config, packed, WHOLE)
    assert_close(found, expected)
    clipped = sums["clipped"] / sums["weight"]
    assert clipped == 0 if clip == "none" else 0.15 < clipped < 0.85
    actual, _ = gradient(config, packed, 1)  # one bin at a time
    assert_close(actual, expected)

    outside = ~packed.trained_mask()
    for name in ("advantages", "rollout_logprobs", "proximal_logprobs", "reference_logprobs"):
        getattr(packed, f"{name}_PGT")[outside] = np.nan
    dirty, _ = gradient(config, packed, WHOLE)
    np.testing.assert_array_equal(flat(dirty), flat(found))


@pytest.mark.parametrize(
    ("level", "clip"),
    [case if case in FEW else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_four_devices_change_no_gradient(level, clip):
    config, packed = loss_of(level, clip), pack(**near_the_policy())
    expected, sums = gradient(config, packed, WHOLE)
    with sharding.on(mesh(data=2, fsdp=2)):
        found, others = gradient(config, packed, 40)
    assert_close(found, expected)
    assert others == pytest.approx(sums, rel=1e-5, abs=1e-6)


def test_a_sequence_has_one_ratio_however_its_tokens_differ():
    """On-policy but for tokens whose log ratios cancel: nothing is clipped, where by tokens all
    would be."""
    data = rollouts(zero_groups=())
    logprobs, _ = scored()
    for row, mask in enumerate(data["completion_mask"]):
        mask[:] = np.arange(len(mask)) < len(mask) // 2 * 2  # an even number of tokens, or none
        shift = np.where(np.arange(len(mask)) % 2 == 0, 2.0, -2.0)
        data["proximal_logprobs"][row] = np.asarray(logprobs[row, : len(mask)]) + shift
    packed = pack(**data)
    _, by_sequence = gradient(loss_of("sequence", "ppo"), packed, WHOLE)
    _, by_token = gradient(loss_of("token", "ppo"), packed, WHOLE)
    assert by_sequence["clipped"] == 0
    assert by_sequence["ratio"] == pytest.approx(by_sequence["weight"], rel=1e-5)
    assert by_token["clipped"] > 0.3 * by_token["weight"]


# Epochs, and an update that is not applied


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_epochs_and_updates_are_the_same_updates_by_hand(level):
    packed, config = batch(), loss_of(level, "ppo")
    trainable, state, _ = run(packed, config, ADAM, updates=2, epochs=3)
    expected, frozen = parameters()
    expected_state = init_optimizer(ADAM, expected)
    for groups in [(0, 2), (2, 4)] * 3:
        expected, expected_state, _ = update(
            *(LORA, expected, frozen, expected_state, packed.groups(*groups)),
            *(config, ADAM, WHOLE, 1),
        )
    assert state[-1].count == 6
    np.testing.assert_array_equal(flat(trainable), flat(expected))
    for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_an_update_that_is_not_applied_changes_nothing_and_measures_the_first_epoch():
    packed = batch()
    trainable, frozen = parameters()
    state = init_optimizer(ADAM, trainable)
    before = jax.tree.map(np.array, (trainable, state))
    after, state, figures = update(
        *(LORA, trainable, frozen, state, packed, LOSS, ADAM, WHOLE, 2), epochs=3, is_applied=False
    )
    pairs = zip(jax.tree.leaves((after, state)), jax.tree.leaves(before), strict=True)
    assert all(np.asarray(found).tobytes() == kept.tobytes() for found, kept in pairs)
    assert state[-1].count == 0
    assert figures["learning_rate"] == 0
    halves = [gradient(LOSS, packed.groups(*groups), WHOLE) for groups in ((0, 2), (2, 4))]
    norms = [np.linalg.norm(flat(slope)) for slope, _ in halves]
    assert figures["gradient_norm"] == pytest.approx(np.mean(norms), rel=1e-5)
    assert figures["loss"] == pytest.approx(np.mean([s["loss"] for _, s in halves]), rel=1e-5)


# The critic

CRITIC = ModelSpec(CONFIG, LORA.lora, head="value")
VALUE_CLIP = 0.4


def critic():
    adapter, base = parameters()
    return {**adapter, VALUE_HEAD: jax.random.normal(jax.random.key(3), (8, 1))}, base


def judged():
    """Arguments of `pack` for a critic: the values before the update are near the critic's own."""
    data, rng = rollouts(), np.random.default_rng(4)
    for name in ("proximal_logprobs", "reference_logprobs", "rollout_logprobs", "advantages"):
        del data[name]
    own = plain_values(*critic(), data)
    data["values"] = [v + 0.5 * rng.standard_normal(len(v)) for v in own]
    data["returns"] = [v + rng.standard_normal(len(v)) for v in own]
    return data


def plain_values(trainable, frozen, data):
    """The value of the state before each completion token, in float64: the head as an LM head of
    one word."""
    weights = {**frozen, **trainable, "lm_head.kernel": trainable[VALUE_HEAD]}
    untied, values = replace(CONFIG, tie_word_embeddings=False), []
    for prompt, completion in zip(data["prompt_tokens"], data["completion_tokens"], strict=True):
        of_all = plain_logits(untied, LORA.lora, weights, [*prompt, *completion])[:, 0]
        values.append(of_all[len(prompt) - 1 : -1])
    return values


def plain_value_loss(trainable, frozen, data, clip):
    """Half the mean over trained tokens of the larger square."""
    losses = []
    for row, values in enumerate(plain_values(trainable, frozen, data)):
        old, returns = (np.array(data[key][row], np.float64) for key in ("values", "returns"))
        squares = (values - returns) ** 2
        if clip is not None:
            bounded = np.clip(values, old - clip, old + clip)
            squares = np.maximum(squares, (bounded - returns) ** 2)
        losses.append(squares[data["completion_mask"][row]])
    return 0.5 * np.concatenate(losses).mean()


def run_critic(packed, optimizer=SGD, micro=WHOLE, updates=1, clip=VALUE_CLIP, **options):
    trainable, frozen = critic()
    state = init_optimizer(optimizer, trainable)
    config = ValueLossConfig(clip)
    return update_values(
        CRITIC, trainable, frozen, state, packed, config, optimizer, micro, updates, **options
    )


def descent(trainable):
    """The gradient behind one update of SGD."""
    before, _ = critic()
    return {name: (np.asarray(before[name]) - trainable[name]) / 0.1 for name in before}


@pytest.mark.parametrize("clip", [None, VALUE_CLIP])
def test_the_critics_gradient_is_the_textbooks(clip):
    data = judged()
    trainable, _, figures = run_critic(pack(**data), clip=clip)
    slope = descent(trainable)
    before, frozen = critic()
    exact = {name: np.asarray(value, np.float64) for name, value in before.items()}
    rng, step = np.random.default_rng(0), 1e-6
    for kept in [None, VALUE_HEAD, *[name for name in exact if name != VALUE_HEAD]]:
        way = {
            name: rng.standard_normal(value.shape) * (kept in (None, name))
            for name, value in exact.items()
        }
        ends = [
            plain_value_loss({k: exact[k] + s * way[k] for k in exact}, frozen, data, clip)
            for s in (step, -step)
        ]
        along = sum(np.sum(slope[name] * way[name]) for name in exact)
        np.testing.assert_allclose(along, (ends[0] - ends[1]) / (2 * step), rtol=1e-3, atol=1e-5)
    loss = plain_value_loss(exact, frozen, data, clip)
    assert figures["value_loss"] == pytest.approx(loss, rel=1e-5)
    assert (figures["value_clip_fraction"] > 0.1) == (clip is not None)
    assert figures["gradient_norm"] == pytest.approx(np.linalg.norm(flat(slope)), rel=1e-4)


def test_the_critics_micro_batches_and_devices_change_nothing():
    packed = pack(**judged())
    trainable, _, figures = run_critic(packed)
    expected = descent(trainable)
    for size in (1, 60):
        actual, _, others = run_critic(packed, micro=size)
        assert_close(descent(actual), expected, 1e-4)
        assert others == pytest.approx(figures, rel=1e-5, abs=1e-6)
    with sharding.on(mesh(data=2, fsdp=2)):
        actual, _, others = run_critic(packed, micro=40)
    assert_close(descent(actual), expected, 1e-4)
    assert others == pytest.approx(figures, rel=1e-5, abs=1e-6)


def test_masked_tokens_do_not_count_for_the_critic():
    clean, dirty = pack(**judged()), pack(**judged())
    outside = ~dirty.trained_mask()
    dirty.values_PGT[outside], dirty.returns_PGT[outside] = np.nan, np.nan
    (expected, _, figures), (found, _, others) = run_critic(clean), run_critic(dirty)
    np.testing.assert_array_equal(flat(found), flat(expected))
    assert others == figures
    dirty.returns_PGT[clean.trained_mask()] += 1.0  # and those that do count, do
    assert np.abs(flat(run_critic(dirty)[0]) - flat(expected)).max() > 1e-3


def test_the_critics_epochs_and_updates_are_the_same_updates_by_hand():
    packed = pack(**judged())
    trainable, state, figures = run_critic(packed, ADAM, updates=2, epochs=2)
    expected, frozen = critic()
    expected_state, reports = init_optimizer(ADAM, expected), []
    for groups in [(0, 2), (2, 4)] * 2:
        expected, expected_state, report = update_values(
            *(CRITIC, expected, frozen, expected_state, packed.groups(*groups)),
            *(ValueLossConfig(VALUE_CLIP), ADAM, WHOLE, 1),
        )
        reports.append(report)
    assert state[-1].count == 4
    np.testing.assert_array_equal(flat(trainable), flat(expected))
    losses = [report["value_loss"] for report in reports]
    assert figures["value_loss"] == pytest.approx(np.mean(losses))
    assert losses[2] + losses[3] < losses[0] + losses[1]


def test_groups_that_the_policy_skips_train_the_critic():
    """A critic learns from returns, whatever the advantages are."""
    packed = pack(**judged())
    assert not packed.advantages_PGT.any()
    assert packed.group_shape == (P, G)
    assert run_critic(packed)[2]["num_tokens"] == packed.trained_mask().sum()
