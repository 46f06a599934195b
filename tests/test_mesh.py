"""From the dial to layouts, and which policy versions an iteration needs."""

import pytest

from rl.config import complete
from rl.mesh import layout, layouts, pool, process_layout
from rl.processes.runtime import parse_process_layout
from rl.schedule import are_weights_kept, behaviour_version, is_kept


def run(meshes, roles, coefficient=0.001):
    cluster = {"meshes": meshes, "roles": roles}
    kl = {"kl": {"coefficient": coefficient}}
    model = {"source": "scratch", "architecture": {}}
    return complete({"run": "x", "cluster": cluster, "algorithm": kl, "model": model})


MESHES = {
    "train": {"devices": 4, "axes": {"fsdp": 2, "tensor": 2}},
    "judge": {"devices": 8},
    "decode": {"devices": 2, "axes": {"tensor": 2}},
    "frozen": {"devices": 1},
}
ROLES = {"actor": "train", "rollout": "decode", "reference": "frozen", "reward": "judge"}


def test_one_mesh_serves_every_role():
    config = complete({"run": "x"})
    assert layouts(config) == {"all": "all:devices=1"}
    assert {layout(config, role) for role in ("actor", "rollout", "reference", "reward")} == {
        "all:devices=1"
    }
    assert pool(config, "rollout") == "actor_mesh"


def test_meshes_lie_end_to_end_and_those_of_unused_roles_are_left_out():
    config = run(MESHES, ROLES)
    assert process_layout(config) == (
        "train:devices=4,fsdp=2,tensor=2+decode:devices=2,first=12,tensor=2"
        "+frozen:devices=1,first=14"
    )
    assert layout(config, "rollout") == "decode:devices=2,first=12,tensor=2"
    without = run(MESHES, ROLES, coefficient=0)
    assert layouts(without) == {name: layouts(config)[name] for name in ("train", "decode")}
    places = [
        (m.name, m.first, m.num_devices) for m in parse_process_layout(process_layout(config))
    ]
    assert places == [("train", 0, 4), ("decode", 12, 2), ("frozen", 14, 1)]


def test_a_mesh_has_the_same_devices_with_and_without_the_reference():
    """So that in a sweep over both one worker serves a mesh in all runs."""
    meshes = {"frozen": {"devices": 1}, "train": {"devices": 2}, "decode": {"devices": 1}}
    words = {"train": "train:devices=2,first=1", "decode": "decode:devices=1,first=3"}
    assert layouts(run(meshes, ROLES | {"reward": "train"}, coefficient=0)) == words
    with_reference = layouts(run(meshes, ROLES | {"reward": "train"}))
    assert with_reference == {"frozen": "frozen:devices=1"} | words


def test_a_pool_is_named_after_the_first_role_on_its_mesh():
    config = run(MESHES, ROLES)
    roles = ("actor", "rollout", "reference")
    assert [pool(config, role) for role in roles] == [f"{role}_mesh" for role in roles]
    config = run(MESHES, ROLES | {"reference": "decode"})
    assert pool(config, "reference") == pool(config, "rollout") == "rollout_mesh"
    config = run(MESHES, ROLES | {"rollout": "train", "reference": "train"})
    assert {pool(config, role) for role in roles} == {"actor_mesh"}


@pytest.mark.parametrize(
    ("lag", "expected"), [(0, [0, 1, 2, 3, 4]), (1, [0, 0, 1, 2, 3]), (3, [0, 0, 0, 0, 1])]
)
def test_the_version_that_samples(lag, expected):
    assert [behaviour_version(lag, n) for n in range(1, 6)] == expected


def test_what_later_iterations_sample_with_is_kept():
    def kept(lag):
        return [n for n in range(9) if are_weights_kept("last", n, 8, lag)]

    assert kept(0) == [n for n in range(9) if is_kept("last", n, 8)] == [0, 8]
    assert kept(2) == [0, 6, 7, 8]
    for lag in range(4):  # iterations 9, 10, ... read what is there, and what they make themselves
        needed = {behaviour_version(lag, n) for n in range(9, 14)}
        assert {version for version in needed if version <= 8} <= set(kept(lag))
