"""Rollouts from end to end, on a model small enough to check every number."""

import functools
import logging
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl import sharding
from rl.compiling import Compiled
from rl.errors import ClientGone, MeshdialError
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec
from rl.models.transformer import init_lora, init_parameters
from rl.rollout import engine as engine_module
from rl.rollout import sampler
from rl.rollout.attention import cpu, pallas
from rl.rollout.attention.backends import InPlace
from rl.rollout.attention.pool import page_bytes
from rl.rollout.sampler import EngineConfig, generate
from rl.rollout.sampling import SamplingConfig

from .divergence import boundary_distance, first_difference, uniform
from .plain_llama import plain_logits, plain_scores

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
# Of one token, of less than a page, of a page and its neighbours, of several pages.
LENGTHS = (1, 3, 16, 17, 18, 40)
PROMPTS = [list(np.random.default_rng(n).integers(2, 30, n).tolist()) for n in LENGTHS]
SEED, ITERATION, MAX_TOKENS = 0, 4, 9


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


@pytest.fixture
def engines(monkeypatch):
    """The engines of the calls to `generate`."""
    made = []

    class Remembered(engine_module.Engine):
        def run(self):
            made.append(self)
            super().run()

    monkeypatch.setattr(sampler, "Engine", Remembered)
    return made


def rollouts(prompts=PROMPTS, tokenizer=NEVER_ENDS, *, numbers=None, seed=SEED, **options):
    """Four samples of nine tokens for each prompt, but for what the options say."""

    def taken(of):
        return {name: options.pop(name) for name in list(options) if hasattr(of, name)}

    sampling = SamplingConfig(**{"max_tokens": MAX_TOKENS} | taken(SamplingConfig(1)))
    engine = EngineConfig(**{"backend": "xla"} | taken(EngineConfig()))
    arguments = {"group_size": 4, "trainable": {}, "frozen": PARAMETERS} | options
    return generate(
        arguments.pop("spec", SPEC),
        arguments.pop("trainable"),
        arguments.pop("frozen"),
        tokenizer,
        prompts,
        (seed, ITERATION, range(len(prompts)) if numbers is None else numbers),
        sampling=sampling,
        engine=engine,
        **arguments,
    )


def tokens_of(groups):
    return [[completion.tokens.tolist() for completion in group] for group in groups]


def assert_scored(groups, prompts=PROMPTS, temperature=1.0, spec=SPEC, parameters=PARAMETERS):
    """The log-probabilities are those of a forward pass over each whole sequence."""
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            tokens = completion.tokens.tolist()
            packed = (spec.config, spec.lora, parameters, prompt, tokens, temperature)
            np.testing.assert_allclose(completion.logprobs, plain_scores(*packed)[0], atol=1e-4)


def assert_same(found, expected, prompts=PROMPTS, numbers=None, spec=SPEC, seed=SEED):
    """Completions part only where their random number lies on a boundary."""
    numbers = range(len(prompts)) if numbers is None else numbers
    for number, prompt, group, wanted in zip(numbers, prompts, found, expected, strict=True):
        for sample, (one, other) in enumerate(zip(group, wanted, strict=True)):
            tokens = one.tokens.tolist()
            position = first_difference(tokens, other.tokens.tolist())
            if position is not None:
                before = [*prompt, *tokens[:position]]
                logits = plain_logits(spec.config, spec.lora, PARAMETERS, before)[-1]
                drawn = uniform(seed, ITERATION, number, sample, position)
                assert boundary_distance(logits, drawn) < 1e-5, (number, sample, position)


# Values


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 4}])
def test_logprobs_are_those_of_a_plain_forward_pass(temperature, truncation):
    groups = rollouts(tokenizer=Letters(), temperature=temperature, **truncation)
    assert_scored(groups, temperature=temperature)


def test_logprobs_with_an_adapter_and_without_tied_embeddings():
    config = ModelConfig(**{**vars(CONFIG), "tie_word_embeddings": False})
    spec = ModelSpec(config, LoraConfig(2, 4.0, ("q_proj", "v_proj", "down_proj")))
    frozen = {name: values * 5 for name, values in init_parameters(config, seed=2).items()}
    trainable = {name: values + 0.3 for name, values in init_lora(spec, seed=3).items()}
    groups = rollouts(temperature=0.8, spec=spec, trainable=trainable, frozen=frozen)
    assert_scored(groups, PROMPTS, 0.8, spec, frozen | trainable)
    with pytest.raises(AssertionError):
        assert_scored(groups, PROMPTS, 0.8, ModelSpec(config), frozen)


