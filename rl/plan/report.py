"""The plan of a run as one mapping of plain values, in bytes and seconds: what `--json` prints and
the tables are made from."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl.plan.dial import Dial
from rl.plan.hardware import Link
from rl.plan.iteration import (
    Iteration,
    Machines,
    alternatives,
    iteration,
    model_stages,
    sync_bytes,
)
from rl.plan.measured import Measured
from rl.plan.memory import cache_bytes_per_token, memory_by_role, mesh_peak
from rl.plan.shape import base, num_parameters, tensors, trainable
from rl.plan.speed import decoding
from rl.plan.work import Work, lora_of

USUAL_RANK = 8
"""Of the adapter that a sync is shown for beside full fine-tuning, where the run has none."""

USUAL_SHARE = 0.75
"""Of a GPU's memory, what JAX takes by default (XLA_PYTHON_CLIENT_MEM_FRACTION)."""


@dataclass(frozen=True)
class Plan:
    """All that the report is made from. `num_devices` are those of the alternatives."""

    run: Mapping[str, Any]
    work: Work
    dial: Dial
    machines: Machines
    links: Mapping[str, Link]
    num_devices: int
    notes: tuple[str, ...] = ()
    measured: Measured | None = None


def report(plan: Plan) -> dict[str, Any]:
    """Sections `run`, `device`, `memory`, `sync`, `speed`, `iterations`, and `measured`."""
    today = iteration(plan.work, plan.dial, plan.machines)
    sections = {
        "run": _run(plan),
        "device": _device(plan),
        "memory": _memory(plan),
        "sync": _sync(plan),
        "speed": _speed(plan),
        "iterations": _iterations(plan, today),
        "notes": list(plan.notes),
    }
    if plan.measured is not None:
        sections["measured"] = _compared(plan, today, plan.measured)
    return sections


def _run(plan: Plan) -> dict[str, Any]:
    work, config = plan.work, plan.work.spec.config
    lora = work.spec.lora
    return {
        "name": plan.run["run"],
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "parameters": num_parameters(base(work.spec)),
        "trained_parameters": num_parameters(trainable(work.spec)),
        "lora_rank": lora.rank if lora else 0,
        "dtype": work.spec.dtype,
        "rollout_dtype": work.rollout_dtype,
        "optimizer": plan.run["optimizer"]["name"],
        "critic": _critic(work) if work.critic else None,
        "reward_models": [
            {"source": model.source, "parameters": num_parameters(tensors(model.spec))}
            for model in work.reward_models
        ],
        "prompts": work.num_prompts,
        "sampled_prompts": work.num_sampled,
        "epochs": work.num_epochs,
        "group_size": work.group_size,
        "prompt_tokens": work.prompt_tokens,
        "completion_tokens": work.completion_tokens,
        "max_tokens": work.max_tokens,
        "micro_batch_tokens": work.micro_batch_tokens,
        "max_rows": work.max_rows,
        "cache_bytes_per_token": cache_bytes_per_token(work),
        "lag": plan.dial.lag,
    }


def _critic(work: Work) -> dict[str, int]:
    spec = work.critic.spec
    return {
        "parameters": num_parameters(tensors(replace(spec, lora=None))),
        "trained_parameters": num_parameters(trainable(spec)),
        "lora_rank": spec.lora.rank if spec.lora else 0,
    }


def _device(plan: Plan) -> dict[str, Any]:
    device = plan.machines.device
    return {
        "name": device.name,
        "flops": device.flops(plan.work.spec.dtype),
        "bandwidth": device.bandwidth,
        "memory_bytes": device.memory,
        "link": device.link,
        "between": plan.machines.between.name,
        "disk": plan.machines.disk.name,
    }


def _memory(plan: Plan) -> list[dict[str, Any]]:
    roles = memory_by_role(plan.work, plan.dial)
    memory = plan.machines.device.memory
    meshes = []
    for mesh in plan.dial.meshes:
        peak = mesh_peak(roles, mesh)
        share = peak / memory
        meshes.append(
            {
                "mesh": str(mesh),
                "roles": [_role(role) for role in roles if role.mesh == mesh],
                "peak_bytes": peak,
                "share": share,
                "fits": "no" if share > 1 else "yes" if share <= USUAL_SHARE else "tight",
            }
        )
    return meshes


def _role(role) -> dict[str, Any]:
    names = ("parameters", "optimizer", "gradients", "copies", "activations", "cache", "peak")
    return {"role": role.role} | {f"{name}_bytes": getattr(role, name) for name in names}


