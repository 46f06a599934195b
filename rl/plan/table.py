"""The plan as aligned text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl.plan.iteration import SCORING, UPDATING

STAGES = ("export", "sync", "rollouts", *SCORING, *UPDATING)


def text(plan: Mapping[str, Any]) -> str:
    """All sections of a report, one after the other."""
    sections = [_head(plan), _memory(plan), _sync(plan), _speed(plan), _iterations(plan)]
    if "measured" in plan:
        sections.append(_measured(plan["measured"]))
    return "\n\n".join(sections)


def aligned(rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Columns as wide as their widest cell; the first `num_left` to the left, others to the right.
    A row of one cell is a line of its own."""
    cells = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in rows:
        if len(row) == 1:
            lines.append(row[0])
            continue
        padded = [
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def quantity(value: float | None, unit: str, scale: Sequence[tuple[float, str]]) -> str:
    """Three digits in the largest prefix that leaves at least 1: 13.5 GB, 49.2 ms."""
    if value is None:
        return "-"
    if value == 0:
        return f"0 {unit}"
    size, prefix = next((step for step in scale if abs(value) >= step[0]), scale[-1])
    return f"{_three_digits(value / size)} {prefix}{unit}"


def _three_digits(value: float) -> str:
    if value >= 999.5:
        return f"{value:,.0f}"
    decimals = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 3)}f}"


def size_text(value: float | None) -> str:
    return quantity(value, "B", ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")))


def time_text(value: float | None) -> str:
    return quantity(value, "s", ((1, ""), (1e-3, "m"), (1e-6, "µ")))


def count_text(value: float) -> str:
    return quantity(value, "", ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))).strip()


def rate_text(value: float | None) -> str:
    return "-" if value is None else f"{_three_digits(value)}/s"


def _head(plan: Mapping[str, Any]) -> str:
    run, device = plan["run"], plan["device"]
    trained = "all trained"
    if run["lora_rank"]:
        trained = f"{count_text(run['trained_parameters'])} trained (LoRA rank {run['lora_rank']})"
    dtypes = run["dtype"]
    if run["rollout_dtype"] != run["dtype"]:
        dtypes += f", rollout in {run['rollout_dtype']}"
    prompts = f"{run['prompts']} prompts"
    if run["sampled_prompts"] > run["prompts"]:
        prompts = f"{run['sampled_prompts']} prompts ({run['prompts']} of them trained on)"
    updates = f", {run['epochs']} epochs" if run["epochs"] > 1 else ""
    rows = [
        ("run", f"{run['name']}, lag {run['lag']}, optimizer {run['optimizer']}"),
        (
            "model",
            f"{run['layers']} layers of width {run['width']}, "
            f"{count_text(run['parameters'])} parameters, {trained}, {dtypes}",
        ),
        (
            "batch",
            f"{prompts} x {run['group_size']} completions, {run['prompt_tokens']} + "
            f"{run['completion_tokens']} tokens{updates}, "
            f"cache {run['cache_bytes_per_token']:,} B a token",
        ),
        *_other_models(run),
        (
            "device",
            f"{device['name']}: {device['flops'] / 1e12:g} TFLOP/s in {run['dtype']}, "
            f"{device['bandwidth'] / 1e9:g} GB/s, {device['memory_bytes'] / 1e9:g} GB, "
            f"{device['link'] / 1e9:g} GB/s inside a mesh",
        ),
        *(("note", note) for note in plan["notes"]),
    ]
    return aligned(rows, num_left=2)


