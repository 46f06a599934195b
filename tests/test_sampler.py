"""Rollouts from end to end, on a model small enough to check every number."""

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.errors import ClientGone, MeshdialError
from rl.models.shared_prefix import num_shared_tokens
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec
from rl.models.transformer import completion_logprobs, init_lora, init_parameters, prefill
from rl.rollout import engine, sampler
from rl.rollout.batching import (
    bucket,
    compacted_rows,
    plan_batches,
    prompt_slots,
)
from rl.rollout.completion import Row
from rl.rollout.sampler import generate
from rl.rollout.sampling import SamplingConfig

CONFIG = ModelConfig(
    vocab_size=30,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    max_position_embeddings=256,
)
SPEC = ModelSpec(CONFIG)
# Wide enough that probabilities are far from uniform.
PARAMETERS = {
    name: values if name.endswith("scale") else values * 12
    for name, values in init_parameters(CONFIG, seed=1).items()
}
# Few shapes, as each compiles for seconds: 5 prompts of at most 8 tokens, 4 samples, 9 new tokens.
PROMPTS = [[5, 6, 7], [8], [3, 1, 4, 1, 5, 9, 2, 6], [5, 6, 8, 9], [2, 7, 1, 8, 2, 8]]


class Letters:
    """Token i is the i-th of these texts; 0 is padding and 1 ends a text."""

    pad_id = 0

    def __init__(self, eos_ids=(1,), texts="__abcdefghijklmnopqrstuvwxyzAB"):
        self.eos_ids = eos_ids
        self.texts = texts

    def decode(self, ids):
        return "".join(self.texts[i] for i in ids)


NEVER_ENDS = Letters(eos_ids=())


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
    """Half the time of these tests would be XLA's optimisations."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def rollouts(prompts=PROMPTS, tokenizer=NEVER_ENDS, *, numbers=None, seed=0, **options):
    settings = {"max_tokens": 9, "temperature": 1.0} | {
        name: options.pop(name) for name in list(options) if hasattr(SamplingConfig(1), name)
    }
    arguments = {"group_size": 4, "max_rows": 64, "trainable": {}, "frozen": PARAMETERS} | options
    return generate(
        arguments.pop("spec", SPEC),
        arguments.pop("trainable"),
        arguments.pop("frozen"),
        tokenizer,
        prompts,
        (seed, 4, range(len(prompts)) if numbers is None else numbers),
        sampling=SamplingConfig(**settings),
        **arguments,
    )


def tokens_of(groups):
    return [[completion.tokens.tolist() for completion in group] for group in groups]


def scored(groups, prompts, temperature, spec=SPEC, trainable=None, frozen=PARAMETERS):
    """What the trainer's forward pass says of the sampled tokens, by prompt and sample."""
    lengths = [[len(completion.tokens) for completion in group] for group in groups]
    prompts_PT = np.zeros((len(prompts), bucket(max(map(len, prompts)))), np.int32)
    tokens_PGT = np.zeros((*np.shape(lengths), max(np.max(lengths), 9)), np.int32)
    for p, group in enumerate(groups):
        prompts_PT[p, : len(prompts[p])] = prompts[p]
        for g, completion in enumerate(group):
            tokens_PGT[p, g, : lengths[p][g]] = completion.tokens
    score = jax.jit(completion_logprobs, static_argnums=0)
    prompt_lengths = np.array([len(prompt) for prompt in prompts])
    model = (spec, trainable or {}, frozen)
    return score(*model, prompts_PT, prompt_lengths, tokens_PGT, np.array(lengths), temperature)[0]


# Values


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 4}])
def test_logprobs_are_the_trainers(temperature, truncation):
    groups = rollouts(tokenizer=Letters(), temperature=temperature, **truncation)
    expected = scored(groups, PROMPTS, temperature)
    for p, group in enumerate(groups):
        for g, completion in enumerate(group):
            own = np.asarray(expected[p, g, : len(completion.tokens)])
            np.testing.assert_allclose(completion.logprobs, own, atol=1e-4)


