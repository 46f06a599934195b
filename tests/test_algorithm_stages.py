"""Stages of a critic, a KL in the reward, dynamic sampling, shaping and a refreshed reference."""

import gc
import shutil

import jax
import numpy as np
import pytest

from rl.artifacts import (
    Publisher,
    make_table,
    read_json,
    read_table,
    table_provenance,
    write_table,
)
from rl.errors import MeshdialError
from rl.memory import Memory
from rl.models.transformer import VALUE_HEAD
from rl.stage_table import stage_config
from rl.stages.request import Request
from rl.sync import load_base, load_critic, load_policy

from .pipeline import Pipeline, merged

PPO = {"algorithm": {"preset": "ppo", "kl": {"coefficient": 0.1}}}


def table(pipeline, n, name):
    return read_table(pipeline.path(f"{n}/{name}.parquet"), name).to_pylist()


def request(pipeline, stage, n, **inputs):
    paths = {name: pipeline.path(path) for name, path in inputs.items()}
    return Request(stage, stage_config(pipeline.config, stage), paths, {}, {}, iteration=n)


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    pipeline = Pipeline(
        tmp_path_factory.mktemp("ppo"),
        **PPO,
        critic={"lora": {"rank": 0}, "warmup_iterations": 1, "optimizer": {"learning_rate": 0.01}},
        learner={"epochs": 2},
    )
    pipeline.start()
    pipeline.iterate(1)
    pipeline.iterate(2)
    return pipeline


def test_the_first_values_are_0_and_the_returns_are_rewards_minus_penalties(ppo):
    values = table(ppo, 1, "values")
    assert all(set(row["values"]) == {0.0} for row in values)
    rewards = {row["sample_id"]: row["reward"] for row in table(ppo, 1, "rewards")}
    for row in table(ppo, 1, "advantages"):
        # The reference is the policy itself: no penalty; lambda weighs nothing against values of 0.
        T = len(row["returns"])
        expected = rewards[row["sample_id"]] * 0.95 ** np.arange(T)[::-1]
        np.testing.assert_allclose(row["returns"], expected, rtol=1e-5)


def test_advantages_are_white_over_the_batch(ppo):
    for n in (1, 2):
        together = np.concatenate([row["advantages"] for row in table(ppo, n, "advantages")])
        assert abs(together.mean()) < 1e-5
        assert together.std() == pytest.approx(1, abs=1e-4)


def test_while_the_critic_warms_up_the_policy_stays(ppo):
    manifests = [read_json(ppo.path(f"{n}/policy/manifest.json")) for n in range(3)]
    ids = [manifest["parameters_content_id"] for manifest in manifests]
    assert ids[0] == ids[1] != ids[2]
    assert [manifest["version"] for manifest in manifests] == [0, 1, 2]
    assert any("not applied, the critic warms up" in line for line in ppo.said)
    critics = [read_json(ppo.path(f"{n}/critic/manifest.json")) for n in range(3)]
    assert len({critic["parameters_content_id"] for critic in critics}) == 3
    assert {critic["kind"] for critic in critics} == {"critic"}
    assert VALUE_HEAD in critics[0]["arrays"]["trainable"]


def test_kl_in_the_reward_is_what_the_two_policies_say(ppo):
    n, coefficient, lam = 2, 0.1, 0.95
    policy = {row["sample_id"]: row["policy_logprobs"] for row in table(ppo, n, "policy_logprobs")}
    base = {row["sample_id"]: row["reference_logprobs"] for row in table(ppo, n, "reference")}
    values = {row["sample_id"]: row["values"] for row in table(ppo, n, "values")}
    rewards = {row["sample_id"]: row["reward"] for row in table(ppo, n, "rewards")}
    for row in table(ppo, n, "advantages"):
        name = row["sample_id"]
        token_rewards = -coefficient * (np.array(policy[name]) - np.array(base[name]))
        token_rewards[-1] += rewards[name]
        value, ahead, expected = np.append(values[name], 0.0), 0.0, []
        for t in reversed(range(len(token_rewards))):
            ahead = token_rewards[t] + value[t + 1] - value[t] + lam * ahead
            expected.append(ahead + value[t])
        np.testing.assert_allclose(row["returns"], expected[::-1], rtol=1e-4, atol=1e-6)


def test_the_critic_learns_what_to_expect(ppo):
    figures = read_json(ppo.path("1/critic_update.json"))
    assert figures["explained_variance"] == pytest.approx(0, abs=1e-6)
    assert figures["value_mean"] == 0.0
    returns = [v for row in table(ppo, 1, "advantages") for v in row["returns"]]
    assert figures["return_mean"] == pytest.approx(np.mean(returns), rel=1e-5)
    later = [value for row in table(ppo, 2, "values") for value in row["values"]]
    assert 0 < np.mean(later) < 1  # rewards are 0 or 1


def copy_of(pipeline, folder):
    shutil.copytree(pipeline.folder, folder)
    copied = Pipeline(folder)
    copied.config = pipeline.config
    return copied


