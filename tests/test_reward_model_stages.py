"""Reward models in an iteration: from a folder to the reward, and what a model cannot score."""

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from rl.artifacts import (
    Publisher,
    make_table,
    read_json,
    read_table,
    table_provenance,
    write_table,
)
from rl.errors import MeshdialError
from rl.models.families import write_model
from rl.models.scratch import scratch_model
from rl.models.spec import ModelSpec
from rl.models.tokenizer import Tokenizer
from rl.rewards.model_scoring import score_sequences

from .pipeline import Pipeline

SIZES = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "max_positions": 64}
DIGITS = SIZES | {"tokenizer": "characters", "alphabet": "0123456789>"}
BYTES = SIZES | {"tokenizer": "bytes"}


def written_model(folder, architecture, seed):
    """The folder of a classifier whose scores differ."""
    config, parameters, files, ids = scratch_model(architecture, seed)
    larger = {name: 8 * value if value.ndim == 2 else value for name, value in parameters.items()}
    chance = np.random.default_rng(seed)
    larger["score.kernel"] = jnp.asarray(chance.standard_normal((16, 1)), jnp.float32)
    write_model(folder, config, larger, files, "float32", ids, "value")
    return ModelSpec(config, head="value"), larger, Tokenizer.load(folder)


def pipeline_of(folder, *models, functions=()):
    reward = {"functions": [*functions], "models": [*models]}
    return Pipeline(folder, reward=reward, evaluation={"every": 0})


def rows_of(pipeline, name, n=1):
    return read_table(pipeline.path(f"{n}/{name}.parquet"), name).to_pylist()


def columns_of(path, kind):
    table = read_table(path, kind)
    return {name: table[name].to_pylist() for name in table.column_names}


def rewrite(path, kind, columns):
    """Other values, said to be made as those before."""
    write_table(Publisher(), path, kind, make_table(kind, columns), table_provenance(path))


def expected_scores(model, rollouts):
    spec, parameters, tokenizer = model
    tokens = [tokenizer.encode(row["prompt"] + row["completion"]) for row in rollouts]
    return np.array(score_sequences(spec, parameters, tokens, range(len(tokens)), 4096))