def test_logprobs_are_the_trainers_with_an_adapter_and_without_tied_embeddings():
    config = ModelConfig(**{**vars(CONFIG), "tie_word_embeddings": False})
    spec = ModelSpec(config, LoraConfig(2, 4.0, ("q_proj", "v_proj", "down_proj")))
    frozen = {name: values * 5 for name, values in init_parameters(config, seed=2).items()}
    trainable = {name: values + 0.3 for name, values in init_lora(spec, seed=3).items()}
    model = {"spec": spec, "trainable": trainable, "frozen": frozen}
    groups = rollouts(temperature=0.8, **model)
    expected = scored(groups, PROMPTS, 0.8, **model)
    found = np.array([[completion.logprobs for completion in group] for group in groups])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    without = scored(groups, PROMPTS, 0.8, spec=ModelSpec(config), frozen=frozen)
    assert np.abs(found - without).max() > 0.1


def test_sampling_logprobs_only_where_truncating():
    assert all(c.sampling_logprobs is None for group in rollouts() for c in group)
    groups = rollouts(top_k=1)
    for completion in (c for group in groups for c in group):
        np.testing.assert_allclose(completion.sampling_logprobs, 0.0, atol=1e-6)
        assert (completion.logprobs < -0.01).any()


def test_greedy_takes_the_argmax_of_a_full_forward_pass_at_each_position():
    groups = rollouts(temperature=0.0)
    forward = jax.jit(prefill, static_argnums=0)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        tokens, logprobs = [], []
        for _ in range(9):
            text = np.zeros((1, 24), np.int32)
            text[0, : len(prompt) + len(tokens)] = prompt + tokens
            length = np.array([len(prompt) + len(tokens)])
            logits = np.asarray(forward(SPEC, {}, PARAMETERS, text, length)[0][0], np.float64)
            tokens.append(int(logits.argmax()))
            logprobs.append(logits.max() - np.log(np.exp(logits).sum()))
        for completion in group:
            assert completion.tokens.tolist() == tokens
            np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)


def test_tokens_are_as_frequent_as_they_are_probable():
    """Chi-square of the pairs of first two tokens, over 4,096 samples of one prompt."""
    (group,) = rollouts([[5, 6, 7]], group_size=4096, max_rows=1024, max_tokens=2, seed=11)
    forward = jax.jit(prefill, static_argnums=0)
    texts = np.array([[5, 6, 7, token] for token in range(30)], np.int32)
    first = jax.nn.softmax(forward(SPEC, {}, PARAMETERS, texts, np.full(30, 3))[0])[0]
    second = jax.nn.softmax(forward(SPEC, {}, PARAMETERS, texts, np.full(30, 4))[0])
    wanted = 4096 * np.asarray(first[:, None] * second, np.float64).reshape(-1)
    pairs = [30 * completion.tokens[0] + completion.tokens[1] for completion in group]
    counts = np.bincount(pairs, minlength=900)
    is_common = wanted > 5
    counts = np.append(counts[is_common], counts[~is_common].sum())
    wanted = np.append(wanted[is_common], wanted[~is_common].sum())
    freedom = len(wanted) - 1
    assert freedom > 50
    assert ((counts - wanted) ** 2 / wanted).sum() < freedom + 3.3 * math.sqrt(2 * freedom)


# A sample's tokens do not depend on how it ran


@pytest.fixture(scope="module")
def plain():
    return tokens_of(rollouts())


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 4},  # one prompt a batch
        {"max_rows": 11},  # batches of two prompts, the last half empty
        {"max_rows": 3},  # groups split in two
        {"steps_per_dispatch": 1},
        {"steps_per_dispatch": 2},
    ],
)
def test_tokens_do_not_depend_on_how_the_samples_were_batched(plain, options):
    assert tokens_of(rollouts(**options)) == plain


def test_tokens_do_not_depend_on_the_other_prompts_or_their_order(plain):
    prompts = [PROMPTS[3], [9, 9], PROMPTS[0], [4, 4, 4, 4, 4, 4, 4], PROMPTS[4]]
    found = tokens_of(rollouts(prompts, numbers=[3, 7, 0, 8, 4]))
    assert [found[0], found[2], found[4]] == [plain[3], plain[0], plain[4]]


