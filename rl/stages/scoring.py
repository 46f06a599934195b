"""Log-probabilities of given rollouts under the reference and the policy."""

import numpy as np

from rl.artifacts import Publisher, make_table, read_table, write_table
from rl.context import Context
from rl.learner import score_batch, unpack
from rl.memory import memory_of
from rl.models.spec import ModelSpec, Parameters
from rl.schedule import reference_version
from rl.stages.request import Request
from rl.stages.tokens import update_batch
from rl.sync import load_policy, load_reference


def reference_logprobs(job: Request, context: Context) -> str:
    """Under the frozen base, which is the policy without its adapter, or an earlier policy."""
    version = reference_version(job.config["reference.refresh_every"], job.iteration)
    model = load_reference(job, memory_of(context), version)
    values = write_scores(job, context, "reference", "reference_logprobs", *model)
    return f"mean log-probability {np.concatenate(values).mean():.3f}"


def policy_logprobs(job: Request, context: Context) -> str:
    """Under policy n-1, the anchor of the update's ratio."""
    policy = load_policy(job, memory_of(context), job.iteration - 1)
    model = policy.spec, policy.trainable, policy.frozen
    values = write_scores(job, context, "policy_logprobs", "policy_logprobs", *model)
    return f"mean log-probability {np.concatenate(values).mean():.3f}"


def write_scores(
    job: Request,
    context: Context,
    kind: str,
    column: str,
    spec: ModelSpec,
    trainable: Parameters,
    frozen: Parameters,
) -> list[np.ndarray]:
    """Writes the table of this kind, what a model's head says of each token of the rollouts, to
    the output of that name; the same as arrays, one a rollout."""
    rollouts = read_table(job.input("rollouts"), "rollouts")
    # Values have no temperature.
    temperature = job.config.get("rollout.temperature", 1.0)
    batch = update_batch(rollouts, temperature, job.config["rollout.max_tokens"])
    with job.computing():
        scores_PGT = score_batch(
            *(spec, trainable, frozen, batch, job.cost["micro_batch_tokens"]),
            context.watched(job.stage),
        )
    values = unpack(scores_PGT, batch, rollouts["group_id"].to_pylist())
    table = make_table(kind, {"sample_id": rollouts["sample_id"].to_pylist(), column: values})
    write_table(Publisher(context.check_alive), job.outputs[kind], kind, table, job.provenance())
    return values
