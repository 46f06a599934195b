"""The Pallas kernels that JAX ships, interpreted, against plain numpy over each row's tokens."""

import functools
import re
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import sharding
from rl.errors import MeshdialError
from rl.models.spec import AttentionKind, ModelConfig, ModelSpec
from rl.rollout.attention import pallas

from .on_a_mesh import mesh_of

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
)
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}  # the largest error at values of about 1


class Rows(NamedTuple):
    """Arguments of `append_and_attend`, and every row's tokens as they are after it."""

    query_BHC: np.ndarray
    key_BKC: np.ndarray
    value_BKC: np.ndarray
    pool: tuple
    table_BN: np.ndarray
    position_B: np.ndarray
    tokens: list  # per row (key_TKC, value_TKC)


def rows_of(H, K, C, S, dtype, seed=0) -> Rows:
    """Eight rows over five pages each: lengths of 1, page edges, full tables; rows that share
    their first page or two; and two unused ones on page 0, which hold one token."""
    rng = np.random.default_rng(seed)

    def draw(*shape, scale=1):
        return np.array(jnp.asarray(scale * rng.standard_normal(shape), dtype))

    table_BN = rng.permutation(np.arange(1, 41)).reshape(8, 5).astype(np.int32)
    table_BN[1, :2] = table_BN[2, :2] = table_BN[3, :2]
    table_BN[4, :1] = table_BN[1, :1]
    position_B = np.array([0, 2 * S, 3 * S - 1, 5 * S - 1, S + 3, 4 * S, 0, 0], np.int32)
    for row, position in enumerate(position_B):  # what a row does not use is page 0
        table_BN[row, position // S + 1 :] = 0
    table_BN[6:] = 0
    key_KNSC, value_KNSC = draw(K, 41, S, C), draw(K, 41, S, C)
    query_BHC, key_BKC, value_BKC = draw(8, H, C, scale=3), draw(8, K, C), draw(8, K, C)
    query_BHC[7], key_BKC[7], value_BKC[7] = query_BHC[6], key_BKC[6], value_BKC[6]
    tokens = []
    for table_N, position, *new in zip(table_BN, position_B, key_BKC, value_BKC, strict=True):
        places = [(table_N[t // S], t % S) for t in range(position)]
        old = [[pages_KNSC[:, n, s] for n, s in places] for pages_KNSC in (key_KNSC, value_KNSC)]
        tokens.append(tuple(np.stack([*o, n]) for o, n in zip(old, new, strict=True)))
    pool = (jnp.asarray(key_KNSC), jnp.asarray(value_KNSC))
    return Rows(query_BHC, key_BKC, value_BKC, pool, table_BN, position_B, tokens)


def expected(rows: Rows, soft_cap=None) -> np.ndarray:
    """Attention head by head in float64."""
    query_BHC = rows.query_BHC.astype(float) / np.sqrt(rows.query_BHC.shape[-1])
    output_BHC = np.zeros_like(query_BHC)
    for row, (key_TKC, value_TKC) in enumerate(rows.tokens):
        for head, query_C in enumerate(query_BHC[row]):
            kv_head = head * key_TKC.shape[1] // query_BHC.shape[1]
            scores_T = key_TKC[:, kv_head].astype(float) @ query_C
            if soft_cap:
                scores_T = soft_cap * np.tanh(scores_T / soft_cap)
            weights_T = np.exp(scores_T - scores_T.max())
            output = weights_T @ value_TKC[:, kv_head].astype(float)
            output_BHC[row, head] = output / weights_T.sum()
    return output_BHC


def attend(rows: Rows, platform: str, soft_cap=None):
    options = {"kind": AttentionKind(None, soft_cap), "platform": platform, "interpret": True}
    return jax.jit(functools.partial(pallas.append_and_attend, **options))(*rows[:6])


def error(output, wanted) -> float:
    return np.abs(np.asarray(output, np.float64) - wanted).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("H", "K", "C", "S", "soft_cap"),
    [(4, 4, 16, 8, 2.0), (6, 2, 64, 16, None), (6, 2, 64, 16, 2.0), (20, 1, 128, 32, None)],
)
def test_gpu_kernel(H, K, C, S, soft_cap, dtype):
    rows = rows_of(H, K, C, S, dtype)
    output, _ = attend(rows, "gpu", soft_cap)
    assert output.dtype == dtype
    assert error(output, expected(rows, soft_cap)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("H", "K", "C", "S", "soft_cap"),
    [(2, 2, 128, 16, None), (6, 2, 128, 16, 2.0), (8, 1, 256, 32, None), (8, 1, 128, 48, 2.0)],
)
def test_tpu_kernel(H, K, C, S, soft_cap):
    rows = rows_of(H, K, C, S, "bfloat16")
    output, _ = attend(rows, "tpu", soft_cap)
    assert output.dtype == "bfloat16"
    assert error(output, expected(rows, soft_cap)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize(("platform", "dtype"), [("gpu", "float32"), ("tpu", "bfloat16")])
def test_tables_longer_than_one_block(platform, dtype, monkeypatch):
    """Blocks of two pages of five: the table is padded, and partitions are put together."""
    rows = rows_of(4, 2, 128, 16, dtype)
    size = 2 * 16 * 128 * jnp.dtype(dtype).itemsize
    monkeypatch.setitem(pallas._BLOCK_BYTES, platform, size)
    assert error(attend(rows, platform)[0], expected(rows)) < TOLERANCE[dtype]


def test_appended_tokens_are_in_their_pages_and_nothing_else_has_changed():
    rows = rows_of(4, 2, 16, 8, "float32")
    _, pool = attend(rows, "gpu")
    wanted = [np.array(pages_KNSC) for pages_KNSC in rows.pool]
    for row, position in enumerate(rows.position_B):
        page = rows.table_BN[row, position // 8]
        wanted[0][:, page, position % 8] = rows.key_BKC[row]
        wanted[1][:, page, position % 8] = rows.value_BKC[row]
    np.testing.assert_array_equal(pool[0], wanted[0])
    np.testing.assert_array_equal(pool[1], wanted[1])


def test_steps_across_a_page_edge_in_a_compiled_loop():
    """Four tokens of one row, from the last slot but one of its first page."""
    rng = np.random.default_rng(1)
    S, num_steps = 8, 4
    draws = [rng.standard_normal((S + 2, 1, 2, 16), np.float32) for _ in range(3)]
    spec = ModelSpec(replace(CONFIG, head_dim=16))
    pages, slots = np.full(S - 2, 3), np.arange(S - 2)
    pool = pallas.empty(spec, 5, S)
    pool = pallas.write(pool, draws[1][: S - 2, 0], draws[2][: S - 2, 0], pages, slots)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pool, query_TBHC, key_TBKC, value_TBKC):
        def step(pool, new):
            position_B, *packed = new
            packed = (*packed, pool, jnp.array([[3, 1, 0]], jnp.int32), position_B)
            output, pool = pallas.append_and_attend(
                *packed, AttentionKind(), platform="gpu", interpret=True
            )
            return pool, output

        position_TB = jnp.arange(S - 2, S + 2, dtype=jnp.int32)[:, None]
        return jax.lax.scan(step, pool, (position_TB, query_TBHC, key_TBKC, value_TBKC))

    _, output_TBHC = run(pool, *(values[-num_steps:] for values in draws))
    query, key, value = (values[:, 0] for values in draws)
    tokens = [(key[: t + 1], value[: t + 1]) for t in range(S - 2, S + 2)]
    rows = Rows(query[-num_steps:], None, None, None, None, None, tokens)
    assert error(output_TBHC[:, 0], expected(rows)) < TOLERANCE["float32"]


def test_read_gives_each_rows_tokens_in_order():
    rows = rows_of(4, 2, 16, 8, "float32")
    _, pool = attend(rows, "gpu")
    key_RKCS, value_RKSC = pallas.read(pool, rows.table_BN)
    assert key_RKCS.shape == (8, 2, 16, 40)
    for row, (key_TKC, value_TKC) in enumerate(rows.tokens):
        length = len(key_TKC)
        np.testing.assert_array_equal(key_RKCS[row, :, :, :length], key_TKC.transpose(1, 2, 0))
        np.testing.assert_array_equal(value_RKSC[row, :, :length], value_TKC.transpose(1, 0, 2))


def test_copies_of_pages():
    pool = rows_of(4, 2, 16, 8, "float32").pool
    copied = pallas.copy(pool, np.array([3, 3, 5]), np.array([7, 8, 1]))
    for old, new in zip(pool, copied, strict=True):
        wanted = np.array(old)
        wanted[:, [7, 8, 1]] = wanted[:, [3, 3, 5]]
        np.testing.assert_array_equal(new, wanted)


# The interpreter of TPU kernels holds a thread for each device: four of them could wait for ever.
@pytest.mark.parametrize(
    ("platform", "dtype", "shape"),
    [
        *(("gpu", "float32", shape) for shape in [(1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 1)]),
        *(("tpu", "bfloat16", shape) for shape in [(1, 1, 2), (2, 1, 1)]),
    ],
)
def test_heads_and_replicas_split_over_a_mesh(shape, platform, dtype):
    """Each replica has rows and a pool of its own; nothing is gathered from other devices."""
    K = 4 if platform == "gpu" else 2
    shards = [rows_of(2 * K, K, 128, 16, dtype, seed) for seed in range(shape[0] * shape[1])]
    wanted = np.concatenate([expected(rows) for rows in shards])
    leading = ("rows",) if len(shards) > 1 else ()
    arrays = jax.tree.map(lambda *arrays: np.stack(arrays), *(rows[:6] for rows in shards))
    arrays = arrays if leading else jax.tree.map(lambda array: array[0], arrays)

    def attend_to_shard(arrays):
        arguments = (*arrays, AttentionKind())
        return pallas.append_and_attend(*arguments, platform=platform, interpret=True)

    @jax.jit
    def run(arrays):
        query, key, value, pool, table, position = arrays
        heads = [sharding.constrain(x, *leading, None, "kv_heads") for x in (query, key, value)]
        pool = tuple(sharding.constrain(x, *leading, "kv_heads") for x in pool)
        table, position = (sharding.constrain(x, *leading) for x in (table, position))
        return sharding.by_row_shard(attend_to_shard, (*heads, pool, table, position))

    with sharding.on(mesh_of(shape)):
        compiled = run.lower(arrays).compile()
        output, pool = compiled(arrays)
    assert error(output, wanted.reshape(output.shape)) < TOLERANCE[dtype]
    assert pool[0].sharding.shard_shape(pool[0].shape)[len(leading)] == K // shape[2]
    assert not re.search("all-(gather|reduce|to-all)|collective-permute", compiled.as_text())


# What the kernels cannot do


def spec_of(dtype="bfloat16", **sizes) -> ModelSpec:
    return ModelSpec(replace(CONFIG, **sizes), dtype=dtype)


def lower(spec: ModelSpec, page_size: int, platform: str) -> None:
    """Hand the kernel to the compiler of a platform that is not here."""
    H, K, C = spec.config.num_attention_heads, spec.config.num_key_value_heads, spec.config.head_dim
    shapes = [(4, H, C), (4, K, C), (4, K, C)]
    floats = [jax.ShapeDtypeStruct(shape, spec.dtype) for shape in shapes]
    pool = jax.eval_shape(lambda: pallas.empty(spec, 9, page_size))
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in [(4, 5), (4,)]]
    function = functools.partial(pallas.append_and_attend, kind=AttentionKind(), platform=platform)
    platforms = ("cuda",) if platform == "gpu" else (platform,)
    jax.jit(function).trace(*floats, pool, *integers).lower(lowering_platforms=platforms)


@pytest.mark.parametrize(
    ("platform", "spec", "page_size"),
    [
        ("gpu", spec_of(), 16),
        ("gpu", spec_of("float32", head_dim=16, num_key_value_heads=8), 8),
        ("gpu", spec_of(head_dim=64, num_attention_heads=40), 64),
        ("tpu", spec_of(), 16),
        ("tpu", spec_of(head_dim=256, num_key_value_heads=8), 48),
    ],
)
def test_what_is_supported_lowers(platform, spec, page_size):
    assert pallas.supports(spec, page_size, platform) is None
    lower(spec, page_size, platform)


@pytest.mark.parametrize(
    ("platform", "spec", "page_size", "words"),
    [
        ("gpu", spec_of(head_dim=96), 16, "head_dim of 16, 32, 64, ..., and the model's is 96"),
        ("gpu", spec_of(), 24, "page_size of 8, 16, 32, ..., and it is 24"),
        ("tpu", spec_of(head_dim=64), 16, "multiple of 128 as head_dim, and the model's is 64"),
    ],
)
def test_sizes_that_do_not_lower_are_not_supported(platform, spec, page_size, words):
    assert words in pallas.supports(spec, page_size, platform)
    with pytest.raises(Exception, match="lowering currently requires"):
        lower(spec, page_size, platform)


@pytest.mark.parametrize(
    ("platform", "spec", "page_size", "words"),
    [
        ("cpu", spec_of(), 16, "on cpu: JAX has it for gpu and tpu only"),
        ("gpu", spec_of(head_dim=8), 16, "head_dim of 16, 32, 64, ..., and the model's is 8"),
        ("gpu", spec_of(sliding_window=64), 16, "no sliding window, and the model has one of 64"),
        ("tpu", spec_of(sliding_window=64), 16, "no sliding window, and the model has one of 64"),
        ("tpu", spec_of("float32"), 16, "to bfloat16, and the model's dtype is float32"),
        ("tpu", spec_of(), 8, "multiple of 16 as page_size, and it is 8"),
        ("gpu", spec_of("float32"), 128, "page_size of 64 at most, and it is 128"),
        ("tpu", spec_of(), 1024, "page_size of 512 at most, and it is 1024"),
    ],
)
def test_what_else_is_not_supported(platform, spec, page_size, words):
    assert words in pallas.supports(spec, page_size, platform)


def test_tpu_kernel_rounds_to_bfloat16():
    """Which is why float32 is not supported there."""
    rows = rows_of(1, 1, 128, 16, "float32")
    assert error(attend(rows, "tpu")[0], expected(rows)) > 100 * TOLERANCE["float32"]


def test_a_window_is_refused():
    rows = rows_of(4, 2, 16, 8, "float32")
    with pytest.raises(MeshdialError, match="a window of 5 tokens, expected none"):
        pallas.append_and_attend(*rows[:6], AttentionKind(5), platform="gpu", interpret=True)
