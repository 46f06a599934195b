"""Which mesh each role runs on: today's dial, from the config, and others to compare it with."""

from collections.abc import Mapping
from dataclasses import dataclass

from rl.mesh import SPLIT, mesh_of
from rl.models.spec import ModelConfig
from rl.sharding import AXES, check_model_fits


@dataclass(frozen=True)
class PlannedMesh:
    """A named device pool and how its devices are used."""

    name: str
    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def axes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def num_row_shards(self) -> int:
        return self.data * self.fsdp

    def __str__(self) -> str:
        """`train 4 (fsdp 4)`."""
        axes = ", ".join(f"{axis} {size}" for axis, size in self.axes.items() if size > 1)
        return f"{self.name} {self.num_devices}" + (f" ({axes})" if axes else "")


@dataclass(frozen=True)
class Dial:
    """The mesh of each role that costs device time; `reference` is None where there is no KL."""

    label: str
    lag: int
    actor: PlannedMesh
    rollout: PlannedMesh
    reference: PlannedMesh | None

    @property
    def roles(self) -> dict[str, PlannedMesh]:
        roles = {"actor": self.actor, "rollout": self.rollout, "reference": self.reference}
        return {role: mesh for role, mesh in roles.items() if mesh is not None}

    @property
    def meshes(self) -> list[PlannedMesh]:
        return list(dict.fromkeys(self.roles.values()))

    @property
    def num_devices(self) -> int:
        return sum(mesh.num_devices for mesh in self.meshes)

    @property
    def is_colocated(self) -> bool:
        return self.actor == self.rollout

    def __str__(self) -> str:
        return " | ".join(map(str, self.meshes))


def todays_dial(run: Mapping, model: ModelConfig, has_reference: bool) -> Dial:
    """The dial of a run's config; MeshdialError where the model cannot be split that way."""
    reference = _mesh(run, "reference", model) if has_reference else None
    actor, rollout = (_mesh(run, role, model) for role in ("actor", "rollout"))
    return Dial("today", run["lag"], actor, rollout, reference)


def _mesh(run: Mapping, role: str, model: ModelConfig) -> PlannedMesh:
    name = mesh_of(run, role)
    block = run["cluster"]["meshes"][name]
    axes = block["axes"] or {"fsdp": block["devices"]}
    check_model_fits(axes, model, f"cluster.meshes.{name}")
    return PlannedMesh(name, **axes)


def training_meshes(name: str, num_devices: int, model: ModelConfig) -> list[PlannedMesh]:
    """Ways to use so many devices for a role that trains: sharded over fsdp as far as the model's
    width allows, and over tensor."""
    meshes = []
    for tensor in _splitting("tensor", num_devices, model):
        shards = num_devices // tensor
        fsdp = _splitting("fsdp", shards, model)[-1]
        meshes.append(PlannedMesh(name, shards // fsdp, fsdp, tensor))
    return meshes


def decoding_meshes(name: str, num_devices: int, model: ModelConfig) -> list[PlannedMesh]:
    """Ways to use so many devices for a role that only reads the weights: whole replicas, each
    split over tensor."""
    sizes = _splitting("tensor", num_devices, model)
    return [PlannedMesh(name, data=num_devices // tensor, tensor=tensor) for tensor in sizes]


def _splitting(axis: str, num_devices: int, model: ModelConfig) -> list[int]:
    """Sizes of `axis` that divide the devices, and all that the model splits over it."""
    sizes = (num_devices, *(getattr(model, name) for name in SPLIT[axis]))
    return [n for n in range(1, num_devices + 1) if all(size % n == 0 for size in sizes)]
