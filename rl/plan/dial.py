"""Which mesh each role runs on: today's dial, from the config, and others to compare it with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl.mesh import ROLES, SPLIT, mesh_of
from rl.models.spec import ModelConfig
from rl.plan.work import Work
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
    """The mesh of each role that costs device time; None for a role that the run has not."""

    label: str
    lag: int
    actor: PlannedMesh
    rollout: PlannedMesh
    reference: PlannedMesh | None
    reward: PlannedMesh | None = None
    critic: PlannedMesh | None = None

    @property
    def roles(self) -> dict[str, PlannedMesh]:
        roles = {role: getattr(self, role) for role in ROLES}
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


def roles_of(work: Work) -> list[str]:
    """Those that compute on a mesh."""
    has = {"reference": work.has_reference}
    return [role for role in ROLES if has.get(role, True) and work.specs_of(role)]


def todays_dial(run: Mapping, work: Work) -> Dial:
    """The dial of a run's config; MeshdialError where a model cannot be split that way."""
    meshes = dict.fromkeys(ROLES) | {role: _mesh(run, role, work) for role in roles_of(work)}
    return Dial("today", run["lag"], **meshes)


def _mesh(run: Mapping, role: str, work: Work) -> PlannedMesh:
    name = mesh_of(run, role)
    block = run["cluster"]["meshes"][name]
    axes = block["axes"] or {"fsdp": block["devices"]}
    for spec in work.specs_of(role):
        check_model_fits(axes, spec.config, f"cluster.meshes.{name}")
    return PlannedMesh(name, **axes)


def training_meshes(name: str, num_devices: int, *models: ModelConfig) -> list[PlannedMesh]:
    """Ways to use so many devices for a role that trains: sharded over fsdp as far as the models'
    widths allow, and over tensor."""
    meshes = []
    for tensor in _splitting("tensor", num_devices, models):
        shards = num_devices // tensor
        fsdp = _splitting("fsdp", shards, models)[-1]
        meshes.append(PlannedMesh(name, shards // fsdp, fsdp, tensor))
    return meshes


def decoding_meshes(name: str, num_devices: int, *models: ModelConfig) -> list[PlannedMesh]:
    """Ways to use so many devices for a role that only reads the weights: whole replicas, each
    split over tensor."""
    sizes = _splitting("tensor", num_devices, models)
    return [PlannedMesh(name, data=num_devices // tensor, tensor=tensor) for tensor in sizes]


def _splitting(axis: str, num_devices: int, models: Sequence[ModelConfig]) -> list[int]:
    """Sizes of `axis` that divide the devices, and all that the models split over it."""
    sizes = (num_devices, *(getattr(model, name) for model in models for name in SPLIT[axis]))
    return [n for n in range(1, num_devices + 1) if all(size % n == 0 for size in sizes)]