def test_tokens_do_not_depend_on_the_group_size(plain):
    assert [group[:4] for group in tokens_of(rollouts(group_size=5))] == plain


def test_samples_and_seeds_and_prompt_numbers_differ(plain):
    assert all(len({tuple(tokens) for tokens in group}) == 4 for group in plain)
    assert all(a != b for a, b in zip(tokens_of(rollouts(seed=1)), plain, strict=True))
    moved = tokens_of(rollouts(numbers=range(10, 15)))
    assert all(a != b for a, b in zip(moved, plain, strict=True))


def test_a_shared_prefix_is_computed_once_and_changes_nothing(monkeypatch):
    preamble = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
    prompts = [preamble + tail for tail in ([3], [8, 4], [6, 2, 6], [4, 3], [4])]
    assert num_shared_tokens(prompts) == 16
    groups = rollouts(prompts)
    found = np.array([[completion.logprobs for completion in group] for group in groups])
    np.testing.assert_allclose(found, scored(groups, prompts, 1.0), atol=1e-4)
    monkeypatch.setattr(sampler, "num_shared_tokens", lambda prompts: 0)
    assert tokens_of(groups) == tokens_of(rollouts(prompts))


def test_a_long_run_drops_finished_rows_and_grows_its_cache(monkeypatch):
    """The own cache grows from 24 slots to 48, then 20 rows shrink to 10; nothing else changes."""
    options = {"tokenizer": Letters(eos_ids=(1, 2, 3)), "max_tokens": 40, "steps_per_dispatch": 1}
    whole, shrunk = {}, {}
    monkeypatch.setattr(engine, "COMPACT_STEPS", 1000)
    expected = rollouts(**options, figures=whole)
    monkeypatch.setattr(engine, "FIRST_SLOTS", 24)
    monkeypatch.setattr(engine, "COMPACT_STEPS", 1)
    groups = rollouts(**options, figures=shrunk)
    assert tokens_of(groups) == tokens_of(expected)
    lengths = [len(completion.tokens) for group in groups for completion in group]
    assert max(lengths) > 26 and min(lengths) < 8
    assert whole["decode_steps"] == shrunk["decode_steps"] == max(lengths) - 1
    assert whole["row_steps"] == 20 * whole["decode_steps"]
    num_open = [sum(length > step + 1 for length in lengths) for step in range(max(lengths) - 1)]
    is_small = [step > 24 and num <= 10 for step, num in enumerate(num_open)]
    assert any(is_small)
    assert shrunk["row_steps"] == sum(10 if small else 20 for small in is_small)
    expected = scored(groups, PROMPTS, 1.0)
    for p, group in enumerate(groups):
        for g, completion in enumerate(group):
            own = np.asarray(expected[p, g, : len(completion.tokens)])
            np.testing.assert_allclose(completion.logprobs, own, atol=1e-4)


# Where a completion ends


def test_completions_end_at_max_tokens_or_with_their_end_of_text_token():
    eos = (1, 2, 3, 4)
    groups = rollouts(tokenizer=Letters(eos_ids=eos))
    completions = [completion for group in groups for completion in group]
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    unbounded = [c for group in rollouts() for c in group]
    for completion, longer in zip(completions, unbounded, strict=True):
        tokens = longer.tokens.tolist()
        ends = [i for i, token in enumerate(tokens) if token in eos]
        kept = tokens[: ends[0] + 1] if ends else tokens
        assert completion.tokens.tolist() == kept
        assert len(completion.logprobs) == len(kept)
        assert completion.finish_reason == ("stop" if ends else "length")
        assert completion.text == Letters().decode(kept[:-1] if ends else kept)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_few_tokens(max_tokens, plain):
    groups = rollouts(max_tokens=max_tokens)
    assert tokens_of(groups) == [[tokens[:max_tokens] for tokens in group] for group in plain]


def test_no_step_is_taken_after_the_last_row_has_ended():
    figures = {}
    options = {"tokenizer": Letters(), "stop": tuple("abcdefghijklmnopqrs")}
    groups = rollouts(**options, steps_per_dispatch=1, figures=figures)
    longest = max(len(completion.tokens) for group in groups for completion in group)
    assert 1 < longest < 9
    assert figures["decode_steps"] == longest - 1
    assert figures["row_steps"] == 20 * (longest - 1)
    assert figures["num_tokens"] == sum(len(c.tokens) for group in groups for c in group)
    assert figures["num_batches"] == 1 and figures["seconds"] > 0