KINDS = [
    {"sliding_window": 1},
    {"sliding_window": 5},
    {"sliding_window": 21, "layer_types": ("full_attention", "sliding_attention")},
    {"attn_logit_softcapping": 0.8},
    {"attn_logit_softcapping": 2.0, "sliding_window": 17},
]


@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_soft_caps(kind):
    spec = ModelSpec(ModelConfig(**vars(CONFIG) | kind))
    groups = rollouts(spec=spec, max_tokens=20)
    assert_scored(groups, spec=spec)
    with pytest.raises(AssertionError):
        assert_scored(groups)


def test_sampling_logprobs_only_where_truncating():
    assert all(c.sampling_logprobs is None for group in rollouts() for c in group)
    groups = rollouts(top_k=1)
    for completion in (c for group in groups for c in group):
        np.testing.assert_allclose(completion.sampling_logprobs, 0.0, atol=1e-6)
        assert (completion.logprobs < -0.01).any()


@pytest.mark.parametrize("kind", [{}, KINDS[1]])
def test_greedy_takes_the_argmax_of_a_full_forward_pass_at_each_position(kind):
    spec = ModelSpec(ModelConfig(**vars(CONFIG) | kind))
    groups = rollouts(temperature=0.0, spec=spec, group_size=2, max_tokens=MAX_TOKENS)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        tokens = []
        for _ in range(MAX_TOKENS):
            logits = plain_logits(spec.config, None, PARAMETERS, [*prompt, *tokens])[-1]
            tokens.append(int(logits.argmax()))
        assert tokens_of([group]) == [[tokens, tokens]]
    assert_scored(groups, spec=spec)


def test_tokens_are_as_frequent_as_they_are_probable():
    """Chi-square of the pairs of first two tokens, over 4,096 samples of one prompt."""
    (group,) = rollouts([[5, 6, 7]], group_size=4096, max_rows=1024, max_tokens=2, seed=11)

    def distribution(tokens):
        logits = plain_logits(CONFIG, None, PARAMETERS, tokens)[-1]
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    first = distribution([5, 6, 7])
    second = np.stack([distribution([5, 6, 7, token]) for token in range(30)])
    wanted = 4096 * (first[:, None] * second).reshape(-1)
    pairs = [30 * completion.tokens[0] + completion.tokens[1] for completion in group]
    counts = np.bincount(pairs, minlength=900)
    is_common = wanted > 5
    counts = np.append(counts[is_common], counts[~is_common].sum())
    wanted = np.append(wanted[is_common], wanted[~is_common].sum())
    freedom = len(wanted) - 1
    assert freedom > 50
    assert ((counts - wanted) ** 2 / wanted).sum() < freedom + 3.3 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("backend", ["xla", "auto"])
def test_bfloat16_rounds_keys_and_values_but_not_the_softmax(backend):
    jax.config.update("jax_disable_most_optimizations", False)  # as it runs, on any processor
    spec = ModelSpec(CONFIG, dtype="bfloat16")
    parameters = {name: values.astype("bfloat16") for name, values in PARAMETERS.items()}
    groups = rollouts(spec=spec, frozen=parameters, backend=backend)
    jax.config.update("jax_disable_most_optimizations", True)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            packed = (CONFIG, None, parameters, prompt, completion.tokens.tolist(), 1.0)
            expected = plain_scores(*packed)[0]
            np.testing.assert_allclose(completion.logprobs, expected, atol=0.08)
            assert completion.logprobs.dtype == np.float32


def test_the_kernel_of_the_processor_gives_the_same(engines):
    """Its values alone are tested elsewhere; here it decodes through the engine, with windows."""
    if reason := cpu.why_not():
        pytest.skip(reason)
    for kind in ({}, KINDS[2], KINDS[4]):
        spec = ModelSpec(ModelConfig(**vars(CONFIG) | kind))
        budget = 12 * page_bytes(SPEC, 16)
        groups = rollouts(spec=spec, backend="cpu", max_tokens=20, kv_cache_bytes=budget)
        assert_scored(groups, spec=spec)
        assert_same(groups, rollouts(spec=spec, max_tokens=20), spec=spec)
    assert_every_page_is_free(engines)