def standardised(values):
    return (values - values.mean()) / values.std()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(an iteration with a function and two models, the models)."""
    folder = tmp_path_factory.mktemp("both")
    models = [written_model(folder / name, BYTES, seed) for seed, name in enumerate("ab")]
    pipeline = pipeline_of(
        folder / "run",
        {"source": str(folder / "a"), "weight": 0.5},
        {"source": str(folder / "b"), "name": "second", "weight": 2.0, "normalise": "group"},
        functions=[{"function": "random", "weight": 3.0, "normalise": "batch"}],
    )
    pipeline.start()
    pipeline.iterate(1)
    return pipeline, models


def test_the_shared_folder_is_of_a_value_model_and_has_a_content_id(both):
    pipeline, _ = both
    manifests = [
        read_json(pipeline.path(f"models/{name}/manifest.json")) for name in ("a", "second")
    ]
    assert [manifest["head"] for manifest in manifests] == ["value", "value"]
    assert manifests[0]["content_id"] != manifests[1]["content_id"]
    assert manifests[0]["source"] == pipeline.config["reward"]["models"][0]["source"]


def test_each_model_scores_the_text_of_each_rollout(both):
    pipeline, models = both
    rollouts, rows = rows_of(pipeline, "rollouts"), rows_of(pipeline, "model_scores")
    assert [row["sample_id"] for row in rows] == [row["sample_id"] for row in rollouts]
    for name, model in zip(("a", "second"), models, strict=True):
        found = [row[f"component:{name}"] for row in rows]
        np.testing.assert_allclose(found, expected_scores(model, rollouts), rtol=1e-4, atol=1e-5)
        assert np.std(found) > 0.1
    assert {row["failure"] for row in rows} == {None}


def test_the_reward_is_the_weighted_sum_of_normalised_components(both):
    pipeline, models = both
    rollouts, rows = rows_of(pipeline, "rollouts"), rows_of(pipeline, "rewards")
    raw = np.array([row["component:random"] for row in rows])
    first, second = (expected_scores(model, rollouts) for model in models)
    groups = np.array([row["group_id"] for row in rollouts])
    by_group = np.zeros(len(groups))
    for group in set(groups):
        by_group[groups == group] = standardised(second[groups == group])
    expected = 3 * standardised(raw) + 0.5 * first + 2 * by_group
    found = [row["reward"] for row in rows]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    columns = [[row[f"component:{name}"] for row in rows] for name in ("a", "second")]
    np.testing.assert_allclose(columns, [first, second], rtol=1e-4, atol=1e-5)


def test_the_iteration_passes_its_checks_only_with_its_own_scores(both):
    pipeline, _ = both
    assert read_json(pipeline.path("1/checks.json"))["num_rollouts"] == 8
    path = pipeline.path("1/model_scores.parquet")
    kept = path.read_bytes()
    columns = columns_of(path, "model_scores")
    columns["component:a"][0] += 1.0
    rewrite(path, "model_scores", columns)
    with pytest.raises(MeshdialError, match=r"rewards.parquet was made from model_scores with"):
        pipeline.check(1)
    path.write_bytes(kept)
    pipeline.check(1)


def test_the_same_scores_come_again_from_the_files(both):
    pipeline, _ = both
    expected = rows_of(pipeline, "model_scores")
    pipeline.memory.clear()
    pipeline.score_with_models(1)
    assert rows_of(pipeline, "model_scores") == expected


def test_models_alone_without_a_function_are_a_reward(tmp_path):
    written_model(tmp_path / "a", BYTES, 3)
    pipeline = pipeline_of(tmp_path / "run", {"source": str(tmp_path / "a"), "weight": -1.0})
    pipeline.start()
    pipeline.sample(1)
    for row in rows_of(pipeline, "rewards"):
        assert row["reward"] == -row["component:a"] and row["scored_ok"]


@pytest.fixture
def strict(tmp_path):
    """Rollouts of any byte, and a model that reads digits."""
    written_model(tmp_path / "digits", DIGITS, 1)
    written_model(tmp_path / "bytes", BYTES, 2)
    models = [{"source": str(tmp_path / name)} for name in ("digits", "bytes")]
    pipeline = pipeline_of(tmp_path / "run", *models)
    pipeline.start()
    pipeline.generate(1)
    path = pipeline.path("1/rollouts.parquet")
    completions = ["12", "x", "3", "4", "5" * 70, "6", "7", "8"]
    rewrite(path, "rollouts", columns_of(path, "rollouts") | {"completion": completions})
    return pipeline


def test_what_a_model_cannot_score_is_recorded_and_is_no_reward(strict):
    strict.score(1)
    scores, rewards = rows_of(strict, "model_scores"), rows_of(strict, "rewards")
    digits = [row["component:digits"] is None for row in scores]
    assert digits == [False, True, False, False, True, False, False, False]
    assert [row["component:bytes"] is None for row in scores] == [False] * 4 + [True] + [False] * 3
    assert [row["reward"] is None for row in rewards] == digits
    assert [row["scored_ok"] for row in rewards] == [not is_failed for is_failed in digits]
    assert "has no token for 'x'" in rewards[1]["failure"]
    assert rewards[1]["failure"].startswith("digits: ")
    assert "have 74 tokens, the model reads 64" in rewards[4]["failure"]
    assert rewards[1]["component:bytes"] == scores[1]["component:bytes"] is not None


def test_a_model_whose_scores_are_all_nan_fails_the_checks_of_the_iteration_alone(tmp_path):
    """Its weights are finite, so that it can be published; its scores are not."""
    written_model(tmp_path / "a", BYTES, 1)
    path = tmp_path / "a" / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["score.weight"] = np.full_like(tensors["score.weight"], 3e38)
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 3e38)
    safetensors.numpy.save_file(tensors, path)
    pipeline = pipeline_of(tmp_path / "run", {"source": str(tmp_path / "a")})
    pipeline.start()
    pipeline.sample(1)
    rows = rows_of(pipeline, "rewards")
    assert {row["reward"] for row in rows} == {None}
    for row in rows:
        assert row["failure"] in {f"a: the model's score is {n}" for n in ("nan", "inf", "-inf")}
    assert {value for row in rows_of(pipeline, "advantages") for value in row["advantages"]} == {0}
    pipeline.learn(1)
    with pytest.raises(MeshdialError, match="100% of the completions could not be scored"):
        pipeline.check(1)


def test_a_language_model_is_no_reward_model(tmp_path):
    config, parameters, files, ids = scratch_model(BYTES, 0)
    write_model(tmp_path / "a", config, parameters, files, "float32", ids)
    pipeline = pipeline_of(tmp_path / "run", {"source": str(tmp_path / "a")})
    with pytest.raises(MeshdialError, match=r"holds a language model .* expected a classifier"):
        pipeline.start()
    assert not pipeline.path("models").exists() or not list(pipeline.path("models").iterdir())