def test_values_of_another_critic_fail_the_checks(ppo, tmp_path):
    copied = copy_of(ppo, tmp_path / "run")
    inputs = [("rollouts", "2/rollouts.parquet"), ("critic", "0/critic"), ("trunk", "base")]
    copied.stage("critic_values", 1, inputs, [("values", "2/values.parquet")])
    copied.advantages(2)
    copied.learn(2)
    with pytest.raises(
        MeshdialError, match=r"values.parquet was made from critic with the content"
    ):
        copied.check(2)


def test_advantages_of_another_reference_fail_the_checks(ppo, tmp_path):
    copied = copy_of(ppo, tmp_path / "run")
    inputs = [("rollouts", "2/rollouts.parquet"), ("base", "base"), ("policy", "1/policy")]
    copied.config = merged(copied.config, {"reference": {"refresh_every": 1}})
    copied.stage("reference_logprobs", 2, inputs, [("reference", "2/reference.parquet")])
    copied.stage(
        "policy_logprobs",
        3,
        [*inputs[:2], ("policy", "2/policy")],
        [("policy_logprobs", "2/policy_logprobs.parquet")],
    )
    with pytest.raises(MeshdialError, match=r"advantages.parquet was made from"):
        copied.check(2)


@pytest.mark.parametrize("updates", [1, 2])
def test_a_completion_that_was_not_scored_costs_a_critic_that_sample(tmp_path, updates):
    """Of the first group none is scored, with two updates a batch: an update without a return."""
    pipeline = Pipeline(
        tmp_path,
        **PPO,
        reward={"functions": [{"function": "tests.failing_reward:sometimes"}]},
        learner={"updates_per_batch": updates},
    )
    pipeline.start()
    pipeline.sample(1)
    first = table(pipeline, 1, "rewards")[0]["sample_id"].rpartition("-")[0]

    def lost(row):
        return {"reward": None, "scored_ok": False, "failure": "lost"} if updates == 2 else {}

    rows = [
        row | (lost(row) if row["sample_id"].startswith(first) else {})
        for row in table(pipeline, 1, "rewards")
    ]
    rewrite(pipeline, "1/rewards.parquet", "rewards", rows)
    pipeline.advantages(1)
    pipeline.learn(1)
    returns = [row["returns"] for row in table(pipeline, 1, "advantages")]
    assert None in returns
    figures = read_json(pipeline.path("1/critic_update.json"))
    assert figures["num_tokens"] == sum(len(values) for values in returns if values is not None)
    assert figures["value_loss"] > 0


def test_a_critic_of_which_no_completion_was_scored_stays_and_the_gate_says_why(tmp_path):
    pipeline = Pipeline(tmp_path, **PPO)
    pipeline.start()
    pipeline.sample(1)
    lost = {"reward": None, "scored_ok": False, "failure": "lost"}
    rows = [row | lost for row in table(pipeline, 1, "rewards")]
    rewrite(pipeline, "1/rewards.parquet", "rewards", rows)
    pipeline.advantages(1)
    pipeline.learn(1)
    manifests = [read_json(pipeline.path(f"{n}/critic/manifest.json")) for n in (0, 1)]
    assert len({manifest["parameters_content_id"] for manifest in manifests}) == 1
    with pytest.raises(MeshdialError, match="100% of the completions could not be scored"):
        pipeline.check(1)


def rewrite(pipeline, path, kind, rows):
    path = pipeline.path(path)
    provenance = {
        k: v for k, v in table_provenance(path).items() if k not in ("kind", "content_id")
    }
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    write_table(Publisher(), path, kind, make_table(kind, columns), provenance)


def test_a_critic_under_an_adapter_shares_the_actors_frozen_trunk(tmp_path):
    pipeline = Pipeline(tmp_path, **PPO)
    pipeline.start()
    memory = Memory()
    actor = load_policy(
        request(pipeline, "update_actor", 1, policy="0/policy", base="base"), memory, 0
    )
    before = live_bytes()
    critic = load_critic(
        request(pipeline, "update_critic", 1, critic="0/critic", trunk="base"), memory, 0
    )
    assert set(critic.frozen) == set(actor.frozen)
    assert all(critic.frozen[name] is value for name, value in actor.frozen.items())
    grown = live_bytes() - before
    own = sum(value.nbytes for value in jax.tree.leaves((critic.trainable, critic.optimizer_state)))
    assert own <= grown <= 1.1 * own + 1024  # nothing but its adapter, head and optimizer
    assert own < 0.5 * sum(value.nbytes for value in actor.frozen.values())


def test_a_reference_under_an_adapter_costs_no_memory_beside_the_actor(tmp_path):
    pipeline = Pipeline(tmp_path)
    pipeline.start()
    memory = Memory()
    actor = load_policy(
        request(pipeline, "update_actor", 1, policy="0/policy", base="base"), memory, 0
    )
    before = live_bytes()
    reference = load_base(memory, pipeline.path("base"))
    assert live_bytes() == before
    assert all(reference.parameters[name] is value for name, value in actor.frozen.items())


