"""Seconds of stages and iterations, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from rl.errors import MeshdialError
from rl.models.spec import LoraConfig
from rl.plan.dial import Dial, PlannedMesh, decoding_meshes, training_meshes
from rl.plan.hardware import DEVICES, LINKS, Device, Link, chosen_device, chosen_links
from rl.plan.iteration import Machines, alternatives, composed, iteration, sync_bytes
from rl.plan.shape import num_parameters, trainable
from rl.plan.speed import (
    checkpoint_bytes,
    decoding,
    forward_flops,
    gather_bytes,
    gradient_flops,
    kernels,
    reduce_bytes,
    scoring_bound,
    steps_per_dispatch,
    tensor_bytes,
    update_bound,
)

from .test_plan import LLAMA_7B, LLAMA_70B, ONE, TINY, make_work

LAYERS_7B = 32 * (4 * 4096**2 + 3 * 4096 * 11008)  # 6,476,005,376
HEAD_7B = 4096 * 32000
DEVICE = Device("test", 1e12, 1e12, bandwidth=1e9, memory=1e12, link=1e8)
MACHINES = Machines(DEVICE, between=Link("wire", 1e9), disk=Link("disk", 1e8, is_disk=True))


# Arithmetic


def test_kernels_of_a_token_leave_the_embedding_out():
    n = kernels(make_work())
    assert (n.layers, n.head, n.adapter) == (LAYERS_7B, HEAD_7B, 0)


def test_a_forward_pass_takes_2_flops_a_parameter_and_4_a_channel_of_a_pair():
    flops = forward_flops(make_work(), tokens=100, scores=5000, num_logits=10)
    assert flops == 2 * LAYERS_7B * 100 + 2 * HEAD_7B * 10 + 4 * 32 * 32 * 128 * 5000


def test_full_fine_tuning_takes_6_flops_a_parameter():
    flops = gradient_flops(make_work(), tokens=100, scores=0, num_logits=10)
    assert flops == 6 * (LAYERS_7B * 100 + HEAD_7B * 10)


def test_an_adapter_saves_the_gradients_of_frozen_kernels():
    adapter = LoraConfig(8, 16.0, ("q_proj",))
    work = make_work(lora=adapter)
    count = 32 * 8 * (4096 + 4096)
    flops = gradient_flops(work, tokens=100, scores=7, num_logits=10)
    attention = 12 * 32 * 32 * 128 * 7
    assert flops == 4 * (LAYERS_7B * 100 + HEAD_7B * 10) + 6 * count * 100 + attention


def test_logits_in_chunks_are_computed_twice():
    few, many = 2**26 // 32000, 2**26 // 32000 + 1
    assert gradient_flops(make_work(), 0, 0, few) == 6 * HEAD_7B * few
    assert gradient_flops(make_work(), 0, 0, many) == 8 * HEAD_7B * many


def test_an_update_is_its_micro_batches_one_after_the_other():
    # 4 groups of 4 in micro-batches of 100 tokens: two, of two groups each. A prompt of 16 is
    # computed once a group, and the 4 x 8 tokens of its completions share a bin of 32.
    work = make_work()
    tokens, scores = 2 * (16 + 32), 2 * 16 * 16 + 64 * (16 + 32)
    one = gradient_flops(work, tokens, scores, 64) / 1e12
    assert update_bound(work, ONE, DEVICE).arithmetic == pytest.approx(2 * one)
    # Two row shards compute them at once; tensor halves each.
    assert update_bound(work, PlannedMesh("m", fsdp=2), DEVICE).arithmetic == pytest.approx(one)
    assert update_bound(work, PlannedMesh("m", tensor=2), DEVICE).arithmetic == pytest.approx(one)
    # Half the tokens are twice the micro-batches.
    cut = replace(work, micro_batch_tokens=50)
    assert update_bound(cut, ONE, DEVICE).arithmetic == pytest.approx(2 * one)


def test_layers_that_are_rematerialised_are_computed_forward_twice():
    work = make_work()
    again = gradient_flops(replace(work, is_rematerialised=True), 100, 7, 10)
    assert again - gradient_flops(work, 100, 7, 10) == forward_flops(work, 100, 7, 0)


def test_the_reference_runs_forward_only():
    work = make_work()
    tokens, scores = 2 * (16 + 32), 2 * 16 * 16 + 64 * (16 + 32)
    expected = 2 * forward_flops(work, tokens, scores, 64) / 1e12
    assert scoring_bound(work, ONE, DEVICE).arithmetic == pytest.approx(expected)


# Links inside a mesh


def test_bytes_inside_a_mesh():
    work = make_work(TINY)
    count, norms = num_parameters(trainable(work.spec)), 5 * 128
    mesh = PlannedMesh("m", data=2, fsdp=4)
    assert gather_bytes(work, mesh, "float32") == 4 * count * 3 / 4
    sharded = (count - norms) / 4 + norms
    assert reduce_bytes(work, mesh) == pytest.approx(4 * (count * 3 / 4 + sharded))
    assert gather_bytes(work, ONE, "float32") == reduce_bytes(work, ONE) == 0
    # Two sums a layer, of 10 tokens of width 128 in 4 bytes, each sent 2 x 1/2 times over.
    assert tensor_bytes(work, PlannedMesh("m", tensor=2), 10, "float32") == 2 * 2 * 10 * 128 * 4


# Decoding


def test_decoding_streams_all_weights_once_a_token():
    """Llama-2-7B in 16 bits on an H100: 13.2 GB of kernels at 3350 GB/s."""
    work = make_work(dtype="bfloat16", num_prompts=1, group_size=2, max_rows=2)
    found = decoding(work, ONE, DEVICES["H100"])
    # A prompt of 16 tokens, shared, and two completions that are 4 tokens long on average.
    read = 2 * (LAYERS_7B + HEAD_7B) + (16 + 2 * 4) * 524_288
    assert found.step.memory == pytest.approx(read / 3350e9)
    assert found.step.limit == "memory"
    assert found.tokens_per_second == pytest.approx(2 / (read / 3350e9))
    assert found.tokens_per_second == pytest.approx(506.5, rel=1e-3)


def test_decoding_in_turns_and_shards():
    work = make_work(TINY)  # 16 rows at most at once
    one, two = (decoding(work, mesh, DEVICE) for mesh in (ONE, PlannedMesh("m", data=2)))
    assert (one.rows, one.num_turns, one.num_steps) == (16, 1, 7)
    assert one.seconds == pytest.approx(one.prefill.seconds + 7 * one.step.seconds)
    assert two.rows == 16 and two.tokens_per_second > one.tokens_per_second
    small = decoding(replace(work, max_rows=4), ONE, DEVICE)
    assert (small.rows, small.num_turns) == (4, 4)


def test_weights_are_gathered_once_a_dispatch():
    assert steps_per_dispatch(make_work(LLAMA_70B), 64) == 1
    assert steps_per_dispatch(make_work(TINY), 1) == 8
    work, mesh = make_work(TINY), PlannedMesh("m", fsdp=2)
    link = gather_bytes(work, mesh, "float32") / 8 / DEVICE.link
    assert decoding(work, mesh, DEVICE).step.link == pytest.approx(link)


# Iterations


def stages(export=1.0, sync=2.0, rollouts=10.0, reference=3.0, update=8.0, **more):
    given = {"export": export, "sync": sync, "rollouts": rollouts, "reference": reference}
    nothing = dict.fromkeys(("policy", "values", "models", "critic"), 0.0)
    return given | nothing | {"update": update} | more


def test_on_one_mesh_an_iteration_is_the_sum_of_its_stages_whatever_the_lag():
    for lag in (0, 1):
        assert composed(Dial("", lag, ONE, ONE, ONE), stages(sync=0)) == 22


def test_on_several_meshes_lag_0_is_the_chain_and_lag_1_the_busiest_mesh():
    train, decode, frozen = (PlannedMesh(name) for name in ("train", "decode", "frozen"))
    apart = {lag: Dial("", lag, train, decode, train) for lag in (0, 1, 2)}
    assert composed(apart[0], stages()) == 1 + 2 + 10 + 3 + 8
    # train: 1 + 3 + 8, decode: 2 + 10, half of the chain: 12.
    assert composed(apart[1], stages()) == 12
    assert composed(apart[1], stages(reference=4)) == 13
    # Log-probabilities on different meshes run beside each other.
    three = Dial("", 0, train, decode, frozen)
    assert composed(three, stages(policy=5)) == 1 + 2 + 10 + 5 + 8
    # With three meshes the chain can be longer than any mesh is busy: lag 1 halves it.
    even = stages(export=0, sync=0, rollouts=10, reference=10, update=10)
    found = [composed(replace(three, lag=lag), even) for lag in (0, 1, 2)]
    assert found == [30, 15, 10]


def test_a_sync_moves_nothing_on_one_mesh_and_is_exported_all_the_same():
    work = make_work(TINY)
    size = sync_bytes(work)
    one = iteration(work, Dial("", 0, ONE, ONE, None), MACHINES).stages
    assert (one["export"], one["sync"]) == (pytest.approx(size / 1e8), 0)
    apart = Dial("", 0, ONE, PlannedMesh("decode"), None)
    assert iteration(work, apart, MACHINES).stages["sync"] == pytest.approx(size / 1e9)
    # Over a disk: written once, by the export, and read by the other side.
    over_files = replace(MACHINES, between=MACHINES.disk)
    found = iteration(work, apart, over_files).stages
    assert found["export"] == found["sync"] == pytest.approx(size / 1e8)


def test_an_update_writes_its_checkpoint():
    work = make_work(TINY)
    assert checkpoint_bytes(work) == num_parameters(trainable(work.spec)) * (4 + 8)
    found = iteration(work, Dial("", 0, ONE, ONE, None), MACHINES).stages["update"]
    bound = update_bound(work, ONE, DEVICE).seconds
    assert found == pytest.approx(bound + checkpoint_bytes(work) / 1e8)


def test_a_lag_needs_policy_logprobs():
    work, dial = make_work(TINY), Dial("", 1, ONE, ONE, None)
    assert iteration(work, dial, MACHINES).stages["policy"] > 0
    assert iteration(work, replace(dial, lag=0), MACHINES).stages["policy"] == 0


def test_alternatives_fit_where_they_can_and_use_all_devices():
    machines = Machines(DEVICES["H100"], LINKS["infiniband-ndr"], LINKS["nvme"])
    work = make_work(LLAMA_70B, dtype="bfloat16", micro_batch_tokens=1)
    found = alternatives(work, machines, 64, (0, 1))
    assert [(f.dial.label, f.dial.lag) for f in found][:2] == [
        ("all colocated", 0),
        ("all colocated", 1),
    ]
    assert len(found) == 8
    assert {f.dial.num_devices for f in found} == {64}
    assert all(f.overflow == 0 for f in found)
    # 70B with its optimizer fits no single device, and the nearest dial says by how much it fails.
    (one, *_) = alternatives(work, machines, 1, (0,))
    assert one.overflow > 1


def test_meshes_that_a_model_can_be_split_over():
    assert [mesh.axes for mesh in training_meshes("m", 6, TINY)] == [
        {"data": 3, "fsdp": 2, "tensor": 1},  # 128 is no multiple of 3
        {"data": 3, "fsdp": 1, "tensor": 2},
    ]
    # 2 key-value heads
    assert [mesh.tensor for mesh in decoding_meshes("m", 8, TINY)] == [1, 2]
    assert [mesh.tensor for mesh in decoding_meshes("m", 8, LLAMA_7B)] == [1, 2, 4, 8]


# Devices and links


def test_a_device_by_name_or_by_its_figures():
    assert chosen_device("h100", None, None, None, None) == DEVICES["H100"]
    assert chosen_device("L40S", None, None, 96, None).memory == 96e9
    custom = chosen_device(None, 100, 500, 32, None)
    assert (custom.flops("float32"), custom.bandwidth, custom.memory) == (1e14, 5e11, 3.2e10)
    assert DEVICES["A100-80"].flops("bfloat16") == 312e12
    assert DEVICES["A100-80"].flops("float32") == 156e12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("H1", None, None, None, None), "expected one of H100"),
        ((None, 100, None, None, None), "--bandwidth is missing"),
        (("H100", None, 0.0, None, None), "--bandwidth is 0"),
        (("H100", None, float("nan"), None, None), "--bandwidth is nan"),
    ],
)
def test_a_device_that_cannot_be(arguments, words):
    with pytest.raises(MeshdialError, match=words):
        chosen_device(*arguments)


def test_links_are_overridden_and_added():
    links = chosen_links(["nvme=3.5", "slingshot=25"])
    assert links["nvme"] == Link("nvme", 3.5e9, is_disk=True)
    assert links["slingshot"].seconds(50e9) == 2
    assert links["nvme"].seconds(3.5e9) == 2  # written, then read
    for wrong in ("nvme", "nvme=fast", "nvme=0", "=3"):
        with pytest.raises(MeshdialError, match="expected NAME=GB/s"):
            chosen_links([wrong])