def _sync(plan: Plan) -> dict[str, Any]:
    """Of this model, fully trained and under an adapter, whichever of the two the run does."""
    spec = plan.work.spec
    adapter = spec.lora or lora_of(plan.run["lora"], USUAL_RANK)
    sizes = {
        name: sync_bytes(replace(plan.work, spec=replace(spec, lora=lora)))
        for name, lora in (("full", None), ("lora", adapter))
    }
    return {
        "mode": "lora" if spec.lora else "full",
        "lora_rank": adapter.rank,
        "dtype": plan.work.rollout_dtype,
        "exported_bytes": sizes,
        "moved_bytes": {"colocated": dict.fromkeys(sizes, 0), "disaggregated": sizes},
        "links": [
            {"link": link.name, "bandwidth": link.bandwidth, "is_disk": link.is_disk}
            | {f"{name}_seconds": link.seconds(size) for name, size in sizes.items()}
            for link in plan.links.values()
        ],
    }


def _speed(plan: Plan) -> list[dict[str, Any]]:
    work, device, dial = plan.work, plan.machines.device, plan.dial
    decode = decoding(work, dial.rollout, device)
    rows = [
        {
            "stage": "decode",
            "mesh": str(dial.rollout),
            "tokens_per_second": decode.tokens_per_second,
            "memory_bound_tokens_per_second": decode.rows / decode.step.memory,
            "rows": decode.rows,
            "step_seconds": decode.step.seconds,
            "seconds": decode.seconds,
            "limit": decode.step.limit,
        }
    ]
    for stage, found in model_stages(work, dial, device).items():
        row = {
            "stage": stage,
            "mesh": str(dial.roles[found.role]),
            "arithmetic_seconds": found.bound.arithmetic,
            "link_seconds": found.bound.link,
            "seconds": found.bound.seconds,
            "limit": found.bound.limit,
        }
        is_updating = found.checkpoint_bytes > 0
        rows.append(row | ({"checkpoint_bytes": found.checkpoint_bytes} if is_updating else {}))
    return rows


def _iterations(plan: Plan, today: Iteration) -> list[dict[str, Any]]:
    """Today's dial first; the others on as many devices, with lag 0 and 1, or today's if larger."""
    lags = (0, max(1, plan.dial.lag))
    others = alternatives(plan.work, plan.machines, plan.num_devices, lags)
    return [
        {
            "dial": found.dial.label,
            "lag": found.dial.lag,
            "meshes": str(found.dial),
            "devices": found.dial.num_devices,
            "stages": found.stages,
            "seconds": found.seconds,
            "fits": found.overflow == 0,
        }
        for found in (today, *others)
    ]


def _compared(plan: Plan, today: Iteration, measured: Measured) -> dict[str, Any]:
    """Rows of what was foreseen and what was found; a figure that the run does not have is None."""
    work, device, dial = plan.work, plan.machines.device, plan.dial
    decode = decoding(work, dial.rollout, device)
    foreseen = {"rollouts": today.stages["rollouts"]}
    stages = model_stages(work, dial, device)
    foreseen |= {stage: found.bound.seconds for stage, found in stages.items()}
    size = sync_bytes(work)
    moved = 0 if dial.is_colocated else size
    peak = max(mesh_peak(memory_by_role(work, dial), mesh) for mesh in dial.meshes)
    rate = work.num_completion_tokens / decode.seconds
    rows = [("rollouts, completion tokens", "tokens/s", rate, measured.tokens_per_second)]
    rows += [
        (f"{stage}, computing", "s", foreseen[stage], measured.stages[stage])
        for stage in foreseen
        if stage in measured.stages
    ]
    rows += [
        (
            "update, checkpoint and all",
            "s",
            today.stages["update"],
            measured.whole.get("update_actor"),
        ),
        ("export", "s", today.stages["export"], measured.whole.get("sync_weights")),
        ("export, written", "bytes", size, measured.sync.get("bytes_written")),
        ("sync, moved", "bytes", moved, measured.sync.get("bytes_moved")),
        ("sync, on the rollout's side", "s", today.stages["sync"], measured.sync.get("seconds")),
        ("iteration", "s", today.seconds, measured.iteration_seconds or _sum_of_stages(measured)),
        ("peak memory", "bytes", peak, measured.peak_memory),
    ]
    return {
        "iterations": measured.num_iterations,
        "outcome": measured.sync.get("outcome"),
        "is_sum_of_stages": measured.iteration_seconds is None,
        "rows": [
            {"figure": figure, "unit": unit, "predicted": predicted, "measured": found}
            for figure, unit, predicted, found in rows
        ],
    }


def _sum_of_stages(measured: Measured) -> float:
    return sum(seconds for rule, seconds in measured.whole.items() if rule != "evaluate_policy")
