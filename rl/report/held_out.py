"""What an evaluation says: accuracy, of each task too, and pass@k."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rl.report.columns import finish_fractions, floats, read_columns, token_counts
from rl.report.intervals import wilson_interval
from rl.report.pass_at_k import interval_over_prompts, pass_at_k

Figures = dict[str, float]


def evaluation_figures(path: Path) -> Figures:
    """Accuracy is over the scored samples; how many were not scored is a figure of its own. Where
    the prompts are of several tasks, each has figures `NAME:task` too."""
    names = ["prompt_id", "completion_mask", "finish_reason", "reward", "is_correct", "scored_ok"]
    table = read_columns(path, "evaluation", [*names, "is_sampled"])
    table = table.filter(pc.invert(table["is_sampled"]))
    scored = table.filter(pc.field("scored_ok"))
    figures = {
        "num_samples": scored.num_rows,
        "num_unscored": table.num_rows - scored.num_rows,
        "completion_length_mean": token_counts(table["completion_mask"]).mean(),
        **finish_fractions(table["finish_reason"]),
    }
    if scored.num_rows == 0:
        return figures
    tasks = [task_of(prompt_id) for prompt_id in scored["prompt_id"].to_pylist()]
    if len(set(tasks)) > 1:
        for task in sorted(set(tasks)):
            rows = scored.filter(pa.array([other == task for other in tasks]))
            parts = accuracy_figures(rows)
            figures |= {f"{name}:{task}": value for name, value in parts.items()}
    return figures | accuracy_figures(scored) | {"reward_mean": floats(scored["reward"]).mean()}


def task_of(prompt_id: str) -> str:
    """`reasoning_gym/gcd/1f..` -> `gcd`; `openai/gsm8k/1f..` -> `openai/gsm8k`."""
    return prompt_id.rpartition("/")[0].removeprefix("reasoning_gym/")


def accuracy_figures(scored: pa.Table) -> Figures:
    num_correct = pc.sum(scored["is_correct"]).as_py()
    low, high = wilson_interval(num_correct, scored.num_rows)
    return {
        "num_samples": scored.num_rows,
        "num_correct": num_correct,
        "accuracy": num_correct / scored.num_rows,
        "accuracy_low": low,
        "accuracy_high": high,
    }


def sample_figures(path: Path, pass_at: Sequence[int]) -> Figures:
    """pass@k over the prompts with at least k scored samples, with a 95% interval over prompts;
    nothing for an evaluation without samples. A sample that was not scored is none."""
    columns = ["prompt_id", "is_correct", "scored_ok", "is_sampled"]
    table = read_columns(path, "evaluation", columns)
    samples = table.filter(pc.and_(table["is_sampled"], table["scored_ok"]))
    counts: dict[str, list[int]] = {}
    for row in samples.select(["prompt_id", "is_correct"]).to_pylist():
        found = counts.setdefault(row["prompt_id"], [0, 0])
        found[0] += 1
        found[1] += row["is_correct"]
    figures: Figures = {}
    for k in pass_at:
        values = [pass_at_k(n, c, k) for n, c in counts.values() if n >= k]
        if values:
            low, high = interval_over_prompts(values)
            figures |= {
                f"pass_at_{k}": sum(values) / len(values),
                f"pass_at_{k}_low": low,
                f"pass_at_{k}_high": high,
                f"pass_at_{k}_prompts": len(values),
            }
    return figures
