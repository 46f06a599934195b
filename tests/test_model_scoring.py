"""Scores of reward models: against transformers' numbers, whatever they are batched with."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

from rl.errors import MeshdialError
from rl.models.families import write_model
from rl.models.scratch import scratch_model
from rl.models.spec import ModelSpec
from rl.models.tokenizer import Tokenizer
from rl.rewards.model_scoring import (
    model_scores,
    pack_sequences,
    score_sequences,
    sequence_tokens,
)

from .reference.family_weights import LENGTHS, TOKENS
from .test_model_families import NUMBERS, families, folder_of, loaded

ARCHITECTURE = {
    **{"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "max_positions": 96},
    **{"tokenizer": "characters", "alphabet": "0123456789>+ab|"},
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] | replace('u', '+') }}{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
NUM_GROUPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(spec, parameters, tokenizer) of a small classifier of characters."""
    config, parameters, files, ids = scratch_model(ARCHITECTURE, 3)
    rng = np.random.default_rng(0)
    scaled = {name: 8 * value if value.ndim == 2 else value for name, value in parameters.items()}
    scaled["score.kernel"] = jnp.asarray(rng.standard_normal((16, 1)), jnp.float32)
    folder = tmp_path_factory.mktemp("classifier")
    write_model(folder, config, scaled, files, "float32", ids, "value")
    return ModelSpec(config, head="value"), scaled, Tokenizer.load(folder)


def rollouts_of(*rows):
    """Of (prompt, completion) pairs: those of a prompt are a group."""
    prompts, completions = zip(*rows, strict=True)
    columns = {"prompt_id": prompts, "group_id": prompts, "prompt": prompts}
    return pa.table(columns | {"completion": completions})


def prompts_of(rollouts, messages=None):
    names = list(dict.fromkeys(rollouts["prompt_id"].to_pylist()))
    said = [None if messages is None else json.dumps(messages[name]) for name in names]
    return pa.table({"prompt_id": names, "messages": pa.array(said, pa.string())})


def scores_of(model, rollouts, budget=64, messages=None):
    return model_scores(*model, rollouts, prompts_of(rollouts, messages), budget)


def alone(model, tokens):
    """The score of one sequence, by itself."""
    return score_sequences(*model[:2], [tokens], [0], 4096)[0]


def drawn_rows(seed=0):
    """Groups with completions of many lengths, the shortest of none and of one character."""
    rng = np.random.default_rng(seed)

    def text(length):
        return "".join(rng.choice(list("0123456789"), length))

    lengths = [0, 1, 3, 30]
    prompts = [f"{text(rng.integers(1, 12))}>" for _ in range(NUM_GROUPS)]
    return [(prompt, text(length)) for prompt in prompts for length in lengths]


