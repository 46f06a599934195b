"""Seconds of an iteration: its stages on the meshes of a dial, composed over the DAG.

    sync(n-1-lag) -> rollouts -> log-probabilities, values, reward models -> updates -> sync(n)

Stages of one mesh take turns, those of different meshes overlap as far as the edges allow. In a
steady state an iteration therefore takes

    max( the busiest mesh's seconds, seconds of the whole chain / (1 + lag) )

the largest cycle mean of the repeated DAG (Reiter 1968): with lag 0 that is the chain, which on a
single mesh is the sum of all stages; with enough lag it is the busiest mesh. The chain has the
slowest of the meshes that score, and then of those that update, as an actor and its critic may do
side by side. Reward functions, advantages and checks run on the host and are not foreseen; nor is
evaluation.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rl.mesh import ROLES
from rl.plan.dial import Dial, PlannedMesh, decoding_meshes, roles_of, training_meshes
from rl.plan.hardware import Device, Link
from rl.plan.memory import memory_by_role, mesh_peak
from rl.plan.shape import itemsize, num_parameters, trainable
from rl.plan.speed import (
    Bound,
    checkpoint_bytes,
    decoding,
    models_bound,
    scoring_bound,
    update_bound,
)
from rl.plan.work import Work

MOST_UNITS = 8
"""Pools of an alternative are multiples of a power of two, of which there are about this many."""


@dataclass(frozen=True)
class Machines:
    """What the meshes are made of. `between` carries a sync from mesh to mesh; every export and
    checkpoint goes to `disk`."""

    device: Device
    between: Link
    disk: Link


@dataclass(frozen=True)
class Iteration:
    """Seconds of each stage, and of an iteration in a steady state."""

    dial: Dial
    stages: dict[str, float]
    seconds: float
    overflow: float

    @property
    def rank(self) -> tuple[float, float, float]:
        """What fits comes first, or comes nearest to it; then what is fastest, and does least."""
        return self.overflow, self.seconds, sum(self.stages.values())


def sync_bytes(work: Work) -> int:
    """Trainable parameters only, in the rollout's dtype: what every export writes, and what a sync
    between meshes moves; on one mesh it moves nothing."""
    return num_parameters(trainable(work.spec)) * itemsize(work.rollout_dtype)


@dataclass(frozen=True)
class ModelStage:
    """A stage that scores rollouts or updates a model: its role, and its bound without a
    checkpoint, of which it writes so many bytes."""

    role: str
    bound: Bound
    checkpoint_bytes: int = 0


SCORING = ("reference", "policy", "values", "models")
UPDATING = ("update", "critic")


def model_stages(work: Work, dial: Dial, device: Device) -> dict[str, ModelStage]:
    """Those of SCORING and UPDATING that the run has, in the order in which they run."""

    def scored(role: str, of: Work = work, bound: Callable = scoring_bound) -> ModelStage:
        return ModelStage(role, bound(of, dial.roles[role], device))

    def updated(role: str, of: Work) -> ModelStage:
        return ModelStage(role, update_bound(of, dial.roles[role], device), checkpoint_bytes(of))

    stages = {}
    if dial.reference is not None:
        stages["reference"] = scored("reference")
    if work.needs_policy_logprobs(dial.lag):
        stages["policy"] = scored("actor")
    if dial.critic is not None:
        stages["values"] = scored("critic", work.of_critic)
    if dial.reward is not None:
        stages["models"] = scored("reward", bound=models_bound)
    stages["update"] = updated("actor", work)
    if dial.critic is not None:
        stages["critic"] = updated("critic", work.of_critic)
    return stages


def iteration(work: Work, dial: Dial, machines: Machines) -> Iteration:
    """`stages`: export, sync, rollouts, those of SCORING, and of UPDATING with their checkpoints; 0
    for one that the run has not."""
    device, disk = machines.device, machines.disk
    export = sync_bytes(work) / disk.bandwidth
    sync = 0.0
    if not dial.is_colocated:
        # Through files, the export is half of the sync.
        moved = machines.between.seconds(sync_bytes(work))
        sync = moved / 2 if machines.between.is_disk else moved
        export = moved / 2 if machines.between.is_disk else export
    rollouts = decoding(work, dial.rollout, device).seconds
    stages = {"export": export, "sync": sync, "rollouts": rollouts}
    stages |= dict.fromkeys((*SCORING, *UPDATING), 0.0)
    for name, found in model_stages(work, dial, device).items():
        stages[name] = found.bound.seconds + found.checkpoint_bytes / disk.bandwidth
    return Iteration(dial, stages, composed(dial, stages), overflow(work, dial, device))


def composed(dial: Dial, stages: dict[str, float]) -> float:
    """Seconds of an iteration in a steady state, by the formula above."""
    place = {"export": dial.actor, "policy": dial.actor, "update": dial.actor}
    place |= {"sync": dial.rollout, "rollouts": dial.rollout, "reference": dial.reference}
    place |= {"values": dial.critic, "models": dial.reward, "critic": dial.critic}

    def busiest(names: Iterable[str]) -> float:
        return max(
            sum(stages[name] for name in names if place[name] == mesh) for mesh in dial.meshes
        )

    chain = sum(stages[name] for name in ("export", "sync", "rollouts"))
    chain += busiest(SCORING) + busiest(UPDATING)
    return max(busiest(stages), chain / (1 + dial.lag))


def overflow(work: Work, dial: Dial, device: Device) -> float:
    """By which part of a device's memory the fullest mesh exceeds it; 0 where all fits."""
    roles = memory_by_role(work, dial)
    return max(0.0, *(mesh_peak(roles, mesh) / device.memory - 1 for mesh in dial.meshes))


