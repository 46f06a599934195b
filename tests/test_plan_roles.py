"""What a plan says of critics, reward models, epochs and oversampling, by hand."""

import json
from dataclasses import replace

import pytest

from rl.config import complete
from rl.mesh import uses_critic
from rl.models.config_file import write_model_config
from rl.models.spec import ModelSpec
from rl.plan.dial import Dial, PlannedMesh, roles_of, todays_dial
from rl.plan.iteration import alternatives, composed, iteration, model_stages, sync_bytes
from rl.plan.memory import (
    memory_by_role,
    mesh_peak,
    scoring_activations,
    update_activations,
)
from rl.plan.shape import num_parameters, tensors, trainable
from rl.plan.speed import (
    checkpoint_bytes,
    decoding,
    forward_flops,
    gradient_flops,
    kernels,
    models_bound,
    scoring_bound,
    update_bound,
)
from rl.plan.work import Critic, RewardModel, work_of

from .test_plan import ADAPTER, LLAMA_7B, ONE, TINY, make_work
from .test_plan_command import planned, saved
from .test_plan_speed import DEVICE, HEAD_7B, LAYERS_7B, MACHINES, stages

WHOLE_7B = 6_738_415_616
ADAPTER_7B = 10_158_080
WITHOUT_HEAD_7B = WHOLE_7B - HEAD_7B
"""Parameters of the trunk: embedding, layers and norms."""


def critic_of(config=LLAMA_7B, lora=None, source=None, **more):
    spec = ModelSpec(config, lora, "float32", "value")
    return Critic(spec, source, **{"num_moments": 2, "num_updates": 1, "num_epochs": 1} | more)


def memory(work, **meshes):
    dial = Dial("test", 0, ONE, ONE, None, **meshes)
    roles = memory_by_role(work, dial)
    return {role.role: role for role in roles}, roles


# Parameters


def test_a_value_head_is_one_column_in_place_of_the_vocabulary():
    whole = ModelSpec(LLAMA_7B, head="value")
    assert num_parameters(tensors(whole)) == WITHOUT_HEAD_7B + 4096
    under_adapter = replace(whole, lora=ADAPTER)
    assert num_parameters(trainable(under_adapter)) == ADAPTER_7B + 4096
    n = kernels(make_work().of_model(under_adapter))
    assert (n.layers, n.head, n.adapter) == (LAYERS_7B, 4096, ADAPTER_7B)


# Memory


def test_a_critic_under_an_adapter_shares_the_actors_base_on_its_mesh():
    work = make_work(lora=ADAPTER, has_reference=False, critic=critic_of(lora=ADAPTER))
    roles, _ = memory(work, critic=ONE)
    trained = ADAPTER_7B + 4096
    assert roles["actor"].parameters == 4 * (WHOLE_7B + ADAPTER_7B)
    assert roles["critic"].parameters == 4 * trained
    assert roles["critic"].optimizer == 2 * 4 * trained
    assert roles["critic"].gradients == (4 + 4) * trained
    # By itself it has the base whole, whose output head it does not use.
    roles, _ = memory(work, critic=PlannedMesh("value"))
    assert roles["critic"].parameters == 4 * (WHOLE_7B + trained)


def test_a_critic_from_a_model_of_its_own_shares_it_with_the_reward_alone():
    lone = critic_of(lora=ADAPTER, source="scorer")
    work = make_work(lora=ADAPTER, has_reference=False, critic=lone)
    whole = WITHOUT_HEAD_7B + 4096
    roles, _ = memory(work, critic=ONE)
    assert roles["critic"].parameters == 4 * (whole + ADAPTER_7B + 4096)
    scorer = RewardModel("scorer", ModelSpec(LLAMA_7B, head="value"))
    roles, _ = memory(replace(work, reward_models=(scorer,)), critic=ONE, reward=ONE)
    assert roles["reward"].parameters == 4 * whole
    assert roles["critic"].parameters == 4 * (ADAPTER_7B + 4096)