def test_end_of_text_ends_the_steps_on_the_device():
    figures = {}
    groups = rollouts(
        tokenizer=Letters(eos_ids=tuple(range(20))),
        steps_per_dispatch=8,
        figures=figures,
    )
    longest = max(len(completion.tokens) for group in groups for completion in group)
    assert 1 < longest < 9 and figures["decode_steps"] == longest - 1


def ended_row(tokens, texts, chunks, *, eos_ids=(), stop=(), max_tokens=100):
    row = Row(Letters(eos_ids, texts), SamplingConfig(max_tokens, stop=stop), 0)
    for size in chunks:
        new, tokens = tokens[:size], tokens[size:]
        row.extend(new, [-float(token) for token in new], [0.0] * size)
    return row.completion()


@pytest.mark.parametrize("chunks", [[1] * 6, [2, 2, 2], [6], [5, 1]])
@pytest.mark.parametrize(
    ("tokens", "options", "kept", "text", "reason"),
    [
        ([0, 1, 2, 3, 4, 0], {"stop": ("lo w",)}, 5, "hel", "stop"),  # spans three tokens
        ([0, 1, 2, 3, 4, 0], {"stop": ("ell",)}, 2, "h", "stop"),  # ends within a token
        ([0, 1, 2, 3, 4, 0], {"stop": ("o", "ello")}, 3, "h", "stop"),  # the first to begin
        ([3, 0, 1, 2, 3, 4], {"stop": (" ",)}, 1, "", "stop"),
        ([0, 1, 2, 3, 4, 0], {"stop": ("zz",), "max_tokens": 3}, 3, "hello", "length"),
        ([0, 1, 2, 3, 4, 0], {"stop": ("wor",), "max_tokens": 5}, 5, "hello ", "stop"),
        ([0, 1, 2, 3, 4, 0], {"eos_ids": (3, 4), "stop": ("wor",)}, 4, "hello", "stop"),
        ([0, 1, 2, 3, 4, 0], {"eos_ids": (4,), "stop": ("o ",)}, 4, "hell", "stop"),
        ([0, 1, 2, 3, 4, 0], {"eos_ids": (4,), "max_tokens": 4}, 4, "hello ", "length"),
        ([0, 1, 2, 3, 4, 0], {"eos_ids": (4,), "max_tokens": 5}, 5, "hello ", "stop"),
        ([4, 0, 0, 0, 0, 0], {"eos_ids": (4,)}, 1, "", "stop"),
    ],
)
def test_where_a_completion_is_cut(chunks, tokens, options, kept, text, reason):
    texts = ["he", "ll", "o", " ", "world"]
    completion = ended_row(tokens, texts, chunks, **options)
    assert completion.tokens.tolist() == tokens[:kept]
    assert completion.logprobs.tolist() == [-float(token) for token in tokens[:kept]]
    assert (completion.text, completion.finish_reason) == (text, reason)


