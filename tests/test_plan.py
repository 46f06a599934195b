"""What a plan says of sizes, memory and bytes, against numbers worked out by hand."""

import re
from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

from rl.errors import MeshdialError
from rl.learner.packing import Shape
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec
from rl.models.transformer import parameter_shapes, trainable_names
from rl.plan.dial import Dial, PlannedMesh
from rl.plan.iteration import sync_bytes
from rl.plan.memory import (
    bytes_per_score,
    bytes_per_token,
    cache_bytes,
    cache_bytes_per_token,
    logit_bytes,
    memory_by_role,
    mesh_peak,
    num_scores,
    update_activations,
)
from rl.plan.shape import device_size, gathered_size, num_parameters, tensors, trainable
from rl.plan.work import Work

from .padded import completion_logprobs

SMOLLM2_135M = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, tie_word_embeddings=True)
LLAMA_7B = ModelConfig(32000, 4096, 11008, 32, 32, 32, 128)
LLAMA_70B = ModelConfig(32000, 8192, 28672, 80, 64, 8, 128)
TINY = ModelConfig(96, 128, 384, 2, 4, 2, 32)
ADAPTER = LoraConfig(8, 16.0, ("q_proj", "v_proj", "o_proj", "down_proj"))
ONE = PlannedMesh("one")


def make_work(config=LLAMA_7B, lora=None, dtype="float32", **more):
    settings = {
        "rollout_dtype": dtype,
        "num_moments": 2,
        "has_reference": True,
        "num_prompts": 4,
        "num_sampled": more.get("num_prompts", 4),
        "group_size": 4,
        "num_updates": 1,
        "num_epochs": 1,
        "is_anchored": False,
        "prompt_tokens": 16,
        "completion_tokens": 8,
        "max_tokens": 8,
        "max_rows": 16,
        "page_size": 16,
        "kv_cache_bytes": None,
        "micro_batch_tokens": 100,
        "is_rematerialised": False,
    }
    return Work(spec=ModelSpec(config, lora, dtype), **settings | more)


# Sizes


@pytest.mark.parametrize(
    ("config", "count"),
    [
        # 30 layers of 2 x 576 (norms) + 2 x 576 x 576 (q, o) + 2 x 576 x 192 (k, v)
        # + 3 x 576 x 1536 = 3,540,096, the embedding 49152 x 576, and the last norm.
        (SMOLLM2_135M, 134_515_008),
        # 32 layers of 2 x 4096 + 4 x 4096^2 + 3 x 4096 x 11008 = 202,383,360, embedding and head
        # of 131,072,000 each, and 4096.
        (LLAMA_7B, 6_738_415_616),
        (LLAMA_70B, 68_976_648_192),
    ],
)
def test_parameters_are_those_of_the_published_models(config, count):
    assert num_parameters(tensors(ModelSpec(config))) == count


def test_an_adapter_trains_a_matrix_pair_for_each_target():
    # q, v and o: 8 x (4096 + 4096) each; down: 8 x (11008 + 4096); in each of 32 layers.
    spec = ModelSpec(LLAMA_7B, ADAPTER)
    assert num_parameters(trainable(spec)) == 32 * (3 * 65_536 + 120_832) == 10_158_080


@pytest.mark.parametrize("lora", [None, ADAPTER])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sync_has_the_bytes_of_the_parameters_that_are_trained(lora, dtype):
    spec = ModelSpec(TINY, lora)
    shapes, names = parameter_shapes(spec), trainable_names(spec)
    real = sum(jnp.zeros(shapes[name], dtype).nbytes for name in names)
    assert sync_bytes(make_work(TINY, lora, rollout_dtype=dtype)) == real


