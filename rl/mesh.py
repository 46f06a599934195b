"""The dial: which device mesh each of the five roles runs on.

The meshes of a dial lie end to end on the devices of the machine, in the config's order, whether a
run uses them or not: a mesh has the same devices in every run of a batch. A mesh is written as one
word, `NAME:devices=N[,first=K][,AXIS=SIZE...]`, and several are joined by `+`;
`rl.processes.runtime` reads them. A process holds only those that its run computes on, so that
the devices of a last mesh that no role computes on need not be there.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROLES = ("actor", "rollout", "reference", "reward", "critic")
HOST = "host:devices=0"  # where a stage runs that needs no accelerator


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
        is_word = isinstance(name, str) and re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", name)
        if not is_word or name == "host":
            yield (
                f"cluster.meshes has a mesh called {name!r}, expected lower-case letters, digits, "
                "'.', '_' and '-', and not host"
            )
    for role, mesh in cluster["roles"].items():
        if mesh is not None and mesh not in meshes:
            yield f"cluster.roles.{role} is {mesh!r}, expected a mesh: {', '.join(meshes)}"
        elif mesh is None and len(meshes) > 1 and role != "critic":
            yield f"cluster.roles.{role} is missing, expected one of the meshes {', '.join(meshes)}"


def uses_critic(config: Mapping) -> bool:
    """Whether the run's algorithm has a value model."""
    return config["algorithm"]["advantage"]["estimator"] == "gae"


def roles_on_meshes(config: Mapping) -> tuple[str, ...]:
    """The roles that a run computes with on a mesh: reward functions run on the host."""
    needs = {
        "reference": config["algorithm"]["kl"]["coefficient"] > 0,
        "reward": bool(config["reward"]["models"]),
        "critic": uses_critic(config),
    }
    return tuple(role for role in ROLES if needs.get(role, True))


def mesh_of(config: Mapping, role: str) -> str:
    """The name of `role`'s mesh; the only mesh where the dial does not say."""
    return config["cluster"]["roles"][role] or next(iter(config["cluster"]["meshes"]))


def layouts(config: Mapping) -> dict[str, str]:
    """Each mesh that the run computes on, by name, as one word: `train:devices=4,fsdp=4`."""
    used = {mesh_of(config, role) for role in roles_on_meshes(config)}
    words, first = {}, 0
    for name, mesh in config["cluster"]["meshes"].items():
        if name in used:
            places = {"devices": mesh["devices"]} | ({"first": first} if first else {})
            pairs = ",".join(f"{key}={n}" for key, n in (places | mesh["axes"]).items())
            words[name] = f"{name}:{pairs}"
        first += mesh["devices"]
    return words


def layout(config: Mapping, role: str) -> str:
    """`role`'s mesh as one word."""
    return layouts(config)[mesh_of(config, role)]


def process_layout(config: Mapping) -> str:
    """All meshes that the run computes on."""
    return "+".join(layouts(config).values())


def pool(config: Mapping, role: str) -> str:
    """What the jobs on `role`'s mesh take turns by: the first role on it, `actor_mesh`."""
    mates = [r for r in roles_on_meshes(config) if mesh_of(config, r) == mesh_of(config, role)]
    return f"{mates[0]}_mesh"


SPLIT = {
    "tensor": ("num_attention_heads", "num_key_value_heads", "intermediate_size"),
    "fsdp": ("hidden_size",),
}
"""Which of a model's sizes each axis of a mesh has to divide."""

_ARCHITECTURE = {
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
    "hidden_size": "width",
}


def check_sizes(axes: Mapping[str, int], sizes: Mapping, where: str) -> Iterator[str]:
    """Sentences about sizes of a model, named as in its config.json, that `axes` do not divide."""
    for axis, names in SPLIT.items():
        for name in names:
            if sizes.get(name, 0) % axes.get(axis, 1):
                yield (
                    f"{where} has {axis}: {axes[axis]}, which does not divide the model's {name}, "
                    f"{sizes[name]}"
                )


def check_fit(config: Mapping) -> Iterator[str]:
    """Sentences about meshes of a run that its model cannot be split over, as far as the model's
    sizes are known before it is made."""
    sizes = known_sizes(config["model"])
    for name in layouts(config):
        mesh = config["cluster"]["meshes"][name]
        axes = mesh["axes"] or {"fsdp": mesh["devices"]}
        yield from check_sizes(axes, sizes, f"cluster.meshes.{name}")


def known_sizes(model: Mapping) -> dict[str, int]:
    """The sizes that SPLIT names, of a model from scratch or in a folder; else nothing."""
    if model["source"] == "scratch":
        architecture = model["architecture"] or {}
        return {k: architecture[v] for k, v in _ARCHITECTURE.items() if v in architecture}
    file = Path(model["source"]).expanduser() / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # whoever makes the model says what is wrong with it
    return {name: n for name in _ARCHITECTURE if isinstance(n := values.get(name), int)}
