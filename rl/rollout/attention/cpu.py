"""Attention over pages by a C++ kernel: appended and attended in place, through the table.

Optional: where it cannot be compiled `why_not` says why, and plain XLA does the same. The kernel
computes in float32 on the host's processor, within XLA's program and on XLA's threads.
"""

import os
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rl.errors import MeshdialError
from rl.models.spec import AttentionKind
from rl.rollout.attention import build
from rl.rollout.attention.pool import LayerPool

SWITCH = "MESHDIAL_CPU_KERNEL"
"""Set to 0, this variable switches the kernel off."""

_TARGET = "meshdial_append_and_attend"
_lock = threading.Lock()
_outcome: list[str | None] = []  # of the one attempt of this process: why not


def why_not(progress: Callable[[str], None] = lambda line: None) -> str | None:
    """Why `append_and_attend` cannot be used, or None: tried once in a process.

    `progress` is told of a compilation, and of one that failed.
    """
    if os.environ.get(SWITCH, "").lower() in ("0", "no", "off", "false"):
        return f"{SWITCH} is {os.environ[SWITCH]}"
    with _lock:
        if not _outcome:
            _outcome.append(_register(progress))
        return _outcome[0]


def _register(progress: Callable[[str], None]) -> str | None:
    try:
        library = build.load(progress)
    except MeshdialError as error:
        progress(f"attention runs without the C++ kernel: {error}")
        return str(error)
    handler = jax.ffi.pycapsule(library.MeshdialAppendAndAttend)
    jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")
    return None


def append_and_attend(
    query_BHC: jax.Array,
    key_BKC: jax.Array,
    value_BKC: jax.Array,
    pool: LayerPool,
    table_BN: jax.Array,
    position_B: jax.Array,
    kind: AttentionKind,
) -> tuple[jax.Array, LayerPool]:
    """Put each row's key and value at its position, and attend to all positions up to it.

    All floats are float32; C and the page size are multiples of 8; H is a multiple of K, and query
    head h reads kv head h // (H // K). The pool is updated in place where its buffers may be, as
    within a loop or with donated arrays. Returns (output_BHC, pool). MeshdialError for arrays that
    do not fit; a page id or a position out of range fails the program when it runs. It has no
    batching rule: replicas call it under `jax.shard_map`.
    """
    key_NKCS, value_NKSC = pool
    _check(query_BHC, key_BKC, value_BKC, key_NKCS, value_NKSC, table_BN, position_B)
    call = jax.ffi.ffi_call(
        _TARGET,
        [jax.typeof(x) for x in (query_BHC, key_NKCS, value_NKSC)],
        input_output_aliases={3: 1, 4: 2},
    )
    output_BHC, key_NKCS, value_NKSC = call(
        *(query_BHC, key_BKC, value_BKC, key_NKCS, value_NKSC, table_BN, position_B),
        window=np.int64(kind.window or 0),
        soft_cap=np.float32(kind.soft_cap or 0.0),
    )
    return output_BHC, (key_NKCS, value_NKSC)


def _check(query_BHC, key_BKC, value_BKC, key_NKCS, value_NKSC, table_BN, position_B) -> None:
    if query_BHC.ndim != 3 or key_NKCS.ndim != 4 or table_BN.ndim != 2:
        raise MeshdialError(
            "attention kernel: a query [B, H, C], keys [N, K, C, S] and a table "
            f"[B, N] are expected, not {query_BHC.shape}, {key_NKCS.shape} and {table_BN.shape}"
        )
    (B, H, C), (N, K, _, S) = query_BHC.shape, key_NKCS.shape
    expected = {
        "query": (query_BHC, (B, H, C), jnp.float32),
        "key": (key_BKC, (B, K, C), jnp.float32),
        "value": (value_BKC, (B, K, C), jnp.float32),
        "pool of keys": (key_NKCS, (N, K, C, S), jnp.float32),
        "pool of values": (value_NKSC, (N, K, S, C), jnp.float32),
        "table": (table_BN, (B, table_BN.shape[1]), jnp.int32),
        "position": (position_B, (B,), jnp.int32),
    }
    for name, (array, shape, dtype) in expected.items():
        if array.shape != shape or array.dtype != dtype:
            raise MeshdialError(
                f"attention kernel: {name} is {array.dtype}{list(array.shape)}, expected "
                f"{jnp.dtype(dtype).name}{list(shape)}"
            )
    if H % K:
        raise MeshdialError(f"attention kernel: {H} query heads are no multiple of {K} kv heads")
    for name, size in (("head size", C), ("page size", S)):
        if size % 8:
            raise MeshdialError(f"attention kernel: {name} {size}, expected a multiple of 8")