def test_sharded_sizes_count_norms_on_every_device():
    # 65 norms of 4096 are replicated, the rest is divided by 8.
    spec, norms = ModelSpec(LLAMA_7B), 65 * 4096
    expected = (6_738_415_616 - norms) // 8 + norms
    for axes in ({"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 3, "fsdp": 2, "tensor": 4}):
        assert device_size(tensors(spec), axes) == expected
    assert gathered_size(tensors(spec), {"fsdp": 4, "tensor": 2}) == (
        (6_738_415_616 - norms) // 2 + norms
    )


def test_a_vocabulary_that_tensor_does_not_divide_stays_whole():
    odd = replace(TINY, vocab_size=97, tie_word_embeddings=True)
    even = replace(odd, vocab_size=98)
    sizes = [device_size(tensors(ModelSpec(config)), {"tensor": 2}) for config in (odd, even)]
    assert sizes[0] - sizes[1] == 97 * 128 - 49 * 128


def test_an_adapter_is_sharded_along_its_kernel_only():
    # q_proj [128, 128]: lora_a [128, 8] over fsdp, lora_b [8, 128] over tensor; two layers.
    spec = ModelSpec(TINY, LoraConfig(8, 16.0, ("q_proj",)))
    assert device_size(trainable(spec), {"fsdp": 4, "tensor": 2}) == 2 * (32 * 8 + 8 * 64)


# Memory


def by_role(work, **meshes):
    dial = Dial("test", 0, **{"reference": ONE, "rollout": ONE, "actor": ONE} | meshes)
    return {entry.role: entry for entry in memory_by_role(work, dial)}, dial


def test_colocated_under_an_adapter_all_roles_share_the_base():
    roles, _ = by_role(make_work(lora=ADAPTER))
    assert roles["actor"].parameters == 4 * (6_738_415_616 + 10_158_080)
    assert roles["rollout"].parameters == roles["reference"].parameters == 0
    assert roles["actor"].optimizer == 2 * 4 * 10_158_080
    assert roles["actor"].gradients == (4 + 4) * 10_158_080


def test_fully_trained_the_reference_is_a_copy_and_the_rollout_an_alias():
    roles, _ = by_role(make_work())
    assert roles["actor"].parameters == roles["reference"].parameters == 26_953_662_464
    assert roles["rollout"].parameters == roles["rollout"].copies == 0
    assert roles["actor"].optimizer == 53_907_324_928


def test_moments_and_the_sum_of_gradients_are_float32_whatever_is_trained():
    roles, _ = by_role(make_work(dtype="bfloat16"))
    assert roles["actor"].parameters == 13_476_831_232
    assert roles["actor"].optimizer == 53_907_324_928
    assert roles["actor"].gradients == (4 + 2) * 6_738_415_616
    assert by_role(make_work(num_moments=1))[0]["actor"].optimizer == 26_953_662_464


def test_a_rollout_in_another_dtype_has_its_own_copy():
    roles, _ = by_role(make_work(rollout_dtype="bfloat16"))
    assert roles["rollout"].parameters == 13_476_831_232
    roles, _ = by_role(make_work(lora=ADAPTER, rollout_dtype="bfloat16"))
    assert roles["rollout"].parameters == 2 * (6_738_415_616 + 10_158_080)


def test_a_rollout_apart_holds_two_versions_of_what_is_synced():
    apart = PlannedMesh("decode", tensor=2)
    roles, _ = by_role(make_work(dtype="bfloat16"), rollout=apart)
    whole = 2 * device_size(tensors(ModelSpec(LLAMA_7B)), {"tensor": 2})
    assert roles["rollout"].parameters == roles["rollout"].copies == whole
    roles, _ = by_role(make_work(lora=ADAPTER), rollout=PlannedMesh("decode"))
    assert roles["rollout"].parameters == 4 * (6_738_415_616 + 10_158_080)
    assert roles["rollout"].copies == 4 * 10_158_080


def test_a_reference_with_the_rollout_shares_its_base_in_the_same_dtype():
    apart = PlannedMesh("decode")
    roles, _ = by_role(make_work(lora=ADAPTER), rollout=apart, reference=apart)
    assert roles["reference"].parameters == 0
    work = make_work(lora=ADAPTER, rollout_dtype="bfloat16")
    roles, _ = by_role(work, rollout=apart, reference=apart)
    assert roles["reference"].parameters == 26_953_662_464


def test_fsdp_gathers_a_whole_copy():
    train = PlannedMesh("train", fsdp=4)
    roles, _ = by_role(make_work(), actor=train, rollout=train, reference=train)
    assert {role.copies for role in roles.values()} == {26_953_662_464}


def test_a_mesh_peaks_with_all_residents_and_its_hungriest_stage():
    roles, dial = by_role(make_work())
    resident = sum(role.parameters + role.optimizer for role in roles.values())
    assert mesh_peak(list(roles.values()), dial.actor) == resident + roles["actor"].in_turn
    assert roles["actor"].in_turn > roles["rollout"].in_turn


def test_the_cache_of_a_token():
    # 2 x 32 layers x 32 heads x 128 x 2 bytes; with grouped heads 2 x 80 x 8 x 128 x 2.
    assert cache_bytes_per_token(make_work(rollout_dtype="bfloat16")) == 524_288
    assert cache_bytes_per_token(make_work(LLAMA_70B, rollout_dtype="bfloat16")) == 327_680


def test_the_cache_holds_pages_of_prompts_and_of_samples():
    # 2 layers x 2 heads x 32 x 2 x 4 bytes = 1024 a token, 16 tokens a page. 4 prompts of 16 tokens
    # have a page and a last page, 16 samples of up to 30 have 3 (the first begins with the prompt's
    # rest); 16 to spare and the trash page; in multiples of 16.
    work, of_page = make_work(TINY, max_tokens=30), 16 * 1024
    assert cache_bytes(work, ONE) == of_page * (4 * 2 + 16 * 3 + 16 + 1 + 7)
    # On two replicas of two devices: two prompts each, one of the two heads.
    mesh = PlannedMesh("m", data=2, tensor=2)
    assert cache_bytes(work, mesh) == of_page * (2 * 2 + 8 * 3 + 8 + 1 + 3) // 2
    # `max_rows` bounds the samples at once: four of a group, and room for the prompt after it.
    assert cache_bytes(replace(work, max_rows=4), ONE) == of_page * (2 * 2 + 4 * 3 + 4 + 1 + 3)
    # The config's budget is never exceeded.
    assert cache_bytes(replace(work, kv_cache_bytes=10 * of_page - 1), ONE) == 9 * of_page
    with pytest.raises(MeshdialError, match=r"a sample of 46 tokens needs 0\.07812 MiB"):
        cache_bytes(replace(work, kv_cache_bytes=4 * of_page), ONE)


def residual_bytes(spec, capsys, P=2, G=3, S=17, T=8):
    """Bytes of the arrays that JAX saves between a forward and its backward pass."""
    shapes, trained = parameter_shapes(spec), trainable_names(spec)
    arrays = {name: jnp.zeros(shape, spec.dtype) for name, shape in shapes.items()}
    frozen = {name: value for name, value in arrays.items() if name not in trained}
    tokens = jnp.zeros((P, S), int), jnp.full(P, S), jnp.zeros((P, G, T), int), jnp.full((P, G), T)

    def loss(trainable):
        return completion_logprobs(spec, trainable, frozen, *tokens, 1.0)[0].sum()

    capsys.readouterr()
    print_saved_residuals(loss, {name: arrays[name] for name in trained})
    saved = re.findall(r"^(\w+)\[([\d,]*)\] output of", capsys.readouterr().out, re.MULTILINE)
    sizes = {"bool": 1, "bf16": 2, "f32": 4, "bfloat16": 2, "float32": 4}
    return sum(
        sizes[dtype] * jnp.prod(jnp.array([int(n) for n in shape.split(",") if n]))
        for dtype, shape in saved
        if dtype in sizes
    )


@pytest.mark.parametrize("lora", [None, ADAPTER, LoraConfig(4, 8.0, ("gate_proj", "k_proj"))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_of_a_layer_are_what_jax_saves_for_the_backward_pass(lora, dtype, capsys):
    specs = [ModelSpec(replace(TINY, num_hidden_layers=n), lora, dtype) for n in (1, 2)]
    one, two = (residual_bytes(spec, capsys) for spec in specs)
    work = make_work(TINY, lora, dtype)
    shape = Shape(num_prompts=2, num_bins=3, bin_size=8, prompt_size=16, num_shared=0)
    tokens, scores = shape.num_tokens, num_scores(shape)
    assert (tokens, scores) == (2 * 16 + 6 * 8, 2 * 16 * 16 + 6 * 8 * 24)
    foreseen = tokens * bytes_per_token(work, 1) + scores * bytes_per_score(work, 1)
    # What is left out: the rotary angles, and one number a token for each norm and softmax.
    assert foreseen <= two - one <= 1.05 * foreseen


def test_activations_split_over_tensor_but_not_the_models_width():
    work = make_work(TINY)
    # 4 bytes x (3 x 4 heads x 32 + 2 x 2 x 32 + 3 x 384) is split, 4 x 4 bytes x 128 is not.
    assert bytes_per_token(work, 1) == 4 * (384 + 128 + 1152) + 16 * 128
    assert bytes_per_token(work, 2) == 2 * (384 + 128 + 1152) + 16 * 128
    assert bytes_per_score(work, 1) == 4 * 4


def test_the_memory_of_an_update_follows_the_budget_and_not_the_batch():
    work = make_work(TINY)
    # 4 rows of 16 + 32 tokens, two at once: 96 tokens, 2 x 16 x 16 + 64 x 48 scores, 64 logits.
    kept = 96 * bytes_per_token(work, 1) + 3584 * bytes_per_score(work, 1)
    logits = logit_bytes(work, 64, 1)
    assert update_activations(work, ONE) == 2 * kept + logits
    assert update_activations(replace(work, num_prompts=40), ONE) == 2 * kept + logits
    assert update_activations(replace(work, micro_batch_tokens=50), ONE) == (2 * kept + logits) / 2
    # Rematerialised: the input of each of the two layers, and one layer.
    again = replace(work, is_rematerialised=True)
    assert update_activations(again, ONE) == kept + 2 * 96 * 128 * 4 + logits


def test_logits_are_held_up_to_the_bound_of_a_chunk():
    work = make_work()
    assert logit_bytes(work, 10, 1) == 3 * 4 * 10 * 32000
    assert logit_bytes(work, 1_000_000, 2) == 3 * 4 * 2**26 // 2