# Other dials on as many devices


def alternatives(
    work: Work, machines: Machines, num_devices: int, lags: tuple[int, ...]
) -> list[Iteration]:
    """For each way to part the roles and each lag, the dial that fits and is fastest; where none
    fits, the one that comes nearest. A dial of more meshes than devices has a device for each."""
    return [
        _best(work, machines, label, parts, max(num_devices, len(parts)), lag)
        for label, parts in _partings(set(roles_of(work)))
        for lag in lags
    ]


FROZEN = {"reference": "reference", "reward": "reward models"}
"""Roles that are never trained, in words."""


def _partings(roles: set[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Label, and for each mesh the roles that share it. Reward models go with the reference, a
    critic goes with the actor or has a mesh to itself."""
    trained = " ".join(role for role in ("actor", "critic") if role in roles)
    frozen = " ".join(role for role in FROZEN if role in roles)
    all_roles = f"{trained} {frozen}".strip()
    yield "all colocated", (f"{all_roles} rollout",)
    yield "rollout apart", (all_roles, "rollout")
    if frozen:
        told = " and ".join(FROZEN[role] for role in frozen.split())
        yield f"rollout apart, with the {told}", (trained, f"rollout {frozen}")
        yield f"rollout and {told} apart", (trained, "rollout", frozen)
    if "critic" in roles:
        yield "rollout and critic apart", (f"actor {frozen}".strip(), "rollout", "critic")


def _best(
    work: Work, machines: Machines, label: str, parts: tuple[str, ...], num_devices: int, lag: int
) -> Iteration:
    def planned(meshes: tuple[PlannedMesh, ...]) -> Iteration:
        mesh = {r: m for roles, m in zip(parts, meshes, strict=True) for r in roles.split()}
        return iteration(work, Dial(label, lag, **dict.fromkeys(ROLES) | mesh), machines)

    found = []
    for sizes in _splits(num_devices, len(parts), _unit(num_devices)):
        options = [_options(work, roles, size) for roles, size in zip(parts, sizes, strict=True)]
        meshes = tuple(choices[-1] for choices in options)
        # A mesh's own stages and memory depend on no other, so that each is chosen by itself.
        for place, choices in enumerate(options):
            others = meshes[:place], meshes[place + 1 :]
            tried = [planned((*others[0], mesh, *others[1])) for mesh in choices]
            best = min(range(len(tried)), key=lambda n, tried=tried: tried[n].rank)
            meshes = (*others[0], choices[best], *others[1])
        found.append(planned(meshes))
    return min(found, key=lambda iteration: iteration.rank)


def _options(work: Work, roles: str, size: int) -> list[PlannedMesh]:
    names = roles.split()
    make = training_meshes if {"actor", "critic"} & set(names) else decoding_meshes
    models = dict.fromkeys(spec.config for role in names for spec in work.specs_of(role))
    return make(names[0], size, *models)


def _unit(num_devices: int) -> int:
    unit = 1
    while unit * 2 * MOST_UNITS <= num_devices:
        unit *= 2
    return unit


def _splits(num_devices: int, num_meshes: int, unit: int) -> Iterator[tuple[int, ...]]:
    """Ways to divide the devices, the last mesh taking what is left."""
    if num_meshes == 1:
        yield (num_devices,)
        return
    for first in range(unit, num_devices - unit * (num_meshes - 1) + 1, unit):
        for rest in _splits(num_devices - first, num_meshes - 1, unit):
            yield (first, *rest)