# Refusals


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5], []], "prompt 1 has no tokens, expected at least one"),
        ([[5] * 248], r"prompt 0 has 248 tokens, expected at most 247: the model's max_position"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named(prompts, message):
    with pytest.raises(MeshdialError, match=message):
        rollouts(prompts)


def test_the_longest_prompt_runs():
    prompts = [[5] * 247]
    (group,) = rollouts(prompts, group_size=2)
    found = [completion.logprobs for completion in group]
    np.testing.assert_allclose(found, scored([group], prompts, 1.0)[0], atol=1e-4)


def test_logits_that_are_not_finite_are_refused():
    name = "layers.1.mlp.up_proj.kernel"
    broken = {**PARAMETERS, name: PARAMETERS[name].at[0, 0].set(jnp.nan)}
    with pytest.raises(MeshdialError, match="a completion of prompt 1 are not finite"):
        rollouts(frozen=broken)


def test_a_dead_client_ends_the_call_between_dispatches():
    calls = []

    def check_alive():
        calls.append(None)
        if len(calls) == 3:
            raise ClientGone

    with pytest.raises(ClientGone):
        rollouts(check_alive=check_alive, steps_per_dispatch=1)


def test_progress_tells_how_many_completions_are_done(monkeypatch):
    monkeypatch.setattr(engine, "PROGRESS_TOKENS", 4)
    lines = []
    rollouts(max_rows=11, progress=lines.append, steps_per_dispatch=2)
    assert lines[:3] == [
        "0 of 20 completions, 5 tokens into the next",
        "8 of 20 completions",
        "8 of 20 completions, 5 tokens into the next",
    ]
    assert lines[3::2] == ["16 of 20 completions", "20 of 20 completions"]


# Shapes


def compiled(caplog):
    return [r.message for r in caplog.records if r.message.startswith("Compiling jit")]


def test_like_calls_compile_nothing_anew(caplog):
    """Other samplings, seeds, numbers of tokens and steps are numbers, not programs."""
    rollouts()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        rollouts(seed=9)
        rollouts(temperature=0.0)
        rollouts(top_k=3, top_p=0.9, min_p=0.1, temperature=0.5, max_tokens=8)
        rollouts(steps_per_dispatch=1, stop=("a",), tokenizer=Letters())
        rollouts([[4, 4], *PROMPTS[1:]])
    assert compiled(caplog) == []


def test_a_call_compiles_the_model_twice_whatever_the_number_of_batches(caplog):
    prompts = [[token] * 5 for token in range(9)]
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        rollouts(prompts, group_size=2, max_rows=6)
    names = [message.split()[1] for message in compiled(caplog)]
    assert sorted(names) == [
        "jit(decode)",
        "jit(empty_own_cache)",
        "jit(sample_uniforms)",
        "jit(start)",
    ]


@pytest.mark.parametrize(
    ("lengths", "group_size", "max_rows", "batches", "shape"),
    [
        ([3, 9, 1], 2, 4, [((2, 0), 0, 2), ((1,), 0, 2)], (2, 2)),
        ([5] * 9, 8, 64, [((0, 1, 2, 3, 4), 0, 8), ((5, 6, 7, 8), 0, 8)], (5, 8)),
        ([4, 2], 5, 4, [((1,), 0, 3), ((1,), 3, 2), ((0,), 0, 3), ((0,), 3, 2)], (1, 3)),
        ([7] * 3, 1, 64, [((0, 1, 2), 0, 1)], (3, 1)),
        ([], 4, 8, [], (0, 4)),
    ],
)
def test_batches_are_even_and_sorted_by_length(lengths, group_size, max_rows, batches, shape):
    plan = plan_batches(lengths, group_size, max_rows)
    assert [(b.prompts, b.first_sample, b.num_samples) for b in plan.batches] == batches
    assert (plan.num_prompts, plan.group_size) == shape
    assert plan.num_rows <= max_rows


def test_buckets():
    lengths = [0, 1, 8, 9, 32, 33, 48, 49, 64, 65, 97, 128, 129, 200]
    assert [bucket(n) for n in lengths] == [8, 8, 8, 16, 32, 48, 48, 64, 64, 96, 128, 128, 192, 256]
    assert [compacted_rows(n, 64) for n in (64, 33, 32, 17, 16, 8, 1)] == [64, 64, 32, 32, 16, 8, 8]
    assert compacted_rows(3, 25) == 12
    assert [prompt_slots(n) for n in (1, 64, 65, 128, 129)] == [64, 64, 128, 128, 256]


@pytest.mark.parametrize(
    ("prompts", "num_shared"),
    [
        ([list(range(20))], 0),
        ([list(range(20)), list(range(20))], 16),
        ([list(range(32)), list(range(32))], 16),  # each keeps a token of its own
        ([list(range(33)), list(range(33))], 32),
        ([list(range(33)), [*range(31), 99, 99]], 16),
        ([[1], [1]], 0),
        ([[1, 2, 3] * 9, [2] * 40], 0),
    ],
)
def test_the_shared_prefix_is_a_multiple_of_sixteen_and_leaves_a_token(prompts, num_shared):
    assert num_shared_tokens(prompts) == num_shared