def test_a_critic_that_is_fully_trained_shares_nothing():
    work = make_work(has_reference=False, critic=critic_of(num_moments=1))
    roles, every = memory(work, critic=ONE)
    trained = WITHOUT_HEAD_7B + 4096
    assert roles["critic"].parameters == 4 * trained
    assert roles["critic"].optimizer == 4 * trained
    # Both stay, and they update in turn.
    resident = sum(role.parameters + role.optimizer for role in every)
    hungriest = max(role.in_turn for role in every)
    assert mesh_peak(every, ONE) == resident + hungriest


def test_values_need_no_logits():
    work = make_work(TINY, critic=critic_of(TINY))
    # 64 places of 96 logits, three float32 of each, are what a policy needs more than a critic.
    logits = 3 * 4 * 64 * 96
    for activations in (update_activations, scoring_activations):
        assert activations(work, ONE) - activations(work.of_critic, ONE) == logits


def test_reward_models_all_stay_and_compute_one_at_a_time():
    small = RewardModel("small", ModelSpec(TINY, head="value"))
    large = RewardModel("large", ModelSpec(LLAMA_7B, dtype="bfloat16", head="value"))
    work = make_work(TINY, has_reference=False, reward_models=(small, large, small))
    found = memory(work, reward=PlannedMesh("reward"))[0]["reward"]
    tiny = num_parameters(tensors(small.spec))
    assert found.parameters == 4 * tiny + 2 * (WITHOUT_HEAD_7B + 4096)
    assert found.activations == scoring_activations(work.of_model(large.spec), ONE)
    assert found.optimizer == found.gradients == found.copies == found.cache == 0
    # Over fsdp, the larger one is gathered.
    found = memory(work, reward=PlannedMesh("reward", fsdp=2))[0]["reward"]
    assert found.copies == 2 * (WITHOUT_HEAD_7B + 4096)


def test_a_reference_that_is_refreshed_is_a_version_of_its_own():
    dial = Dial("test", 0, ONE, ONE, ONE)
    work = make_work(lora=ADAPTER, is_reference_refreshed=True)
    found = {role.role: role.parameters for role in memory_by_role(work, dial)}
    assert found == {
        "actor": 4 * (WHOLE_7B + ADAPTER_7B),
        "rollout": 0,
        "reference": 4 * ADAPTER_7B,
    }
    work = make_work(is_reference_refreshed=True)
    assert memory_by_role(work, dial)[2].parameters == 4 * WHOLE_7B


# Seconds


def test_a_critics_arithmetic():
    tokens, scores = 2 * (16 + 32), 2 * 16 * 16 + 64 * (16 + 32)
    work = make_work(critic=critic_of(num_epochs=3, num_updates=2)).of_critic
    attention = 12 * 32 * 32 * 128 * scores
    one = 6 * (LAYERS_7B * tokens + 4096 * 64) + attention
    assert gradient_flops(work, tokens, scores, 64) == one
    # 2 prompts an update are one micro-batch; 3 epochs of 2 updates.
    assert update_bound(work, ONE, DEVICE).arithmetic == pytest.approx(6 * one / 1e12)
    forward = 2 * (LAYERS_7B * tokens + 4096 * 64) + attention / 3
    assert scoring_bound(work, ONE, DEVICE).arithmetic == pytest.approx(2 * forward / 1e12)
    # Under an adapter the value head is trained, though the kernels are frozen.
    adapted = make_work(critic=critic_of(lora=ADAPTER)).of_critic
    expected = 4 * LAYERS_7B * 100 + 6 * (ADAPTER_7B * 100 + 4096 * 10)
    assert gradient_flops(adapted, 100, 0, 10) == expected
    assert checkpoint_bytes(adapted) == (ADAPTER_7B + 4096) * (4 + 8)


def test_many_values_are_not_chunked_as_logits_are():
    many = 2**26 // 32000 + 1
    assert gradient_flops(make_work(critic=critic_of()).of_critic, 0, 0, many) == 6 * 4096 * many


