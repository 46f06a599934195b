"""A stage in two processes on two nodes, which share a mesh of four devices."""

import math

import numpy as np
from safetensors.numpy import load_file

from rl.artifacts import read_json

from .conftest import ROLES

FOUR = {"train": {"devices": 4, "axes": {"fsdp": 4}}, "decode": {"devices": 1}}
UPDATE = ("tiny", "0002", "update.json")
WEIGHTS = ("tiny", "0002", "weights", "adapter_model.safetensors")


def test_an_update_in_two_processes_does_what_one_does(copied, submitted):
    last_weights = copied.forget_the_last_update()
    nodes = {"mpi": "srun", "nodes": 2, "tasks": 2, "tasks_per_gpu": 0, "gres": "gpu:2"}
    copied.adapt("update_actor_kept", **nodes)
    config = copied.config(cluster={"meshes": FOUR, "roles": ROLES})
    copied.run("--", last_weights, config=config)

    (job,) = copied.jobs()
    assert (job["state"], job["node"]) == ("COMPLETED", "127.0.0.[11-12]")
    found, expected = (read_json(place.path(*UPDATE)) for place in (copied, submitted))
    assert found.keys() == expected.keys()
    for name in ("loss", "kl", "entropy", "gradient_norm"):
        assert math.isclose(found[name], expected[name], rel_tol=1e-4, abs_tol=1e-7), name
    found, expected = (load_file(place.path(*WEIGHTS)) for place in (copied, submitted))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-3, atol=1e-5, err_msg=name)