def test_pallas_gives_the_same(monkeypatch):
    """The GPU's kernel, interpreted, with a pool layout of its own."""
    attend = functools.partial(pallas.append_and_attend, platform="gpu", interpret=True)
    backend = InPlace("pallas", attend, pallas)
    monkeypatch.setattr(sampler, "choose_backend", lambda *arguments: backend)
    config = ModelConfig(**vars(CONFIG) | {"head_dim": 16, "num_hidden_layers": 1})
    parameters = {
        name: values if name.endswith("scale") else values * 12
        for name, values in init_parameters(config, seed=1).items()
    }
    options = {"spec": ModelSpec(config), "frozen": parameters, "group_size": 2}
    groups = rollouts(PROMPTS[-2:], **options)
    assert_scored(groups, PROMPTS[-2:], 1.0, ModelSpec(config), parameters)


# A sample's tokens do not depend on how it ran


@pytest.fixture(scope="module")
def plain():
    return rollouts()


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 1},
        {"max_rows": 5},  # groups begin in different dispatches
        {"max_rows": 11, "steps_per_dispatch": 3},
        {"steps_per_dispatch": 1},
        {"page_size": 8},
        {"page_size": 32},
    ],
)
def test_tokens_do_not_depend_on_slots_pages_and_dispatches(plain, options):
    groups = rollouts(**options)
    assert_same(groups, plain)
    assert_scored(groups)


@pytest.mark.parametrize("num_pages", [7, 9, 14])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_preempted_sample_goes_on_with_the_tokens_it_has(plain, engines, num_pages, steps):
    figures = {}
    budget = num_pages * page_bytes(SPEC, 16)
    options = {"kv_cache_bytes": budget, "steps_per_dispatch": steps, "max_tokens": 30}
    groups = rollouts(**options, figures=figures)
    assert figures["preemptions"] > 0
    assert figures["num_pages"] == num_pages and figures["kv_cache_bytes"] <= budget
    assert figures["peak_pages"] < num_pages
    cut = [[c.tokens[:MAX_TOKENS].tolist() for c in group] for group in groups]
    whole = tokens_of(plain)
    assert sum(a == b for a, b in zip(cut, whole, strict=True)) >= len(PROMPTS) - 1
    assert_scored(groups)
    assert_every_page_is_free(engines)


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 4, 1), (1, 1, 2), (2, 1, 2)])
def test_tokens_do_not_depend_on_shards(plain, engines, shape):
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    with sharding.on(jax.sharding.Mesh(devices, sharding.AXES)):
        groups = rollouts(frozen=sharding.placed(PARAMETERS))
    assert_same(groups, plain)
    assert_scored(groups)
    (engine,) = engines
    assert len(engine.schedulers) == shape[0] * shape[1]
    assert_every_page_is_free(engines)


def test_tokens_do_not_depend_on_the_other_prompts_or_their_order(plain):
    prompts = [PROMPTS[3], [9, 9], PROMPTS[0], [4, 4, 4, 4, 4, 4, 4], PROMPTS[4], PROMPTS[5]]
    groups = rollouts(prompts, numbers=[3, 7, 0, 8, 4, 5])
    found = [groups[0], groups[2], groups[4], groups[5]]
    chosen = [3, 0, 4, 5]
    expected = [plain[number] for number in chosen]
    assert_same(found, expected, [PROMPTS[n] for n in chosen], chosen)


@pytest.mark.parametrize("group_size", [1, 2, 32])
def test_tokens_do_not_depend_on_the_group_size(plain, group_size):
    groups = rollouts(group_size=group_size)
    num = min(group_size, 4)
    assert_same([group[:num] for group in groups], [group[:num] for group in plain])
    assert_scored(groups)


def test_samples_and_seeds_and_prompt_numbers_differ(plain):
    plain = tokens_of(plain)
    assert all(len({tuple(tokens) for tokens in group}) == 4 for group in plain[1:])
    assert all(a != b for a, b in zip(tokens_of(rollouts(seed=1)), plain, strict=True))
    moved = tokens_of(rollouts(numbers=range(10, 16)))
    assert all(a != b for a, b in zip(moved, plain, strict=True))


def test_what_prompts_begin_with_is_computed_once():
    preamble = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
    prompts = [preamble + tail for tail in ([3], [8, 4], [6, 2, 6], [4, 3], [4])]
    figures = {}
    groups = rollouts(prompts, figures=figures)
    own = [len(prompt) - 16 for prompt in prompts]
    assert figures["prefill_tokens"] == 16 + sum(own)
    assert_scored(groups, prompts)


