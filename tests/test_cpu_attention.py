"""The C++ attention kernel, against attention written out in numpy."""

import functools
import os
import shutil
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from rl.errors import MeshdialError
from rl.models.spec import AttentionKind
from rl.rollout.attention import cpu

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is installed"
)
ALL = AttentionKind()


@pytest.fixture(scope="module")
def kernel():
    assert cpu.why_not() is None
    return cpu.append_and_attend


class Problem(NamedTuple):
    """Numpy arrays, as `append_and_attend` takes them."""

    query_BHC: np.ndarray
    key_BKC: np.ndarray
    value_BKC: np.ndarray
    pool: tuple[np.ndarray, np.ndarray]
    table_BN: np.ndarray
    position_B: np.ndarray


def _problem(
    random, positions, num_kv=2, repeats=2, head_size=16, page_size=16, group_size=1, num_canaries=3
) -> Problem:
    """Rows at `positions` with own pages in any order; rows of a group share their full pages.

    What no row may read is NaN: slots after a row's position, and `num_canaries` pages that no
    table has.
    """
    position_B = np.array(positions, np.int32)
    B, entries = len(positions), max(positions) // page_size + 2
    N = B * entries + 1 + num_canaries
    pages = 1 + random.permutation(N - 1)[: B * entries]
    table_BN = pages.reshape(B, entries).astype(np.int32)
    for first in range(0, B, group_size):
        rows = slice(first, first + group_size)
        num_shared = position_B[rows].min() // page_size
        table_BN[rows, :num_shared] = table_BN[first, :num_shared]

    def draw(*shape):
        return random.standard_normal(shape).astype(np.float32)

    pool = draw(N, num_kv, head_size, page_size), draw(N, num_kv, page_size, head_size)
    is_read_NS = np.zeros((N, page_size), bool)
    for row, position in enumerate(positions):
        for other in range(position):
            is_read_NS[table_BN[row, other // page_size], other % page_size] = True
    pool[0].transpose(0, 3, 1, 2)[~is_read_NS] = np.nan
    pool[1].transpose(0, 2, 1, 3)[~is_read_NS] = np.nan
    heads = (draw(B, num_kv * repeats, head_size) * 3, draw(B, num_kv, head_size))
    return Problem(*heads, draw(B, num_kv, head_size), pool, table_BN, position_B)


def _appended(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    key_NKCS, value_NKSC = (array.copy() for array in problem.pool)
    page_size = key_NKCS.shape[3]
    for row, position in enumerate(problem.position_B):
        page, slot = problem.table_BN[row, position // page_size], position % page_size
        key_NKCS[page, :, :, slot] = problem.key_BKC[row]
        value_NKSC[page, :, slot] = problem.value_BKC[row]
    return key_NKCS, value_NKSC


def _attended(problem: Problem, kind: AttentionKind) -> np.ndarray:
    """Position by position, in float64."""
    key_NKCS, value_NKSC = (array.astype(np.float64) for array in _appended(problem))
    B, H, C = problem.query_BHC.shape
    page_size, repeats = key_NKCS.shape[3], H // key_NKCS.shape[1]
    output_BHC = np.zeros((B, H, C))
    for row, position in enumerate(problem.position_B):
        first = 0 if kind.window is None else max(0, position - kind.window + 1)
        seen_S = np.arange(first, position + 1)
        page_S, slot_S = problem.table_BN[row, seen_S // page_size], seen_S % page_size
        for head in range(H):
            key_SC = key_NKCS[page_S, head // repeats, :, slot_S]
            score_S = key_SC @ problem.query_BHC[row, head] / np.sqrt(C)
            if kind.soft_cap is not None:
                score_S = kind.soft_cap * np.tanh(score_S / kind.soft_cap)
            weight_S = np.exp(score_S - score_S.max())
            value_SC = value_NKSC[page_S, head // repeats, slot_S]
            output_BHC[row, head] = weight_S @ value_SC / weight_S.sum()
    return output_BHC


def _run(kernel, problem: Problem, kind: AttentionKind = ALL):
    output_BHC, pool = jax.jit(kernel, static_argnums=6)(*problem, kind)
    return np.asarray(output_BHC), tuple(map(np.asarray, pool))


def _check(kernel, problem: Problem, kind: AttentionKind = ALL) -> None:
    output_BHC, pool = _run(kernel, problem, kind)
    np.testing.assert_allclose(output_BHC, _attended(problem, kind), rtol=0, atol=1e-5)
    for found, expected in zip(pool, _appended(problem), strict=True):
        np.testing.assert_array_equal(found, expected)  # the canaries, NaN, too


@needs_compiler
@pytest.mark.parametrize("head_size", [8, 16, 64, 80, 128])
@pytest.mark.parametrize("repeats", [1, 2, 3, 4, 8])
def test_equals_attention_written_out(kernel, repeats, head_size):
    random = np.random.default_rng(100 * repeats + head_size)
    for page_size in (8, 16, 24, 32):
        edges = [0, page_size - 1, page_size, 2 * page_size - 1, 5 * page_size]
        positions = [*edges, *random.integers(0, 150, size=4)]
        sizes = (int(random.integers(1, 4)), repeats, head_size, page_size)
        _check(kernel, _problem(random, positions, *sizes))


@needs_compiler
@pytest.mark.parametrize("soft_cap", [None, 2.0, 30.0])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 100])
def test_windows_and_soft_caps(kernel, window, soft_cap):
    random = np.random.default_rng(window or 0)
    for page_size in (8, 16):
        positions = random.integers(60, 150, size=6)
        problem = _problem(random, positions, 2, 3, 16, page_size, group_size=3)
        _check(kernel, problem, AttentionKind(window, soft_cap))


@needs_compiler
@pytest.mark.parametrize("group_size", [2, 5, 20])
def test_rows_that_share_pages(kernel, group_size):
    random = np.random.default_rng(group_size)
    positions = random.integers(100, 160, size=20)
    _check(kernel, _problem(random, positions, 2, 3, 64, 16, group_size))


@needs_compiler
def test_one_long_context(kernel):
    random = np.random.default_rng(0)
    _check(kernel, _problem(random, [20_000], 1, 2, 8, 16))


@needs_compiler
@pytest.mark.parametrize("window", [None, 50])
def test_a_row_alone_gives_the_very_same_numbers(kernel, window):
    random = np.random.default_rng(1)
    problem = _problem(random, random.integers(100, 160, size=8), 2, 3, 80, 16, group_size=4)
    kind = AttentionKind(window)
    output_BHC, _ = _run(kernel, problem, kind)
    for row in range(8):
        cut = slice(row, row + 1)
        queries = (problem.query_BHC[cut], problem.key_BKC[cut], problem.value_BKC[cut])
        places = (problem.table_BN[cut], problem.position_B[cut])
        alone_BHC, _ = _run(kernel, Problem(*queries, problem.pool, *places), kind)
        np.testing.assert_array_equal(alone_BHC[0], output_BHC[row])


@needs_compiler
def test_pages_of_another_size_give_the_very_same_numbers(kernel):
    problem = _problem(np.random.default_rng(2), [75, 20, 31], 2, 3, 64, 32)
    key_NKCS, value_NKSC = problem.pool
    N, K, C, _ = key_NKCS.shape
    keys = key_NKCS.reshape(N, K, C, 4, 8).transpose(0, 3, 1, 2, 4).reshape(N * 4, K, C, 8)
    values = value_NKSC.reshape(N, K, 4, 8, C).transpose(0, 2, 1, 3, 4).reshape(N * 4, K, 8, C)
    table_BN = (
        problem.table_BN[:, :, None] * 4 + np.arange(4, dtype=np.int32)[None, None]
    ).reshape(3, -1)
    smaller = problem._replace(pool=(keys, values), table_BN=table_BN)
    np.testing.assert_array_equal(_run(kernel, smaller)[0], _run(kernel, problem)[0])


@needs_compiler
def test_unused_rows_meet_on_the_first_page(kernel):
    problem = _problem(np.random.default_rng(3), [40, 0, 3, 50], group_size=1)
    problem.table_BN[1:3] = 0
    for array in problem.pool:
        array[0] = 0
    output_BHC, pool = _run(kernel, problem)
    expected_BHC = _attended(problem, AttentionKind())
    np.testing.assert_allclose(output_BHC[[0, 3]], expected_BHC[[0, 3]], rtol=0, atol=1e-5)
    assert np.isfinite(output_BHC).all()
    for found, expected in zip(pool, _appended(problem), strict=True):
        np.testing.assert_array_equal(found[1:], expected[1:])


@needs_compiler
def test_ids_out_of_range_are_refused(kernel):
    problem = _problem(np.random.default_rng(4), [40, 20])
    N = len(problem.pool[0])
    for page in (-1, N):
        table_BN = problem.table_BN.copy()
        table_BN[1, 1] = page
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"page {page} in entry 1 of row 1"):
            _run(kernel, problem._replace(table_BN=table_BN))
    for position in (-1, 64):
        position_B = np.array([40, position], np.int32)
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"position {position} of row 1"):
            _run(kernel, problem._replace(position_B=position_B))
    unread = problem.table_BN.copy()
    unread[1, 2:] = N  # beyond the row's position
    _run(kernel, problem._replace(table_BN=unread))


@needs_compiler
def test_arrays_that_do_not_fit_are_refused(kernel):
    problem = _problem(np.random.default_rng(5), [4])

    def refused(match, **changes):
        with pytest.raises(MeshdialError, match=match):
            kernel(*problem._replace(**changes), AttentionKind())

    key_NKCS, value_NKSC = problem.pool
    refused("query is float16", query_BHC=problem.query_BHC.astype(np.float16))
    refused("position is int32", position_B=np.zeros(2, np.int32))
    refused("pool of values", pool=(key_NKCS, value_NKSC[:-1]))
    refused("3 query heads", query_BHC=problem.query_BHC[:, :3])
    odd = (key_NKCS[..., :12].copy(), value_NKSC[:, :, :12].copy())
    refused("page size 12, expected a multiple of 8", pool=odd)


@needs_compiler
def test_a_loop_updates_the_pools_in_place(kernel):
    problem = _problem(np.random.default_rng(6), [40, 3], group_size=1, num_canaries=1000)

    @functools.partial(jax.jit, donate_argnames="pool")
    def decode(pool, query_BHC, position_B, num_steps):
        def step(state):
            number, query_BHC, pool = state
            row = (query_BHC, problem.key_BKC, problem.value_BKC, pool, problem.table_BN)
            output_BHC, pool = kernel(*row, position_B + number, AttentionKind())
            return number + 1, output_BHC, pool

        return jax.lax.while_loop(lambda state: state[0] < num_steps, step, (0, query_BHC, pool))

    pool = jax.tree.map(jnp.asarray, problem.pool)
    rest = (jnp.asarray(problem.query_BHC), jnp.asarray(problem.position_B), 4)
    num_bytes = sum(array.nbytes for array in pool)
    memory = decode.lower(pool, *rest).compile().memory_analysis()
    assert memory.temp_size_in_bytes < num_bytes / 100
    assert memory.alias_size_in_bytes >= num_bytes

    output_BHC, expected = None, problem
    _, output_BHC, pool = decode(pool, *rest)
    for number in range(4):
        expected = expected._replace(position_B=problem.position_B + np.int32(number))
        attended_BHC = _attended(expected, AttentionKind()).astype(np.float32)
        expected = expected._replace(pool=_appended(expected), query_BHC=attended_BHC)
    np.testing.assert_allclose(output_BHC, expected.query_BHC, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(pool[0], expected.pool[0])


@needs_compiler
def test_replicas_run_under_shard_map_and_not_under_vmap(kernel):
    random = np.random.default_rng(7)
    problems = [_problem(random, [40, 20, 33], group_size=1) for _ in range(2)]
    both = jax.tree.map(lambda *arrays: np.stack(arrays), *problems)
    attend = functools.partial(kernel, kind=AttentionKind())
    with pytest.raises(NotImplementedError, match="vmap is only supported"):
        jax.vmap(attend)(*both)

    def of_shard(*arrays):
        output_BHC, _ = attend(*jax.tree.map(lambda array: array[0], arrays))
        return output_BHC[None]

    rows = PartitionSpec("rows")
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    shards = jax.jit(jax.shard_map(of_shard, mesh=mesh, in_specs=rows, out_specs=rows))
    for found_BHC, problem in zip(shards(*both), problems, strict=True):
        np.testing.assert_array_equal(found_BHC, _run(kernel, problem)[0])


_THREADS = """
import jax, numpy as np
from rl.models.spec import AttentionKind
from rl.rollout.attention import cpu
assert cpu.why_not() is None
random = np.random.default_rng(0)
draw = lambda *shape: random.standard_normal(shape).astype(np.float32)
table_BN = np.arange(1, 1 + 24 * 32, dtype=np.int32).reshape(24, 32)
table_BN[:, :20] = table_BN[0, :20]
pool = draw(800, 2, 64, 16), draw(800, 2, 16, 64)
rows = draw(24, 4, 64), draw(24, 2, 64), draw(24, 2, 64), pool
attend = jax.jit(cpu.append_and_attend, static_argnums=6)
for _ in range(20):
    output_BHC, _ = attend(*rows, table_BN, np.full(24, 511, np.int32), AttentionKind())
print(np.asarray(output_BHC).tobytes().hex())
"""


@needs_compiler
def test_any_number_of_threads_gives_the_very_same_numbers(kernel):
    outputs = set()
    for num_threads in (1, 3):
        environment = {**os.environ, "NPROC": str(num_threads)}  # the size of XLA's pool
        command = [sys.executable, "-c", _THREADS]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
