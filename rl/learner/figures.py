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
    is_degenerate_P = ~np.any((batch.advantages_PGT != 0) & batch.trained_mask(), axis=(1, 2))
    return count_tokens(batch) | {"num_degenerate_groups": float(is_degenerate_P.sum())}


def value_figures(reports: list[dict[str, float]], batch: UpdateBatch) -> dict[str, float]:
    """Of a critic: its updates' means, and how well it knew the returns before them.

    explained_variance is 1 - Var(return - value) / Var(return) over the trained tokens, 0 where
    the returns do not vary. A batch without a single return has figures of 0.
    """
    mask_PGT = batch.trained_mask()
    values, returns = (
        array[mask_PGT].astype(np.float64) for array in (batch.values_PGT, batch.returns_PGT)
    )
    spread = returns.var() if returns.size else 0.0

    def mean(name):
        return ratio(math.fsum(report[name] for report in reports), len(reports))

    return {
        "value_loss": mean("loss"),
        "value_clip_fraction": ratio(
            math.fsum(report["clipped"] for report in reports),
            math.fsum(report["weight"] for report in reports),
        ),
        "gradient_norm": mean("gradient_norm"),
        "learning_rate": reports[-1]["learning_rate"] if reports else 0.0,
        "explained_variance": float(1 - (returns - values).var() / spread) if spread else 0.0,
        "value_mean": float(values.mean()) if values.size else 0.0,
        "return_mean": float(returns.mean()) if returns.size else 0.0,
        "num_tokens": float(mask_PGT.sum()),
    }


def count_tokens(batch: UpdateBatch) -> dict[str, float]:
    lengths = batch.completion_lengths_PG[batch.completion_lengths_PG > 0]
    return {
        "num_tokens": float(batch.trained_mask().sum()),
        "completion_length_mean": float(lengths.mean()) if lengths.size else 0.0,
    }


def ratio(total: float, weight: float) -> float:
    return total / weight if weight else 0.0
