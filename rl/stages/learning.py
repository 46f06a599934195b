"""The update that turns policy n-1 into policy n."""

from dataclasses import replace

import jax
import pyarrow as pa

from rl.algorithms.off_policy import off_policy_weights
from rl.artifacts import Publisher, read_table, write_json
from rl.context import Context
from rl.learner import LossConfig, OptimizerConfig, UpdateBatch, update
from rl.memory import memory_of
from rl.stages.policy import publish_trained
from rl.stages.request import Request
from rl.stages.tokens import update_batch
from rl.sync import load_policy


def update_actor(job: Request, context: Context) -> str:
    """Policy n from policy n-1 and one batch of scored rollouts."""
    config = job.config
    rollouts = read_table(job.input("rollouts"), "rollouts")
    advantages = read_table(job.input("advantages"), "advantages")
    temperature, max_tokens = config["rollout.temperature"], config["rollout.max_tokens"]
    columns = _columns(job, advantages)
    batch = update_batch(rollouts, temperature, max_tokens, columns, advantages)
    batch, off_policy_figures = _corrected(batch, config)
    policy = load_policy(job, memory_of(context), job.iteration - 1, is_taken=True)
    with job.computing():
        trainable, state, figures = update(
            policy.spec,
            policy.trainable,
            policy.frozen,
            policy.optimizer_state,
            batch,
            _loss_config(config),
            optimizer_config(config["optimizer"]),
            job.cost["micro_batch_tokens"],
            config["learner.updates_per_batch"],
            progress=context.watched(job.stage),
            remat="layer" if job.cost["remat"] else "none",
            epochs=config["learner.epochs"],
            is_applied=not _is_warmup(job),
        )
    job.costs_found |= device_peak()
    figures |= off_policy_figures
    if rollouts["policy_version"][0].as_py() < policy.version:
        figures = {_STALE.get(name, name): value for name, value in figures.items()}
    kind, version = config["optimizer"]["name"], policy.version + 1
    publish_trained(job, context, trainable, state, kind, version, policy.content_id)
    write_json(Publisher(context.check_alive), job.outputs["figures"], figures)
    names = ["loss", "kl", "entropy", "gradient_norm"]
    said = [f"{n.replace('_', ' ')} {figures[n]:.4g}" for n in names if n in figures]
    return ", ".join([*(["not applied, the critic warms up"] * _is_warmup(job)), *said])


def _is_warmup(job: Request) -> bool:
    """Whether the policy waits for its critic to learn what to expect."""
    return job.iteration <= job.config["warmup_iterations"]


def device_peak() -> dict[str, int]:
    """What the fullest device of this process has held at most, where devices count it."""
    facts = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(fact.get("peak_bytes_in_use", 0) for fact in facts)
    return {"device_peak_memory_bytes": peak} if peak else {}


def _columns(job: Request, advantages: pa.Table) -> dict:
    """The columns of other tables that the update needs, by the argument they become."""
    columns = {"advantages": (advantages, "advantages")}
    if "reference" in job.inputs:
        table = read_table(job.input("reference"), "reference")
        columns["reference_logprobs"] = (table, "reference_logprobs")
    if "policy_logprobs" in job.inputs:
        table = read_table(job.input("policy_logprobs"), "policy_logprobs")
        columns["proximal_logprobs"] = (table, "policy_logprobs")
    return columns


# What separates an older policy from the trainer's is no disagreement about one and the same.
_STALE = {f"logprob_drift_{of}": f"logprob_staleness_{of}" for of in ("mean", "max")}


def _corrected(batch: UpdateBatch, config) -> tuple[UpdateBatch, dict[str, float]]:
    """The batch with its off-policy weights, and their figures; as it is where no lag is wanted.

    With a lag the first iteration's rollouts, which are of the proximal policy, get weights too,
    all 1 but for rounding: one compiled program then serves the whole run.
    """
    correction = config["algorithm.off_policy"]
    if config["lag"] == 0 or correction["correction"] == "none":
        return batch, {}
    found = off_policy_weights(
        batch.proximal_logprobs_PGT,
        batch.rollout_logprobs_PGT,
        batch.trained_mask(),
        correction["correction"],
        correction["cap"],
    )
    figures = {
        "off_policy_ess": found.effective_share,
        "off_policy_truncated": found.truncated_share,
        "off_policy_ratio_mean": found.ratio_mean,
    }
    return replace(batch, off_policy_weights_PGT=found.weights), figures


def _loss_config(config) -> LossConfig:
    kl, clip = config["algorithm.kl"], config["algorithm.clip"]
    return LossConfig(
        ratio=config["algorithm.ratio"],
        clip=clip["kind"],
        clip_low=clip["low"],
        clip_high=clip["high"],
        clip_dual=clip["dual"],
        # In the reward, the penalty has done its part: its value is reported alone.
        kl_coefficient=kl["coefficient"] if kl["place"] == "loss" else 0.0,
        kl_estimator=kl["estimator"],
        entropy_coefficient=config["algorithm.entropy_coefficient"],
        aggregation=config["algorithm.aggregation"],
        max_tokens=config["rollout.max_tokens"],
    )


def optimizer_config(block) -> OptimizerConfig:
    return OptimizerConfig(
        kind=block["name"],
        learning_rate=block["learning_rate"],
        schedule=block["schedule"],
        warmup_updates=block["warmup"],
        schedule_updates=block["horizon"] or 0,
        beta1=block["betas"][0],
        beta2=block["betas"][1],
        epsilon=block["eps"],
        weight_decay=block["weight_decay"],
        clip_norm=block["clip_norm"],
    )
