"""Tensors read by blocks: each block once for all parts that need it, and verified every time."""

import os

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl import block_reader
from rl.block_reader import Wanted, read_tensors
from rl.block_writer import Stored, write_tensors
from rl.errors import MeshdialError

SHAPE = (4096, 2560)  # eleven blocks, and parts too large to wait beside another
VALUES = np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)


@pytest.fixture
def stored(tmp_path):
    """(file, what it holds)"""
    file = tmp_path / "file"
    tensors = write_tensors(file, {"w": Stored(VALUES, False)}, VALUES.dtype)
    assert len(tensors["w"]["blocks"]) == 11
    return file, tensors


def load(stored, *axes, is_transposed=False):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return read_tensors(*stored, {"w": Wanted("w", is_transposed, sharding, VALUES.dtype)})


@pytest.fixture
def two_parts_at_a_time(monkeypatch):
    """As for devices that have their own memory, and little of it on the host."""
    monkeypatch.setattr(block_reader, "_are_on_host", lambda sharding: False)
    monkeypatch.setattr(block_reader, "MAX_SHARED_BYTES", VALUES.nbytes // 2)


@pytest.mark.parametrize("axes", [("x",), (None, "x"), ()])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_each_block_is_read_once(stored, monkeypatch, axes, is_transposed):
    monkeypatch.setattr(block_reader, "MAX_HOST_BYTES", VALUES.nbytes // 8)
    found, bytes_read = load(stored, *axes, is_transposed=is_transposed)
    np.testing.assert_array_equal(found["w"], VALUES.T if is_transposed else VALUES)
    assert bytes_read == VALUES.nbytes


def test_a_host_that_holds_half_of_the_parts_reads_each_block_twice(stored, two_parts_at_a_time):
    found, bytes_read = load(stored, None, "x")
    np.testing.assert_array_equal(found["w"], VALUES)
    assert bytes_read == 2 * VALUES.nbytes


def test_a_block_that_is_damaged_when_it_is_read_again_is_refused(
    stored, two_parts_at_a_time, monkeypatch
):
    read, places = os.preadv, []

    def preadv(descriptor, buffers, place):
        count = read(descriptor, buffers, place)
        if place in places:
            buffers[0][0] ^= 1
        places.append(place)
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(MeshdialError, match=r"damaged: block \d of tensor w does not match"):
        load(stored, None, "x")
    assert len(places) > 11  # the first reading was in order