def test_epochs_repeat_the_updates():
    work = make_work(TINY)
    once, thrice = (
        update_bound(replace(work, num_epochs=n), ONE, DEVICE).arithmetic for n in (1, 3)
    )
    assert thrice == pytest.approx(3 * once)


def test_what_is_sampled_beyond_the_batch_is_scored_and_not_trained_on():
    work = make_work(TINY)
    more = replace(work, num_sampled=12)
    assert update_bound(more, ONE, DEVICE) == update_bound(work, ONE, DEVICE)
    scoring = [scoring_bound(w, ONE, DEVICE).arithmetic for w in (work, more)]
    assert scoring[1] == pytest.approx(3 * scoring[0])
    # 16 rows at a time, 48 in all
    assert decoding(more, ONE, DEVICE).num_turns == 3
    assert more.num_completion_tokens == 3 * work.num_completion_tokens


def test_reward_models_score_one_after_the_other():
    small = RewardModel("small", ModelSpec(TINY, head="value"))
    work = make_work(LLAMA_7B, reward_models=(small, small))
    one = scoring_bound(work.of_model(small.spec), ONE, DEVICE)
    assert models_bound(work, ONE, DEVICE).arithmetic == pytest.approx(2 * one.arithmetic)
    tokens, scores = 2 * (16 + 32), 2 * 16 * 16 + 64 * (16 + 32)
    flops = forward_flops(work.of_model(small.spec), tokens, scores, 64)
    assert one.arithmetic == pytest.approx(2 * flops / 1e12)


def test_an_actor_and_its_critic_update_side_by_side_on_two_meshes():
    train, decode, value = (PlannedMesh(name) for name in ("train", "decode", "value"))
    times = stages(reference=0, policy=1, values=4, critic=9)
    colocated = Dial("", 0, ONE, ONE, None, critic=ONE)
    assert composed(colocated, times) == 1 + 2 + 10 + (1 + 4) + (8 + 9)
    apart = Dial("", 0, train, decode, None, critic=value)
    assert composed(apart, times) == 1 + 2 + 10 + 4 + 9
    # With a lag: the critic's mesh is busy for 13, half of the chain is 13.
    assert composed(replace(apart, lag=1), times) == 13
    assert composed(replace(apart, lag=1), times | {"critic": 20.0}) == 24
    scored = Dial("", 0, train, decode, None, reward=decode, critic=train)
    assert composed(scored, times | {"models": 6.0}) == 1 + 2 + 10 + 6 + (8 + 9)


def test_stages_are_those_that_the_run_has():
    work = make_work(TINY, has_reference=False)
    dial = Dial("", 0, ONE, ONE, None)
    assert list(model_stages(work, dial, DEVICE)) == ["update"]
    found = iteration(work, dial, MACHINES).stages
    assert found["values"] == found["models"] == found["critic"] == 0
    scorer = RewardModel("s", ModelSpec(TINY, head="value"))
    work = replace(work, critic=critic_of(TINY), reward_models=(scorer,), is_anchored=True)
    dial = replace(dial, critic=ONE, reward=ONE)
    names = ["policy", "values", "models", "update", "critic"]
    assert list(model_stages(work, dial, DEVICE)) == names
    seconds = iteration(work, dial, MACHINES).stages["critic"]
    bound = update_bound(work.of_critic, ONE, DEVICE).seconds
    assert seconds == pytest.approx(bound + checkpoint_bytes(work.of_critic) / 1e8)
    assert sync_bytes(work) == sync_bytes(make_work(TINY))  # a critic is never synced


