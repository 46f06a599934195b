"""From the sums of micro-batches to the figures of a batch, all plain floats."""

import math

import numpy as np

from rl.learner.batch import UpdateBatch


def added(totals: dict[str, float], sums: dict[str, float]) -> dict[str, float]:
    added = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
    if "drift_max" in sums:
        added["drift_max"] = max(totals.get("drift_max", 0.0), sums["drift_max"])
    return added


def batch_figures(reports: list[dict[str, float]]) -> dict[str, float]:
    def mean(name):
        return math.fsum(report[name] for report in reports) / len(reports)

    def average(name):
        return ratio(
            math.fsum(report[name] for report in reports),
            math.fsum(report["weight"] for report in reports),
        )

    first = reports[0]
    figures = {name: mean(name) for name in ("loss", "policy_loss", "gradient_norm")}
    figures |= {"entropy": average("entropy"), "ratio_mean": average("ratio")}
    figures |= {"clip_fraction": average("clipped")}
    if "kl" in first:
        figures["kl"] = average("kl")
    figures["logprob_drift_mean"] = ratio(first["drift"], first["num_tokens"])
    figures["logprob_drift_max"] = first["drift_max"]
    if "anchor_drift" in first:
        figures["anchor_drift_mean"] = ratio(first["anchor_drift"], first["num_tokens"])
    return figures | {"learning_rate": reports[-1]["learning_rate"]}


def describe_batch(batch: UpdateBatch) -> dict[str, float]:
    is_degenerate_P = np.all(batch.advantages_PG == 0, axis=1)
    return count_tokens(batch) | {"num_degenerate_groups": float(is_degenerate_P.sum())}


def count_tokens(batch: UpdateBatch) -> dict[str, float]:
    lengths = batch.completion_lengths_PG[batch.completion_lengths_PG > 0]
    return {
        "num_tokens": float(batch.trained_mask().sum()),
        "completion_length_mean": float(lengths.mean()) if lengths.size else 0.0,
    }


def ratio(total: float, weight: float) -> float:
    return total / weight if weight else 0.0
