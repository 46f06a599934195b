"""Log-probabilities of given rollouts under the reference and the policy, and their advantages."""

import numpy as np

from rl.algorithms.advantages import group_advantages
from rl.artifacts import Publisher, join, make_table, read_table, write_table
from rl.context import Context
from rl.learner import score_batch, unpack
from rl.memory import memory_of
from rl.models.spec import ModelSpec
from rl.stages.learning import watched
from rl.stages.request import Request
from rl.stages.tokens import update_batch
from rl.sync import load_base, load_policy


def reference_logprobs(job: Request, context: Context) -> str:
    """Under the frozen base: the policy without its adapter."""
    base = load_base(memory_of(context), job.input("base"))
    spec = ModelSpec(base.config, None, base.dtype)
    return _write_logprobs(job, context, "reference", spec, {}, base.parameters)


def policy_logprobs(job: Request, context: Context) -> str:
    """Under policy n-1, the anchor of the update's ratio."""
    policy = load_policy(job, memory_of(context), job.iteration - 1)
    return _write_logprobs(
        job, context, "policy_logprobs", policy.spec, policy.trainable, policy.frozen
    )


def _write_logprobs(job: Request, context: Context, kind: str, spec, trainable, frozen) -> str:
    rollouts = read_table(job.input("rollouts"), "rollouts")
    config = job.config
    batch = update_batch(rollouts, config["rollout.temperature"], config["rollout.max_tokens"])
    with job.computing():
        logprobs_PGT = score_batch(
            spec,
            trainable,
            frozen,
            batch,
            job.cost["micro_batch_tokens"],
            watched(context, job.stage),
        )
    values = unpack(logprobs_PGT, batch, rollouts["group_id"].to_pylist())
    column = "reference_logprobs" if kind == "reference" else "policy_logprobs"
    table = make_table(kind, {"sample_id": rollouts["sample_id"].to_pylist(), column: values})
    write_table(Publisher(context.check_alive), job.outputs[kind], kind, table, job.provenance())
    return f"mean log-probability {np.concatenate(values).mean():.3f}"


def estimate_advantages(job: Request, context: Context) -> str:
    """Each reward minus its group's mean, over the group's deviation."""
    rollouts = read_table(job.input("rollouts"), "rollouts").select(["sample_id", "group_id"])
    rewards = read_table(job.input("rewards"), "rewards")
    table = join(rollouts, rewards, ["reward", "scored_ok"])
    reward = np.array([np.nan if r is None else r for r in table["reward"].to_pylist()])
    advantages, is_degenerate = group_advantages(
        reward,
        np.array(table["group_id"].to_pylist()),
        table["scored_ok"].to_numpy(),
        deviation=job.config["algorithm.deviation"],
    )
    columns = {
        "sample_id": table["sample_id"].to_pylist(),
        "group_id": table["group_id"].to_pylist(),
        "reward": table["reward"].to_pylist(),
        "advantage": advantages,
        "is_degenerate": is_degenerate,
    }
    write_table(
        Publisher(context.check_alive),
        job.outputs["advantages"],
        "advantages",
        make_table("advantages", columns),
        job.provenance(),
    )
    groups = len(set(columns["group_id"]))
    without = len({g for g, d in zip(columns["group_id"], is_degenerate, strict=True) if d})
    return f"{groups - without} of {groups} groups with spread"