@families
def test_scores_are_those_of_transformers(tmp_path, family):
    """Which computed them in one padded batch; here they share a prefix, or nothing."""
    spec, parameters = loaded(folder_of(tmp_path / "m", family, "value"), "value")
    sequences = [TOKENS[:n] for n in LENGTHS] * 2
    for groups, budget in (([0, 0, 0, 1, 1, 1], 500), (range(6), 8)):
        found = score_sequences(spec, parameters, sequences, groups, budget)
        np.testing.assert_allclose(found, NUMBERS[family]["scores"] * 2, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("budget", [1, 10_000])
def test_a_score_is_that_of_the_sequence_alone_whatever_the_budget_and_the_order(model, budget):
    rows = drawn_rows()
    expected = [alone(model, model[2].encode(prompt + text)) for prompt, text in rows]
    assert np.std(expected) > 0.1
    found = [score.value for score in scores_of(model, rollouts_of(*rows), budget)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    order = np.random.default_rng(1).permutation(len(rows))
    mixed = scores_of(model, rollouts_of(*(rows[n] for n in order)), budget)
    mixed = [score.value for score in mixed]
    np.testing.assert_allclose(mixed, np.array(expected)[order], rtol=1e-5, atol=1e-5)


def test_an_empty_completion_has_the_score_of_its_prompt(model):
    scores = scores_of(model, rollouts_of(("12>", ""), ("12>", "3"), ("9>", "")))
    for score, text in zip(scores, ("12>", "12>3", "9>"), strict=True):
        np.testing.assert_allclose(score.value, alone(model, model[2].encode(text)), rtol=1e-5)


def test_the_same_text_twice_in_a_group_has_the_same_score_to_the_last_bit(model):
    """Or a group of equal completions would have a spread, and advantages."""
    rows = [("12>", "3"), ("12>", "5" * 40), ("12>", "3"), ("12>", "4" * 40), ("12>", "3")]
    values = [score.value for score in scores_of(model, rollouts_of(*rows))]
    assert values[0] == values[2] == values[4]
    assert len(set(values)) == 3


@pytest.mark.parametrize("groups", [[0] * 5, [0, 0, 1, 1, 1], range(5)])
def test_sequences_of_one_token_and_groups_that_begin_differently(model, groups):
    sequences = [[3], [4], [3, 4], [4, 3, 3], [3, 4, 5]]
    expected = [alone(model, tokens) for tokens in sequences]
    assert len({round(value, 4) for value in expected}) == 5
    for budget in (1, 4096):
        found = score_sequences(*model[:2], sequences, groups, budget)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_sequences_lie_in_a_batch_with_their_weight_at_the_last_token():
    batch, keys = pack_sequences([[1, 2, 3], [1, 2], [5], [6]], "aabb", [1.0, -1.0, 2.0, 3.0])
    assert [key[0] for key in keys] == list("aabb")
    assert keys[0] == keys[1] and keys[2] != keys[3]
    assert batch.prompt_tokens_PT.tolist() == [[1, 2], [5, 0], [6, 0]]
    assert batch.completion_lengths_PG.tolist() == [[2, 1], [1, 0], [1, 0]]
    assert batch.completion_tokens_PGT[0].tolist() == [[3, 0], [0, 0]]
    expected = [[[0, 1], [-1, 0]], [[2, 0], [0, 0]], [[3, 0], [0, 0]]]
    assert batch.advantages_PGT.tolist() == expected


def test_what_cannot_be_read_has_no_score_and_says_why(model):
    rows = [("1>", "2"), ("1>", "2" * 95), ("1>", "2" * 94), ("1>", "x"), ("", "")]
    scores = scores_of(model, rollouts_of(*rows))
    assert [score.value is None for score in scores] == [False, True, False, True, True]
    assert scores[1].failure == "its prompt and completion have 97 tokens, the model reads 96"
    assert "has no token for 'x'" in scores[3].failure
    assert scores[4].failure == "its prompt and completion have no tokens"
    nothing = scores_of(model, rollouts_of(("1>", "x"), ("2>", "x")))
    assert [score.value for score in nothing] == [None, None]


def test_a_score_that_is_not_finite_costs_that_sample_alone(model):
    """Though its group's sequences share a bin, where 0 times NaN is NaN."""
    spec, parameters, tokenizer = model
    rows = [("12>", "3"), ("12>", "3b4"), ("12>", "5"), ("7>", "8")]
    whole = scores_of(model, rollouts_of(*rows))
    (token,) = tokenizer.encode("b")
    embeddings = parameters["embed_tokens.embedding"].at[token].set(jnp.nan)
    spoiled = spec, parameters | {"embed_tokens.embedding": embeddings}, tokenizer
    scores = scores_of(spoiled, rollouts_of(*rows))
    assert scores[1].value is None and scores[1].failure == "the model's score is nan"
    for n in (0, 2, 3):
        np.testing.assert_allclose(scores[n].value, whole[n].value, rtol=1e-5)


def test_a_chat_goes_through_the_models_own_template(model):
    spec, parameters, tokenizer = model
    rows = [("policy's text 1", "5"), ("policy's text 2", "6")]
    chats = {"policy's text 1": [{"role": "user", "content": "2+3"}]}
    chats["policy's text 2"] = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    talker = spec, parameters, dataclasses.replace(tokenizer, template=TEMPLATE)
    scores = scores_of(talker, rollouts_of(*rows), messages=chats)
    for score, text in zip(scores, ("+2+3|a5|", "+1|a2|+3|a6|"), strict=True):
        np.testing.assert_allclose(score.value, alone(model, tokenizer.encode(text)), rtol=1e-5)


def test_a_model_without_a_template_reads_the_policys_text_of_a_chat(model):
    chats = {"a2+3|": [{"role": "user", "content": "unreadable"}]}
    (score,) = scores_of(model, rollouts_of(("a2+3|", "5")), messages=chats)
    np.testing.assert_allclose(score.value, alone(model, model[2].encode("a2+3|5")), rtol=1e-5)


def test_padding_at_the_end_is_not_what_is_scored(model):
    """As in transformers, which takes the last token that is no padding."""
    tokenizer = model[2]
    assert tokenizer.decode([tokenizer.model_pad_id], skip_special=False) == "<pad>"
    assert sequence_tokens(tokenizer, "12>", "3<pad><pad>") == tokenizer.encode("12>3")
    assert sequence_tokens(tokenizer, "12>", "3<pad>4") == tokenizer.encode("12>3<pad>4")
    assert sequence_tokens(tokenizer, "<pad>", "<pad>") == tokenizer.encode("<pad>")
    unnamed = dataclasses.replace(tokenizer, model_pad_id=None)
    assert sequence_tokens(unnamed, "12>", "3<pad>") == tokenizer.encode("12>3<pad>")


def test_long_sequences_are_not_batched_with_short_ones(model):
    rows = [("1>", "2"), ("1>", "3"), ("4>", "5" * 80), ("6>", "7")]
    rollouts, lines = rollouts_of(*rows), []
    model_scores(*model, rollouts, prompts_of(rollouts), 10_000, lines.append)
    assert lines == ["scoring: micro-batch 1 of 1"] * 2


def test_a_rollout_of_another_table_is_refused(model):
    rollouts = rollouts_of(("1>", "2"))
    with pytest.raises(MeshdialError, match="have a prompt '1>', which is not in their table"):
        model_scores(*model, rollouts, prompts_of(rollouts_of(("3>", "2"))), 64)


def test_the_same_completion_has_the_same_score_to_the_last_bit_in_a_group(model):
    """Else a group whose samples are all the same would have a spread of rounding errors."""
    rows = [("1>", text) for text in ("23456", "7", "23456", "89", "7", "23456")]
    scores = [score.value for score in scores_of(model, rollouts_of(*rows), budget=1)]
    assert scores[0] == scores[2] == scores[5] and scores[1] == scores[4]
    assert len(set(scores)) == 3