def test_a_long_prompt_is_prefilled_in_chunks_and_dispatches(monkeypatch):
    config = ModelConfig(**vars(CONFIG) | {"max_position_embeddings": 1024})
    prompt = np.random.default_rng(0).integers(2, 30, 700).tolist()
    monkeypatch.setattr("rl.rollout.shapes.MAX_PREFILL_TOKENS", 256)
    figures = {}
    spec = ModelSpec(config)
    groups = rollouts([prompt], group_size=2, spec=spec, figures=figures, max_tokens=4)
    assert figures["prefill_tokens"] == 700
    assert_scored(groups, [prompt], spec=spec)


def test_rows_that_have_ended_make_room_and_few_are_left_in_fewer_rows(monkeypatch):
    monkeypatch.setattr(engine_module, "COMPACT_STEPS", 1)
    figures = {}
    options = {"tokenizer": Letters(eos_ids=(1, 2, 3)), "max_tokens": 40, "steps_per_dispatch": 1}
    groups = rollouts(**options, max_rows=16, figures=figures)
    lengths = [len(completion.tokens) for group in groups for completion in group]
    assert max(lengths) > 26 and min(lengths) < 8
    assert figures["num_tokens"] == sum(lengths)
    assert figures["row_steps"] < 16 * figures["decode_steps"]
    assert figures["row_steps"] < sum(lengths) + 8 * (40 + 8)
    assert_scored(groups)


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
    kept = [[tokens[:max_tokens] for tokens in group] for group in tokens_of(plain)]
    assert tokens_of(groups) == kept


def test_each_sample_has_a_limit_of_its_own(plain):
    limits = [[1 + (p + g) % MAX_TOKENS for g in range(4)] for p in range(len(PROMPTS))]
    found = tokens_of(rollouts(limits_PG=limits))
    assert [[len(tokens) for tokens in group] for group in found] == limits
    for group, longer in zip(found, tokens_of(plain), strict=True):
        assert all(a == b[: len(a)] for a, b in zip(group, longer, strict=True))


def test_no_step_is_taken_after_the_last_row_has_ended():
    figures = {}
    options = {"tokenizer": Letters(), "stop": tuple("abcdefghijklmnopqrs")}
    groups = rollouts(**options, steps_per_dispatch=1, figures=figures)
    longest = max(len(completion.tokens) for group in groups for completion in group)
    assert 1 < longest < 9
    assert figures["decode_steps"] == longest - 1
    assert figures["num_tokens"] == sum(len(c.tokens) for group in groups for c in group)
    assert figures["seconds"] > 0


def test_end_of_text_ends_the_steps_on_the_device():
    figures = {}
    ends = Letters(eos_ids=tuple(range(20)))
    groups = rollouts(tokenizer=ends, steps_per_dispatch=8, figures=figures)
    longest = max(len(completion.tokens) for group in groups for completion in group)
    assert 1 < longest < 9 and figures["decode_steps"] == longest - 1


def test_forbidden_ids_are_not_drawn_and_no_end_comes_too_early():
    tokenizer = Letters(eos_ids=tuple(range(10)))
    options = {"forbidden_ids": (20, 21, 22), "min_tokens": 5, "max_tokens": 12}
    groups = rollouts(tokenizer=tokenizer, **options)
    completions = [completion for group in groups for completion in group]
    drawn = {token for completion in completions for token in completion.tokens.tolist()}
    assert drawn and not drawn & {20, 21, 22}
    lengths = {len(c.tokens) for c in completions if c.finish_reason == "stop"}
    assert min(lengths) == 6 and len(lengths) > 1  # five others, then an end
    assert_scored(groups)  # of the whole distribution all the same
    assert all((c.sampling_logprobs >= c.logprobs - 1e-6).all() for c in completions)