def _other_models(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows, critic = [], run["critic"]
    if critic:
        trained = count_text(critic["trained_parameters"])
        rank = f" (LoRA rank {critic['lora_rank']})" if critic["lora_rank"] else ""
        size = count_text(critic["parameters"])
        rows.append(("critic", f"{size} parameters, {trained} trained{rank}"))
    rows += [
        ("reward", f"{model['source']}: {count_text(model['parameters'])} parameters")
        for model in run["reward_models"]
    ]
    return rows


def _memory(plan: Mapping[str, Any]) -> str:
    names = ("parameters", "optimizer", "gradients", "copies", "activations", "cache", "peak")
    rows = [["mesh", "role", *names, "fits"]]
    for mesh in plan["memory"]:
        for role in mesh["roles"]:
            sizes = [size_text(role[f"{name}_bytes"]) for name in names]
            rows.append([mesh["mesh"], role["role"], *sizes, ""])
        verdict = f"{mesh['fits']}, {mesh['share']:.0%}"
        rows.append([mesh["mesh"], "all", *[""] * 6, size_text(mesh["peak_bytes"]), verdict])
    return _titled(
        "Memory of each device, by role (copies: parameters gathered over fsdp, or the next version"
        " coming in)",
        aligned(rows, num_left=2),
    )


def _sync(plan: Mapping[str, Any]) -> str:
    sync = plan["sync"]
    sizes = sync["exported_bytes"]
    names = {"full": "full", "lora": f"LoRA rank {sync['lora_rank']}"}
    names[sync["mode"]] += " (this run)"
    rows = [["", *names.values()]]
    rows.append(["exported by each version", *(size_text(sizes[name]) for name in names)])
    for place, moved in sync["moved_bytes"].items():
        rows.append([f"moved, {place}", *(size_text(moved[name]) for name in names)])
    for link in sync["links"]:
        how = ", written and read" if link["is_disk"] else ""
        where = f"over {link['link']}, {link['bandwidth'] / 1e9:g} GB/s{how}"
        rows.append([where, *(time_text(link[f"{name}_seconds"]) for name in names)])
    return _titled(f"One sync, in {sync['dtype']}", aligned(rows))


def _speed(plan: Mapping[str, Any]) -> str:
    rows = [["stage", "mesh", "tokens/s", "arithmetic", "links", "seconds", "bound by"]]
    for row in plan["speed"]:
        rate = rate_text(row.get("tokens_per_second")).removesuffix("/s")
        parts = [time_text(row.get(f"{part}_seconds")) for part in ("arithmetic", "link")]
        seconds = time_text(row["seconds"])
        rows.append([row["stage"], row["mesh"], rate, *parts, seconds, row["limit"]])
    decode = plan["speed"][0]
    written = {row["stage"]: row.get("checkpoint_bytes") for row in plan["speed"]}
    bound = rate_text(decode["memory_bound_tokens_per_second"]).removesuffix("/s")
    tail = (
        f"decode: {decode['rows']} rows, {time_text(decode['step_seconds'])} a step; {bound} "
        f"tokens/s if memory alone limits it; an update also writes a checkpoint of "
        f"{size_text(written['update'])}"
    )
    if written.get("critic"):
        tail += f", the critic's one of {size_text(written['critic'])}"
    return _titled("Stages at their bound, today's dial", aligned(rows, num_left=2), tail)


def _iterations(plan: Mapping[str, Any]) -> str:
    found = plan["iterations"]
    stages = [s for s in STAGES if any(row["stages"][s] for row in found)]
    rows = [["dial", "meshes", "lag", *stages, "iteration", "fits"]]
    for row in found:
        times = [time_text(row["stages"][stage]) for stage in stages]
        rows.append(
            [
                *(row["dial"], row["meshes"], str(row["lag"]), *times),
                time_text(row["seconds"]),
                "yes" if row["fits"] else "no",
            ]
        )
    device = plan["device"]
    return _titled(
        f"Seconds per iteration (syncs over {device['between']}, files on {device['disk']})",
        aligned(rows, num_left=2),
        "iteration = max(busiest mesh, whole chain / (1 + lag)); reward functions are not foreseen",
    )


def _measured(measured: Mapping[str, Any]) -> str:
    rows = [["figure", "predicted", "measured", "measured / predicted"]]
    for row in measured["rows"]:
        write = {"s": time_text, "bytes": size_text, "tokens/s": rate_text}[row["unit"]]
        predicted, found = row["predicted"], row["measured"]
        ratio = f"{found / predicted:.3g}" if predicted and found is not None else "-"
        rows.append([row["figure"], write(predicted), write(found), ratio])
    whole = "sum of its stages" if measured["is_sum_of_stages"] else "from update to update"
    count = f"{measured['iterations']} iteration{'s' * (measured['iterations'] != 1)}"
    return _titled(
        f"Measured, medians over {count} (sync: {measured['outcome']};"
        f" iteration: {whole}; peak memory: of a device, and of its process on the host)",
        aligned(rows),
    )


def _titled(title: str, *parts: str) -> str:
    return "\n".join([title, *parts])