def live_bytes():
    """Of all arrays; an array and its only shard are one buffer."""
    gc.collect()
    return sum({a.unsafe_buffer_pointer(): a.nbytes for a in jax.live_arrays()}.values())


def test_a_reference_that_is_refreshed_is_the_policy_of_then(tmp_path):
    pipeline = Pipeline(
        tmp_path, reference={"refresh_every": 2}, algorithm={"kl": {"coefficient": 0.1}}
    )
    pipeline.start()
    for n in (1, 2, 3):
        pipeline.iterate(n)
    # Iteration 3 starts from policy 2, which is its reference; iteration 2 still had the base.
    pipeline.stage(
        "policy_logprobs",
        3,
        [("rollouts", "3/rollouts.parquet"), ("policy", "2/policy"), ("base", "base")],
        [("policy_logprobs", "3/policy_logprobs.parquet")],
    )
    own = {r["sample_id"]: r["policy_logprobs"] for r in table(pipeline, 3, "policy_logprobs")}
    for row in table(pipeline, 3, "reference"):
        np.testing.assert_allclose(row["reference_logprobs"], own[row["sample_id"]], atol=1e-6)
    assert read_json(pipeline.path("2/update.json"))["kl"] > 0
    assert abs(read_json(pipeline.path("3/update.json"))["kl"]) < 1e-9
    with pytest.raises(MeshdialError, match="version 1"):
        inputs = [("rollouts", "3/rollouts.parquet"), ("base", "base"), ("policy", "1/policy")]
        pipeline.stage("reference_logprobs", 3, inputs, [("reference", "3/other.parquet")])


def test_dynamic_sampling_takes_the_groups_with_spread_in_prompt_order(tmp_path):
    pipeline = Pipeline(tmp_path, rollout={"prompts_per_iteration": 2, "oversampling": 2.0})
    pipeline.start()
    pipeline.iterate(1)
    rows = table(pipeline, 1, "advantages")
    order = list(dict.fromkeys(row["group_id"] for row in rows))
    assert len(order) == 4
    has_spread = [
        len({row["reward"] for row in rows if row["group_id"] == group}) > 1 for group in order
    ]
    used = [group for group in order if any(r["is_used"] for r in rows if r["group_id"] == group)]
    eligible = [group for group, spread in zip(order, has_spread, strict=True) if spread]
    expected = (eligible + [group for group in order if group not in eligible])[:2]
    assert sorted(used) == sorted(expected)
    assert all(not any(row["advantages"]) for row in rows if not row["is_used"])
    figures = read_json(pipeline.path("1/update.json"))
    tokens = {r["sample_id"]: len(r["completion_tokens"]) for r in table(pipeline, 1, "rollouts")}
    assert figures["num_tokens"] == sum(tokens[r["sample_id"]] for r in rows if r["is_used"])


def test_penalties_on_length_shape_the_reward_and_not_the_raw_one(tmp_path):
    pipeline = Pipeline(
        tmp_path,
        algorithm={
            "overlong": {"buffer_tokens": 2, "penalty": 0.5},
            "length_penalty": {"kind": "tokens", "coefficient": 0.3},
        },
    )
    pipeline.start()
    pipeline.sample(1)
    lengths = {r["sample_id"]: len(r["completion_tokens"]) for r in table(pipeline, 1, "rollouts")}
    rewards = {row["sample_id"]: row["reward"] for row in table(pipeline, 1, "rewards")}
    for row in table(pipeline, 1, "advantages"):
        length = lengths[row["sample_id"]]
        penalty = 0.3 * length / 6 + 0.25 * max(0, length - 4)
        assert row["reward"] == rewards[row["sample_id"]]
        assert row["shaped_reward"] == pytest.approx(row["reward"] - penalty)


@pytest.mark.parametrize(
    "preset", ["dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"]
)
def test_every_preset_runs_two_iterations(tmp_path, preset):
    pipeline = Pipeline(tmp_path, algorithm={"preset": preset, "entropy_coefficient": 0.01})
    pipeline.start()
    pipeline.iterate(1)
    pipeline.iterate(2)
    figures = read_json(pipeline.path("2/update.json"))
    assert np.isfinite(list(figures.values())).all()
    assert figures["gradient_norm"] > 0
    assert pipeline.path("2/critic").exists() == (preset == "ppo")


def test_a_failed_scorer_may_stand_for_a_reward(tmp_path):
    for failure_value in (None, -1.0):
        functions = [{"function": "tests.failing_reward:sometimes"}]
        reward = {"functions": functions, "failure_value": failure_value}
        pipeline = Pipeline(tmp_path / str(failure_value), reward=reward)
        pipeline.start()
        pipeline.sample(1)
        scored = {row["sample_id"]: row["scored_ok"] for row in table(pipeline, 1, "rewards")}
        rows = table(pipeline, 1, "advantages")
        failed = [row for row in rows if not scored[row["sample_id"]]]
        assert failed and len(failed) < len(rows)
        assert {row["reward"] for row in failed} == {failure_value}
        if failure_value is None:
            assert not any(any(row["advantages"]) for row in failed)
        else:
            assert all(row["advantages"][0] < 0 for row in failed)