def test_alternatives_place_the_critic_and_the_reward_models():
    scorer = RewardModel("s", ModelSpec(replace(TINY, hidden_size=96), head="value"))
    work = make_work(TINY, has_reference=False, critic=critic_of(TINY), reward_models=(scorer,))
    assert roles_of(work) == ["actor", "rollout", "reward", "critic"]
    found = {f.dial.label: f.dial for f in alternatives(work, MACHINES, 6, (0,))}
    assert list(found) == [
        "all colocated",
        "rollout apart",
        "rollout apart, with the reward models",
        "rollout and reward models apart",
        "rollout and critic apart",
    ]
    assert all(dial.critic and dial.reward and not dial.reference for dial in found.values())
    assert found["rollout apart, with the reward models"].reward.name == "rollout"
    assert found["rollout and critic apart"].critic.name == "critic"
    # No mesh splits a model in a way that another one on it cannot be.
    assert all(96 % dial.reward.fsdp == 128 % dial.actor.fsdp == 0 for dial in found.values())


# From a config


def test_a_config_says_what_there_is():
    grpo = work_of(complete({"run": "r"}), TINY, 16, 8)
    assert grpo.critic is None and grpo.reward_models == () and grpo.num_sampled == grpo.num_prompts
    settings = {
        "run": "r",
        "algorithm": {"preset": "ppo"},
        "learner": {"epochs": 2, "updates_per_batch": 4},
        "critic": {"lora": {"rank": 0}, "epochs": 3, "optimizer": {"name": "lion"}},
    }
    run = complete(settings)
    work = work_of(run, TINY, 16, 8)
    assert uses_critic(run) and work.critic == Critic(
        ModelSpec(TINY, None, "float32", "value"), None, num_moments=1, num_updates=4, num_epochs=3
    )
    assert (work.num_epochs, work.num_updates, work.is_anchored) == (2, 4, True)
    dial = todays_dial(run, work)
    assert dial.critic == dial.actor and dial.reward is None
    # A KL in the reward needs the log-probabilities of the policy, at any lag.
    once = work_of(complete({"run": "r", "algorithm": {"preset": "ppo"}}), TINY, 16, 8)
    assert once.needs_policy_logprobs(0) and not grpo.needs_policy_logprobs(0)
    dapo = work_of(complete({"run": "r", "algorithm": {"preset": "dapo"}}), TINY, 16, 8)
    assert (dapo.num_prompts, dapo.num_sampled) == (8, 24)


def test_reward_models_are_found_or_said_to_be_missing(tmp_path, capsys):
    saved(tmp_path / "scorer", TINY)
    file = tmp_path / "run.yaml"
    models = [{"source": str(tmp_path / name)} for name in ("scorer", "none")]
    settings = {"run": "r", "reward": {"models": models}, "evaluation": {"every": 0}}
    file.write_text(json.dumps(settings))
    found = planned(capsys, "--model", saved(tmp_path, TINY), config=file)
    size = num_parameters(tensors(ModelSpec(TINY, head="value")))
    assert found["run"]["reward_models"] == [{"source": models[0]["source"], "parameters": size}]
    assert any(f"{tmp_path / 'none'} is not there yet" in note for note in found["notes"])
    assert any("as many tokens as the policy" in note for note in found["notes"])
    assert "models" in [row["stage"] for row in found["speed"]]


def test_a_critics_source_is_read_or_guessed(tmp_path, capsys):
    wide = replace(TINY, intermediate_size=512)
    file = tmp_path / "run.yaml"
    block = {"preset": "ppo"}
    settings = {"run": "r", "algorithm": block, "critic": {"source": str(tmp_path / "v")}}
    file.write_text(json.dumps(settings))
    policy = saved(tmp_path, TINY)
    guessed = planned(capsys, "--model", policy, config=file)
    assert any("taken to have the policy's sizes" in note for note in guessed["notes"])
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "config.json").write_text(json.dumps(write_model_config(wide, "value")))
    found = planned(capsys, "--model", policy, config=file)
    assert not any("policy's sizes" in note for note in found["notes"])
    more = found["run"]["critic"]["parameters"] - guessed["run"]["critic"]["parameters"]
    assert more == 2 * 3 * 128 * (512 - 384)
