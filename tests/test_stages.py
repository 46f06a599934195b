"""The stages one after another: what passes between them, by value."""

import json
import re
import shutil

import jax
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from jax.sharding import Mesh

from rl.artifacts import artifact_id, read_json, read_table, table_provenance, write_table
from rl.artifacts.publisher import Publisher
from rl.errors import MeshdialError
from rl.memory import Memory, memory_of
from rl.processes.runtime import AXES
from rl.sharding import on, placed
from rl.sync import load_base, synced

from .padded import completion_logprobs
from .pipeline import Pipeline


def held(pipeline, kind):
    """The one entry of this kind in the process's memory."""
    entries = pipeline.memory["weights"].entries
    (value,) = (value for key, value in entries.items() if key[0] == kind)
    return value


def parameters_id(folder):
    return read_json(folder / "manifest.json")["parameters_content_id"]


def pointers(parameters):
    return {name: array.unsafe_buffer_pointer() for name, array in parameters.items()}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A run whose first iteration is done, adapter and all. Tests must not change it."""
    pipeline = Pipeline(tmp_path_factory.mktemp("started"))
    pipeline.start()
    pipeline.iterate(1)
    return pipeline


@pytest.fixture
def copied(started, tmp_path):
    """A copy to change, in a process that remembers nothing."""
    pipeline = Pipeline(tmp_path / "copy")
    shutil.copytree(started.folder, pipeline.folder)
    return pipeline


def test_actor_and_rollout_hold_the_same_buffers(tmp_path):
    pipeline = Pipeline(tmp_path)
    pipeline.start()
    pipeline.iterate(1)
    trainable, _ = held(pipeline, "policy")
    base = load_base(memory_of_pipeline(pipeline), pipeline.path("base"))
    request_spec = spec_of(pipeline, base)
    parameters, cost = synced(
        memory_of_pipeline(pipeline), pipeline.path("1", "weights"), request_spec, base.content_id
    )
    assert pointers(parameters) == pointers(trainable)
    assert (cost["outcome"], cost["bytes_moved"], cost["bytes_read"]) == ("alias", 0, 0)


def memory_of_pipeline(pipeline) -> Memory:
    return pipeline.memory["weights"]


def spec_of(pipeline, base):
    from rl.stages.request import Request

    config = {"lora": pipeline.config["lora"], "stage_version": 1}
    return Request("sync_weights", config, {}, {}, {}).spec(base.config, base.dtype)


def test_an_update_overwrites_the_arrays_that_it_takes(tmp_path):
    pipeline = Pipeline(tmp_path)
    pipeline.start()
    trainable, _ = held(pipeline, "policy")
    pipeline.sample(1)
    pipeline.learn(1)
    assert all(array.is_deleted() for array in trainable.values())
    after, _ = held(pipeline, "policy")
    assert not any(array.is_deleted() for array in after.values())


def test_a_process_that_remembers_nothing_gives_the_same_rollouts(started, copied):
    target = copied.path("1", "rollouts.parquet")
    content = target.read_bytes()
    target.unlink()
    copied.sample(1)
    assert target.read_bytes() == content
    timings = read_json(copied.path("timings", "generate_rollouts-1.json"))
    assert timings["sync"]["outcome"] == "load"
    exported = read_json(copied.path("0", "weights", "manifest.json"))
    sizes = [4 * int(np.prod(t["shape"])) for t in exported["tensors"].values()]
    assert timings["sync"]["bytes_moved"] == sum(sizes)


def test_a_process_that_remembers_nothing_gives_the_same_update(started, copied):
    before = artifact_id(copied.path("1", "policy"))
    shutil.rmtree(copied.path("1", "policy"))
    copied.learn(1)
    assert artifact_id(copied.path("1", "policy")) == before


def test_a_rerun_of_old_rollouts_uses_the_old_weights(tmp_path):
    pipeline = Pipeline(tmp_path)
    pipeline.start()
    pipeline.iterate(1)
    pipeline.iterate(2)
    target = pipeline.path("1", "rollouts.parquet")
    content = target.read_bytes()
    pipeline.sample(1)
    assert target.read_bytes() == content


def test_provenance_names_the_inputs(started):
    rollouts = table_provenance(started.path("1", "rollouts.parquet"))
    assert rollouts["inputs"] == {
        "base": artifact_id(started.path("base")),
        "prompts": artifact_id(started.path("train.parquet")),
        "weights": artifact_id(started.path("0", "weights")),
    }
    assert rollouts["stage"] == "generate_rollouts"
    assert rollouts["config"]["rollout.temperature"] == 1.0
    policy = read_json(started.path("1", "policy", "manifest.json"))
    assert (
        policy["parent"]
        == read_json(started.path("0", "policy", "manifest.json"))["parameters_content_id"]
    )


def test_an_artifact_says_nothing_of_clock_or_place(started, tmp_path):
    again = Pipeline(tmp_path / "elsewhere")
    again.start()
    again.iterate(1)
    for name in ("rollouts", "rewards", "reference", "advantages"):
        path = ("1", f"{name}.parquet")
        assert again.path(*path).read_bytes() == started.path(*path).read_bytes()
    for name in ("0/policy", "1/policy", "0/weights", "1/weights", "base"):
        assert artifact_id(again.path(name)) == artifact_id(started.path(name))


@pytest.mark.parametrize("lora_rank", [4, 0])
def test_drift_stays_nil_over_twenty_updates_at_another_temperature(tmp_path, lora_rank):
    pipeline = Pipeline(
        tmp_path,
        lora={"rank": lora_rank},
        rollout={"temperature": 0.7},
        optimizer={"learning_rate": 3e-3},
    )
    pipeline.start()
    drifts = []
    for n in range(1, 21):
        pipeline.iterate(n)
        drifts.append(read_json(pipeline.path(str(n), "update.json"))["logprob_drift_max"])
    assert max(drifts) < 1e-4
    first, last = (read_json(pipeline.path(n, "policy", "manifest.json")) for n in ("0", "20"))
    assert first["parameters_content_id"] != last["parameters_content_id"]


def test_learning_rate_zero_changes_nothing(tmp_path):
    pipeline = Pipeline(tmp_path, optimizer={"learning_rate": 0.0, "weight_decay": 0.1})
    pipeline.start()
    pipeline.iterate(1)
    pipeline.iterate(2)
    ids = {
        read_json(pipeline.path(n, "policy", "manifest.json"))["parameters_content_id"]
        for n in ("0", "1", "2")
    }
    assert len(ids) == 1
    assert read_json(pipeline.path("2", "update.json"))["kl"] == pytest.approx(0.0, abs=1e-10)


def test_rollout_logprobs_are_the_models_own(started):
    """At the sampling temperature, of every token, the one that ends a completion included."""
    base = load_base(Memory(), started.path("base"))
    spec = spec_of(started, base)
    trainable, _ = synced(Memory(), started.path("0", "weights"), spec, base.content_id)
    for row in pq.read_table(started.path("1", "rollouts.parquet")).to_pylist():
        prompt, completion = (np.array([row[f"{k}_tokens"]]) for k in ("prompt", "completion"))
        logprobs, _ = completion_logprobs(
            spec,
            trainable,
            base.parameters,
            prompt,
            np.array([prompt.shape[1]]),
            completion[:, None],
            np.array([[completion.shape[1]]]),
            1.0,
        )
        np.testing.assert_allclose(row["rollout_logprobs"], logprobs[0, 0], atol=1e-4)
        assert all(row["completion_mask"])


def test_several_updates_a_batch_anchor_their_ratio_in_the_policy_before(tmp_path):
    pipeline = Pipeline(
        tmp_path, learner={"updates_per_batch": 2}, optimizer={"learning_rate": 1e-2}
    )
    pipeline.start()
    pipeline.sample(1)
    rollouts = read_table(pipeline.path("1", "rollouts.parquet"), "rollouts")
    proximal = read_table(pipeline.path("1", "policy_logprobs.parquet"), "policy_logprobs")
    for a, b in zip(rollouts.to_pylist(), proximal.to_pylist(), strict=True):
        assert a["sample_id"] == b["sample_id"]
        np.testing.assert_allclose(a["rollout_logprobs"], b["policy_logprobs"], atol=1e-4)
    pipeline.learn(1)
    figures = read_json(pipeline.path("1", "update.json"))
    assert figures["ratio_mean"] != 1.0


def test_a_rollout_in_bfloat16_is_a_cast_that_the_timings_tell(tmp_path):
    pipeline = Pipeline(tmp_path, rollout={"dtype": "bfloat16"})
    pipeline.start()
    timings = read_json(pipeline.path("timings", "sync_weights-0.json"))
    assert (timings["sync"]["outcome"], timings["sync"]["dtype"]) == ("cast", "bfloat16")
    manifest = read_json(pipeline.path("0", "weights", "manifest.json"))
    assert manifest["dtype"] == "bfloat16"
    assert manifest["content_id"] != manifest["source_content_id"]
    pipeline.sample(1)
    assert pq.read_table(pipeline.path("1", "rollouts.parquet")).num_rows == 8


@pytest.mark.parametrize("rank", [4, 0])
def test_a_bfloat16_policy_goes_on_in_a_process_that_remembers_nothing(tmp_path, rank):
    pipeline = Pipeline(tmp_path, model={"dtype": "bfloat16"}, lora={"rank": rank})
    pipeline.start()
    pipeline.iterate(1)
    pipeline.sample(2)
    pipeline.learn(2)
    warm = artifact_id(pipeline.path("2", "policy"))
    shutil.rmtree(pipeline.path("2", "policy"))
    pipeline.memory.clear()
    pipeline.learn(2)
    assert artifact_id(pipeline.path("2", "policy")) == warm


def test_bases_of_the_same_weights_and_other_tokenizers_are_not_confused(tmp_path):
    memory = {}
    rollouts = []
    for number, alphabet in enumerate(("0123456789>\n", "9876543210>\n")):
        architecture = {"tokenizer": "characters", "alphabet": alphabet}
        pipeline = Pipeline(tmp_path / str(number), model={"architecture": architecture})
        pipeline.memory = memory
        pipeline.start()
        pipeline.sample(1)
        rollouts.append(pq.read_table(pipeline.path("1", "rollouts.parquet")).to_pylist())
    assert parameters_id(tmp_path / "0" / "base") == parameters_id(tmp_path / "1" / "base")
    assert artifact_id(tmp_path / "0" / "base") != artifact_id(tmp_path / "1" / "base")
    for first, second in zip(*rollouts, strict=True):
        assert first["prompt"] == second["prompt"]
        assert first["prompt_tokens"] != second["prompt_tokens"]


def test_an_adapter_is_merged_into_no_other_base(tmp_path):
    first = Pipeline(tmp_path / "first")
    first.start()
    manifest = first.path("base", "manifest.json")
    changed = read_json(manifest) | {"content_id": "sha256:another"}
    manifest.write_text(json.dumps(changed))
    second = Pipeline(tmp_path / "second")
    second.config["model"] |= {"architecture": None, "source": str(first.path("0", "weights"))}
    with pytest.raises(MeshdialError, match="base_content_id is sha256"):
        second.start()


def test_full_finetuning_trains_and_exports_every_parameter(tmp_path):
    pipeline = Pipeline(tmp_path, lora={"rank": 0})
    pipeline.start()
    pipeline.iterate(1)
    assert pipeline.path("1", "weights", "config.json").exists()
    before, after = (
        read_json(pipeline.path(n, "weights", "manifest.json"))["tensors"] for n in ("0", "1")
    )
    assert before.keys() == after.keys()
    assert all(before[name]["blocks"] != after[name]["blocks"] for name in before)
    assert artifact_id(pipeline.path("0", "weights")) == parameters_id(pipeline.path("base"))


@pytest.mark.parametrize("rank", [4, 0])
def test_another_runs_version_is_a_model_source(tmp_path, rank):
    first = Pipeline(tmp_path / "first", lora={"rank": rank})
    first.start()
    first.iterate(1)
    second = Pipeline(tmp_path / "second")
    second.config["model"] |= {"architecture": None, "source": str(first.path("1", "weights"))}
    second.start()
    base = load_base(Memory(), second.path("base"))
    row = pq.read_table(first.path("1", "rollouts.parquet")).to_pylist()[0]
    arrays = (
        np.array([row["prompt_tokens"]]),
        np.array([len(row["prompt_tokens"])]),
        np.array([[row["completion_tokens"]]]),
        np.array([[len(row["completion_tokens"])]]),
        1.0,
    )
    plain = spec_of(Pipeline(tmp_path / "plain", lora={"rank": 0}), base)
    merged, _ = completion_logprobs(plain, {}, base.parameters, *arrays)
    original = load_base(Memory(), first.path("base"))
    spec = spec_of(first, original)
    trainable, _ = synced(Memory(), first.path("1", "weights"), spec, original.content_id)
    frozen = original.parameters if rank else {}
    expected, _ = completion_logprobs(spec, trainable, frozen, *arrays)
    np.testing.assert_allclose(merged, expected, atol=1e-4)


def test_a_warm_start_lowers_the_loss_of_the_answers(tmp_path):
    pipeline = Pipeline(
        tmp_path,
        warm_start={"updates": 30, "batch_size": 8, "learning_rate": 3e-3},
        lora={"rank": 0},
    )
    pipeline.stage("init_policy", outputs=[("model", "base")])
    pipeline.stage("prepare_prompts", outputs=[("train", "t.parquet"), ("heldout", "h.parquet")])
    inputs = [("model", "base"), ("prompts", "t.parquet")]
    pipeline.stage("warm_start", inputs=inputs, outputs=[("model", "warm")])
    loss = float(re.search(r"loss ([\d.]+)", pipeline.said[-1])[1])
    assert loss < np.log(256) - 1
    assert artifact_id(pipeline.path("warm")) != artifact_id(pipeline.path("base"))
    pipeline.stage("start_policy", 0, [("base", "warm")], [("policy", "0/policy")])
    pipeline.stage(
        *("sync_weights", 0, [("policy", "0/policy"), ("base", "warm")]), [("weights", "0/weights")]
    )
    assert artifact_id(pipeline.path("0", "weights")) == parameters_id(pipeline.path("warm"))


def rewritten(pipeline, name, change):
    """The table of this name with `change` applied, written as its stage would have."""
    path = pipeline.path("1", f"{name}.parquet")
    provenance = table_provenance(path)
    table = change(read_table(path, name))
    for key in ("kind", "content_id"):
        provenance.pop(key)
    write_table(Publisher(), path, name, table, provenance)


def with_first(table, column, value):
    values = table[column].to_pylist()
    values[0] = value
    place, field = table.column_names.index(column), table.schema.field(column)
    return table.set_column(place, field, pa.array(values, field.type))


def with_last_token_masked(table):
    mask = table["completion_mask"].to_pylist()[0]
    return with_first(table, "completion_mask", [*mask[:-1], False])


def of_version_7(table):
    place, field = table.column_names.index("policy_version"), table.schema.field("policy_version")
    return table.set_column(place, field, pa.array([7] * table.num_rows, field.type))


def with_a_logprob_that_is_no_number(table):
    logprobs = table["rollout_logprobs"].to_pylist()[0]
    return with_first(table, "rollout_logprobs", [float("nan"), *logprobs[1:]])


def with_an_infinite_advantage(table):
    values = table["advantages"].to_pylist()[0]
    return with_first(table, "advantages", [float("inf"), *values[1:]])


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("rollouts", of_version_7, ["rollouts.parquet", "policy_version is 7", "expected 0"]),
        ("rollouts", with_last_token_masked, ["rollouts.parquet", "completion_mask", "row 0"]),
        ("rollouts", with_a_logprob_that_is_no_number, ["rollout_logprobs", "not finite"]),
        ("rewards", lambda table: table.slice(1), ["missing", "samples"]),
        ("advantages", with_an_infinite_advantage, ["advantages has a value", "not finite"]),
    ],
)
def test_an_iteration_that_is_not_as_it_must_be_fails_its_checks(copied, name, change, words):
    shutil.rmtree(copied.path("1", "checks.json"), ignore_errors=True)
    rewritten(copied, name, change)
    with pytest.raises(MeshdialError) as caught:
        copied.check(1)
    for word in words:
        assert word in str(caught.value)


def test_an_artifact_of_another_run_fails_the_checks(copied, tmp_path):
    other = Pipeline(tmp_path / "other", seed=1)
    other.start()
    other.iterate(1)
    shutil.rmtree(copied.path("1", "policy"))
    shutil.copytree(other.path("1", "policy"), copied.path("1", "policy"))
    with pytest.raises(MeshdialError, match="policy was made from rollouts with the content id"):
        copied.check(1)


@pytest.mark.parametrize("stage", ["generate_rollouts", "evaluate_policy"])
def test_weights_of_another_version_are_refused(copied, stage):
    prompts = "train.parquet" if stage == "generate_rollouts" else "heldout.parquet"
    inputs = [("weights", "0/weights"), ("base", "base"), ("prompts", prompts)]
    name = "rollouts" if stage == "generate_rollouts" else "evaluation"
    expected = 1 if stage == "generate_rollouts" else 2
    with pytest.raises(
        MeshdialError, match=f"0/weights holds policy version 0, expected {expected}"
    ):
        copied.stage(stage, 2, inputs, [(name, "new.parquet")])
    assert not copied.path("new.parquet").exists()


def test_a_reference_of_other_rollouts_fails_the_checks(copied):
    original = copied.path("1", "rollouts.parquet").read_bytes()
    rewritten(copied, "rollouts", lambda table: with_first(table, "finish_reason", "timeout"))
    inputs = [("rollouts", "1/rollouts.parquet"), ("base", "base")]
    copied.stage("reference_logprobs", 1, inputs, [("reference", "1/reference.parquet")])
    copied.path("1", "rollouts.parquet").write_bytes(original)
    with pytest.raises(MeshdialError, match=r"reference\.parquet was made from rollouts with"):
        copied.check(1)


def test_drift_above_its_bound_fails_the_checks(copied):
    path = copied.path("1", "update.json")
    path.write_text(json.dumps(read_json(path) | {"logprob_drift_mean": 0.5}))
    with pytest.raises(MeshdialError, match=r"logprob_drift_mean is 0\.5.*max_logprob_drift"):
        copied.check(1)


def test_a_zero_reward_is_a_reward_and_a_failed_one_is_none(copied):
    def change(table):
        table = with_first(table, "reward", None)
        table = with_first(table, "scored_ok", False)
        return with_first(table, "failure", "test")

    rewritten(copied, "rewards", change)
    inputs = [("rollouts", "1/rollouts.parquet"), ("rewards", "1/rewards.parquet")]
    copied.stage("estimate_advantages", 1, inputs, [("advantages", "1/advantages.parquet")])
    rows = read_table(copied.path("1", "advantages.parquet"), "advantages").to_pylist()
    assert rows[0]["reward"] is None and not any(rows[0]["advantages"])
    mates = [row for row in rows[1:] if row["group_id"] == rows[0]["group_id"]]
    values = np.array([row["reward"] for row in mates])
    expected = (values - values.mean()) / (values.std() + 1e-6) if values.std() else 0 * values
    np.testing.assert_allclose([row["advantages"][0] for row in mates], expected, rtol=1e-5)


def test_evaluation_is_greedy_and_counts_right_answers(copied):
    inputs = [("weights", "1/weights"), ("base", "base"), ("prompts", "heldout.parquet")]
    for target in ("a.parquet", "b.parquet"):
        copied.stage("evaluate_policy", 1, inputs, [("evaluation", target)])
    assert copied.path("a.parquet").read_bytes() == copied.path("b.parquet").read_bytes()
    table = read_table(copied.path("a.parquet"), "evaluation")
    assert table.num_rows == 8
    assert table["is_correct"].to_pylist() == [r >= 1.0 for r in table["reward"].to_pylist()]
    share = pc.mean(table["is_correct"].cast("int8")).as_py()
    assert f"held-out accuracy {share:.3f}" in copied.said[-1]


def test_a_damaged_base_is_named(copied):
    path = copied.path("base", "model.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(MeshdialError, match=r"model\.safetensors is damaged: block 0 of tensor"):
        copied.learn(1)


def test_memory_lets_the_oldest_entries_go_beyond_its_budget():
    memory = Memory(budget_bytes=100)
    for name in ("a", "b", "c"):
        memory.put({"x": jax.numpy.zeros(10)}, "parameters", name)
        memory.get("parameters", "a")
    assert [key[1] for key in memory.entries] == ["c", "a"]
    assert memory.get("parameters", "b") is None


def test_a_replica_counts_in_the_budget():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(4, 1, 1), AXES)
    memory = Memory(budget_bytes=400)
    for name in "abcd":
        with on(mesh):
            memory.put(placed({"norm.scale": np.zeros(10, np.float32)}), "parameters", name)
    assert [key[1] for key in memory.entries] == ["c", "d"]


def test_memory_lets_go_of_what_is_about_to_be_overwritten_under_every_name():
    memory, array = Memory(), jax.numpy.zeros(10)
    memory.put(({"x": array}, None), "policy", "a", "here")
    memory.put({"x": array}, "parameters", "alias", "here")
    memory.put({"x": jax.numpy.zeros(10)}, "parameters", "other", "here")
    assert memory.elsewhere("parameters", "alias") is not None
    memory.forget({"x": array})
    assert [key[1] for key in memory.entries] == ["other"]
    assert memory.elsewhere("parameters", "alias") is None


def test_aliases_count_once_in_the_budget():
    memory = Memory(budget_bytes=50)
    array = {"x": jax.numpy.zeros(10)}
    memory.put(array, "parameters", "a")
    memory.put((array, None), "policy", "a")
    assert len(memory.entries) == 2
    assert memory_of(type("Holder", (), {"memory": {"weights": memory}})) is memory
