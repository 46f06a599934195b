"""From rewards to the advantage of every token, and the groups that an update takes."""

import numpy as np
import pyarrow as pa

from rl.algorithms.estimators import AdvantageConfig, Estimates, Sequences, estimate
from rl.algorithms.kl import kl_values
from rl.algorithms.selection import Selection, select_groups
from rl.algorithms.shaping import length_penalty, overlong_penalty
from rl.artifacts import Publisher, join, make_table, read_table, write_table
from rl.context import Context
from rl.stages.request import Request
from rl.stages.tokens import lists


def estimate_advantages(job: Request, context: Context) -> str:
    """The groups to train on by their raw rewards; then penalties on length, the estimator of the
    advantages, and a critic's returns."""
    rollouts = read_table(job.input("rollouts"), "rollouts")
    rewards = read_table(job.input("rewards"), "rewards")
    samples = join(rollouts.select(["sample_id", "group_id"]), rewards, ["reward", "scored_ok"])
    raw, is_counted = _counted(samples, job.config["reward.failure_value"])
    group_ids = np.array(samples["group_id"].to_pylist())
    masks = lists(rollouts, "completion_mask")
    selection = _selected(job, raw, group_ids, is_counted)
    shaped = raw + _penalties(job, rollouts, raw, group_ids, is_counted)
    rows = np.flatnonzero(selection.is_used_N)
    estimates = estimate(
        _config(job),
        Sequences(
            rewards_N=shaped[rows],
            group_ids_N=group_ids[rows],
            is_counted_N=is_counted[rows],
            masks=[masks[row] for row in rows],
            kl_penalties=_kl_penalties(job, rollouts, rows),
            values=_values(job, rollouts, rows),
        ),
    )
    columns = {
        "sample_id": samples["sample_id"].to_pylist(),
        "group_id": samples["group_id"].to_pylist(),
        "reward": _or_null(raw, is_counted),
        "shaped_reward": _or_null(shaped, is_counted),
        **_per_token(estimates, rows, selection, masks),
        "is_degenerate": selection.is_degenerate_N,
        "is_used": selection.is_used_N,
    }
    write_table(
        Publisher(context.check_alive),
        job.outputs["advantages"],
        "advantages",
        make_table("advantages", columns),
        job.provenance(),
    )
    return _told(group_ids, selection)


def _counted(samples: pa.Table, failure_value: float | None) -> tuple[np.ndarray, np.ndarray]:
    """(reward, whether it counts) of each sample; where it does not, the reward is 0."""
    is_scored = samples["scored_ok"].to_numpy()
    found = [0.0 if reward is None else float(reward) for reward in samples["reward"].to_pylist()]
    raw = np.where(is_scored, found, 0.0 if failure_value is None else float(failure_value))
    return raw, is_scored | (failure_value is not None)


def _selected(job: Request, raw, group_ids, is_counted) -> Selection:
    config = job.config
    return select_groups(
        raw,
        group_ids,
        is_counted,
        config["rollout.prompts_per_iteration"],
        tuple(config["algorithm.pass_rate"]),
        config["algorithm.passing_reward"],
        needs_spread=config["rollout.oversampling"] > 1,
    )


def _penalties(job: Request, rollouts: pa.Table, raw, group_ids, is_counted) -> np.ndarray:
    """What the length of each completion adds to its reward."""
    config = job.config
    overlong, by_length = config["algorithm.overlong"], config["algorithm.length_penalty"]
    lengths = np.array([len(tokens) for tokens in lists(rollouts, "completion_tokens")])
    max_tokens = config["rollout.max_tokens"]
    return overlong_penalty(
        lengths, max_tokens, overlong["buffer_tokens"], overlong["penalty"]
    ) + length_penalty(
        by_length["kind"],
        by_length["coefficient"],
        lengths,
        max_tokens,
        group_ids,
        raw >= config["algorithm.passing_reward"],
        is_counted,
    )


def _config(job: Request) -> AdvantageConfig:
    block = job.config["algorithm.advantage"]
    return AdvantageConfig(
        estimator=block["estimator"],
        deviation=block["deviation"],
        gamma=block["gamma"],
        lam=block["lambda"],
        whiten=block["whiten"],
    )


def _kl_penalties(job: Request, rollouts: pa.Table, rows) -> list[np.ndarray] | None:
    """coefficient * KL of each token, between the policy that the update starts from and the
    reference; None where the reward has no such part."""
    kl = job.config["reward_kl"]
    if kl is None:
        return None
    policy = _column(job, rollouts, "policy_logprobs", "policy_logprobs")
    reference = _column(job, rollouts, "reference", "reference_logprobs")
    return [
        kl["coefficient"] * kl_values(policy[row], reference[row], kl["estimator"]) for row in rows
    ]


def _values(job: Request, rollouts: pa.Table, rows) -> list[np.ndarray] | None:
    if job.config["algorithm.advantage"]["estimator"] != "gae":
        return None
    values = _column(job, rollouts, "values", "values")
    return [values[row] for row in rows]


def _column(job: Request, rollouts: pa.Table, kind: str, column: str) -> list[np.ndarray]:
    table = read_table(job.input(kind), kind)
    return lists(join(rollouts.select(["sample_id"]), table, [column]), column)


def _per_token(estimates: Estimates, rows, selection: Selection, masks) -> dict[str, list]:
    """The list columns of all samples: 0 for a group that is not used, or is there to fill up."""
    advantages = [np.zeros(len(mask), np.float32) for mask in masks]
    returns: list[np.ndarray | None] = [None] * len(masks)
    for place, row in enumerate(rows):
        if not selection.is_silenced_N[row]:
            advantages[row] = estimates.advantages[place]
        if estimates.returns is not None:
            returns[row] = estimates.returns[place]
    return {"advantages": advantages, "returns": returns}


def _or_null(values, is_counted) -> list[float | None]:
    return [float(v) if counts else None for v, counts in zip(values, is_counted, strict=True)]


def _told(group_ids, selection: Selection) -> str:
    without_spread = group_ids[selection.is_degenerate_N]
    num_groups, without = (len(set(ids)) for ids in (group_ids, without_spread))
    told = f"{num_groups - without} of {num_groups} groups with spread"
    if selection.num_left_out:
        told += f", {selection.num_left_out} left out"
    if selection.num_filled:
        told += f", {selection.num_filled} trained on without a signal"
    return told