def test_a_sample_ends_when_its_time_is_over(monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    options = {"steps_per_dispatch": 1, "time_limit_s": 5.5, "max_rows": 4, "max_tokens": 30}
    groups = rollouts(**options)
    completions = [completion for group in groups for completion in group]
    assert {completion.finish_reason for completion in completions} == {"timeout"}
    assert all(1 < len(completion.tokens) < 9 for completion in completions)
    assert_scored(groups)


def test_all_processes_of_a_mesh_go_by_the_clock_of_the_first(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)  # of another machine
    monkeypatch.setattr(engine_module.group, "agree", lambda text: "12.5")
    options = {"time_limit_s": 1e-6, "steps_per_dispatch": 1}
    assert {c.finish_reason for group in rollouts(**options) for c in group} == {"length"}


def test_compiling_takes_no_time_of_the_samples(monkeypatch):
    """Two seconds go by in each dispatch, all of them on compiling."""
    now = iter(range(0, 10**6, 2))
    seconds = []

    def monotonic():
        seconds.append(float(next(now)))
        return seconds[-1]

    monkeypatch.setattr(time, "monotonic", monotonic)
    monkeypatch.setattr(engine_module, "compiled", lambda: Compiled(seconds[-1]))
    groups = rollouts(time_limit_s=1.0, steps_per_dispatch=1)
    assert {c.finish_reason for group in groups for c in group} == {"length"}


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": 0}, "rollout engine: max_rows is 0, expected at least 1"),
        ({"page_size": 12}, "rollout engine: page_size is 12, expected a multiple of 8"),
        ({"steps_per_dispatch": 9}, "rollout engine: steps_per_dispatch is 9, expected 1 to 8"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(options, message):
    with pytest.raises(MeshdialError, match=message):
        EngineConfig(**options)


def test_no_prompts_have_no_completions():
    assert rollouts([]) == []


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


def test_a_cache_that_is_too_small_for_one_sample_is_refused():
    message = r"rollout.kv_cache_mb allows 0.01562 MiB .*, and a sample of 49 tokens needs 0.0234"
    with pytest.raises(MeshdialError, match=message):
        rollouts(kv_cache_bytes=4 * page_bytes(SPEC, 16))


def test_the_longest_prompt_runs():
    prompts = [[5] * 247]
    assert_scored(rollouts(prompts, group_size=2), prompts)


def test_logits_that_are_not_finite_are_refused(engines):
    name = "layers.1.mlp.up_proj.kernel"
    broken = {**PARAMETERS, name: PARAMETERS[name].at[0, 0].set(jnp.nan)}
    with pytest.raises(MeshdialError, match=r"a completion of prompt \d are not finite"):
        rollouts(frozen=broken)
    assert_every_page_is_free(engines)


def assert_every_page_is_free(engines):
    for scheduler in (scheduler for engine in engines for scheduler in engine.schedulers):
        assert scheduler.pages.num_held == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(0, 2), st.sampled_from([1, 4]))
def test_a_dead_client_ends_the_call_between_dispatches(call, pressure, steps):
    """Whenever it dies, every page is free."""
    made, calls = [], []

    class Remembered(engine_module.Engine):
        def run(self):
            made.append(self)
            super().run()

    def check_alive():
        calls.append(None)
        if len(calls) == call:
            raise ClientGone

    budget = [None, 7, 14][pressure]
    options = {"kv_cache_bytes": budget and budget * page_bytes(SPEC, 16), "max_tokens": 30}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "Engine", Remembered)
        with pytest.raises(ClientGone):
            rollouts(check_alive=check_alive, steps_per_dispatch=steps, max_rows=8, **options)
    assert_every_page_is_free(made)


def test_progress_tells_how_many_completions_are_done():
    lines = []
    rollouts(max_rows=12, progress=lines.append, steps_per_dispatch=8)
    assert lines == ["12 of 24 completions, 108 tokens", "24 of 24 completions, 216 tokens"]


# Shapes


def compiled(caplog):
    names = [r.message.split()[1] for r in caplog.records if r.message.startswith("Compiling jit")]
    return sorted(names)


def test_like_calls_compile_nothing_anew(caplog):
    """Other temperatures, seeds, ends and numbers of steps are numbers, not programs."""
    rollouts()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        rollouts(seed=9)
        rollouts(temperature=0.7)
        rollouts(steps_per_dispatch=1, stop=("a",), tokenizer=Letters())
        rollouts([[4], *PROMPTS[1:]])
    assert compiled(caplog) == []


def test_a_call_compiles_few_programs_whatever_the_number_of_prompts(caplog):
    prompts = [[token] * 5 for token in range(9)]
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        rollouts(prompts, group_size=2, max_rows=6)
    names = ("_draw_part", "copy_pages", "decode", "draw_first", "empty_pools", "prefill")
    assert compiled(caplog) == [f"jit({name})" for name in names]
