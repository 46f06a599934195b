"""The dial: which device mesh each of the five roles runs on."""

import math
from collections.abc import Iterator, Mapping

ROLES = ("actor", "rollout", "reference", "reward", "critic")


def check_dial(cluster: Mapping) -> Iterator[str]:
    """Sentences about a `cluster` block that cannot work."""
    meshes = cluster["meshes"]
    for name, mesh in meshes.items():
        size = math.prod(mesh["axes"].values())
        if mesh["axes"] and size != mesh["devices"]:
            yield (
                f"cluster.meshes.{name} has devices: {mesh['devices']}, but its axes "
                f"{mesh['axes']} multiply to {size}"
            )
    for role, mesh in cluster["roles"].items():
        if mesh is not None and mesh not in meshes:
            yield f"cluster.roles.{role} is {mesh!r}, expected a mesh: {', '.join(meshes)}"
        elif mesh is None and len(meshes) > 1 and role != "critic":
            yield f"cluster.roles.{role} is missing, expected one of the meshes {', '.join(meshes)}"
    used = {mesh_of(cluster, role) for role in ROLES}
    if len(meshes) > 1 and len(used - {None}) > 1:
        yield "cluster.roles names several meshes; so far all roles share one (colocated)"
    for name, mesh in meshes.items():
        if mesh["devices"] > 1 and name in used:
            yield (
                f"cluster.meshes.{name}.devices is {mesh['devices']}, expected 1: larger meshes "
                "are not there yet"
            )


def mesh_of(cluster: Mapping, role: str) -> str | None:
    """The name of `role`'s mesh; the only mesh where the dial does not say."""
    meshes = cluster["meshes"]
    return cluster["roles"][role] or (next(iter(meshes)) if len(meshes) == 1 else None)


def layout(cluster: Mapping, role: str) -> str:
    """`role`'s mesh as one word, for example `all:devices=1` or `train:devices=4,fsdp=4`."""
    name = mesh_of(cluster, role)
    mesh = cluster["meshes"][name]
    axes = "".join(f",{axis}={size}" for axis, size in mesh["axes"].items())
    return f"{name}:devices={mesh['devices']}{axes}"
