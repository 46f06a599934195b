"""The update that turns policy n-1 into policy n, and the gate behind it."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from rl.algorithms.off_policy import off_policy_weights
from rl.artifacts import (
    MANIFEST,
    Publisher,
    artifact_id,
    join,
    read_json,
    read_table,
    table_provenance,
    write_json,
)
from rl.context import Context
from rl.errors import MeshdialError
from rl.learner import LossConfig, OptimizerConfig, UpdateBatch, update
from rl.memory import memory_of
from rl.schedule import behaviour_version
from rl.stages.policy import publish_policy
from rl.stages.request import Request
from rl.stages.tokens import lists, update_batch
from rl.sync import load_policy


def update_actor(job: Request, context: Context) -> str:
    """Policy n from policy n-1 and one batch of scored rollouts."""
    config = job.config
    rollouts = read_table(job.input("rollouts"), "rollouts")
    temperature, max_tokens = config["rollout.temperature"], config["rollout.max_tokens"]
    batch = update_batch(rollouts, temperature, max_tokens, _columns(job))
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
            _optimizer_config(config["optimizer"]),
            job.cost["micro_batch_tokens"],
            config["learner.updates_per_batch"],
            progress=watched(context, job.stage),
            remat="layer" if job.cost["remat"] else "none",
        )
    job.costs_found |= _device_peak()
    figures |= off_policy_figures
    if rollouts["policy_version"][0].as_py() < policy.version:
        figures = {_STALE.get(name, name): value for name, value in figures.items()}
    kind, version = config["optimizer"]["name"], policy.version + 1
    publish_policy(job, context, trainable, state, kind, version, policy.content_id)
    write_json(Publisher(context.check_alive), job.outputs["figures"], figures)
    names = ["loss", "kl", "entropy", "gradient_norm"]
    return ", ".join(f"{n.replace('_', ' ')} {figures[n]:.4g}" for n in names if n in figures)


def _device_peak() -> dict[str, int]:
    """What the fullest device of this process has held at most, where devices count it."""
    facts = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(fact.get("peak_bytes_in_use", 0) for fact in facts)
    return {"device_peak_memory_bytes": peak} if peak else {}


def watched(context: Context, stage: str) -> Callable[[str], None]:
    """Progress of work that also stops when nobody waits for it any more."""
    say = context.occasionally(stage)

    def tell(line: str) -> None:
        context.check_alive()
        say(line)

    return tell


def _columns(job: Request) -> dict:
    """The columns of other tables that the update needs, by the argument they become."""
    columns = {"advantages": (read_table(job.input("advantages"), "advantages"), "advantage")}
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
    kl = config["algorithm.kl"]
    return LossConfig(
        clip_low=config["algorithm.clip_low"],
        clip_high=config["algorithm.clip_high"],
        kl_coefficient=kl["coefficient"],
        kl_estimator=kl["estimator"],
        entropy_coefficient=None,
        aggregation=config["algorithm.aggregation"],
        max_tokens=config["rollout.max_tokens"],
    )


def _optimizer_config(block) -> OptimizerConfig:
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


def check_iteration(job: Request, context: Context) -> str:
    """Fail the iteration before its weights leave it, if anything in it is not as it must be."""
    figures = read_json(job.input("figures"))
    rollouts = read_table(job.input("rollouts"), "rollouts")
    behaviour = behaviour_version(job.config["lag"], job.iteration)
    rewards = read_table(job.input("rewards"), "rewards")
    advantages = read_table(job.input("advantages"), "advantages")
    _check_figures(job, figures)
    _check_drifts(job, figures, behaviour)
    _check_version(job, rollouts, behaviour)
    _check_rollouts(job, rollouts)
    _check_scores(job, join(rollouts.select(["sample_id"]), rewards, ["scored_ok", "failure"]))
    join(rollouts.select(["sample_id"]), advantages, ["advantage"])
    _check_finite(job, "advantages", "advantage", advantages["advantage"].to_numpy())
    for name in ("reference", "policy_logprobs"):
        if name in job.inputs:
            _check_logprobs(job, name, rollouts)
    _check_provenance(job)
    version = read_json(job.input("policy") / MANIFEST)["version"]
    if version != job.iteration:
        raise MeshdialError(
            f"{job.input('policy')} holds policy version {version}, expected {job.iteration}"
        )
    found = {
        "iteration": job.iteration,
        **{name: figures[name] for name in _DIFFERENCES if name in figures},
        "num_rollouts": rollouts.num_rows,
        "inputs": job.provenance()["inputs"],
    }
    write_json(Publisher(context.check_alive), job.outputs["checks"], found)
    differences = [f"{said} {figures[n]:.1e}" for n, said in _DIFFERENCES.items() if n in figures]
    return ", ".join(["passed", *differences])


_DIFFERENCES = {"logprob_drift_mean": "drift", "logprob_staleness_mean": "staleness"}


def _check_figures(job: Request, figures: dict) -> None:
    for name, value in figures.items():
        if not math.isfinite(value):
            raise MeshdialError(
                f"{job.input('figures')}: {name} is {value}, expected a finite number"
            )


def _check_drifts(job: Request, figures: dict, behaviour: int) -> None:
    """What is said twice of one policy agrees: by rollout and trainer, where it is the policy that
    the update starts from, and by `policy_logprobs` and the update."""
    meanings = {"anchor_drift_mean": "policy_logprobs is not of the policy that the update starts"}
    if behaviour == job.iteration - 1:
        meanings["logprob_drift_mean"] = "rollout and trainer disagree on the policy"
    for name, meaning in meanings.items():
        drift, bound = figures.get(name, 0.0), job.cost["max_logprob_drift"]
        if drift > bound:
            raise MeshdialError(
                f"{job.input('figures')}: {name} is {drift:.2g}, above checks.max_logprob_drift = "
                f"{bound:g}: {meaning}"
            )


def _check_version(job: Request, rollouts, expected: int) -> None:
    versions = sorted(set(rollouts["policy_version"].to_pylist()))
    if versions != [expected]:
        raise MeshdialError(
            f"{job.input('rollouts')}: policy_version is {', '.join(map(str, versions))}, expected "
            f"{expected} in iteration {job.iteration} with lag: {job.config['lag']}"
        )


def _check_provenance(job: Request) -> None:
    """The tables and the policy of this iteration were made from one another."""
    scored = [(name, "rollouts") for name in ("reference", "policy_logprobs") if name in job.inputs]
    for made, source in (("rewards", "rollouts"), ("advantages", "rewards"), *scored):
        stated = table_provenance(job.input(made))["inputs"].get(source)
        _check_origin(job, job.input(made), source, stated)
    updated = read_json(job.input("policy") / MANIFEST)["inputs"]
    for source in ("rollouts", "advantages", "reference", "policy_logprobs"):
        if source in job.inputs:
            _check_origin(job, job.input("policy"), source, updated.get(source))
    if "policy_logprobs" in job.inputs:
        stated = table_provenance(job.input("policy_logprobs"))["inputs"].get("policy")
        if stated != updated.get("policy"):
            raise MeshdialError(
                f"{job.input('policy_logprobs')} was made from policy with the content id {stated},"
                f" but the update from {updated.get('policy')}; delete what does not belong here"
            )


def _check_origin(job: Request, made: Path, source: str, stated: str | None) -> None:
    found = artifact_id(job.input(source))
    if stated != found:
        raise MeshdialError(
            f"{made} was made from {source} with the content id {stated}, but "
            f"{job.input(source)} has {found}; delete the one that does not belong here"
        )


def _check_rollouts(job: Request, rollouts) -> None:
    """One mask bit and one log-probability a token, and the token that ends it trained on."""
    path = job.input("rollouts")
    columns = [
        lists(rollouts, c) for c in ("completion_tokens", "completion_mask", "rollout_logprobs")
    ]
    for row, (tokens, mask, logprobs) in enumerate(zip(*columns, strict=True)):
        if not len(tokens) == len(mask) == len(logprobs):
            raise MeshdialError(
                f"{path}: row {row} has {len(tokens)} completion_tokens, {len(mask)} in "
                f"completion_mask and {len(logprobs)} rollout_logprobs, expected one each"
            )
        if not mask[-1:].all() or not mask.any():
            raise MeshdialError(
                f"{path}: completion_mask of row {row} drops the token that ends it"
            )
    _check_finite(job, "rollouts", "rollout_logprobs", np.concatenate(columns[2]))


def _check_scores(job: Request, scores) -> None:
    failed = 1 - scores["scored_ok"].to_numpy().mean()
    if failed > job.cost["max_unscored"]:
        raise MeshdialError(
            f"{job.input('rewards')}: {failed:.0%} of the completions could not be scored, above "
            f"checks.max_unscored = {job.cost['max_unscored']:g}; the first failure: "
            f"{next(reason for reason in scores['failure'].to_pylist() if reason)}"
        )


def _check_logprobs(job: Request, name: str, rollouts) -> None:
    table = read_table(job.input(name), name)
    column = f"{name}_logprobs" if name == "reference" else name
    join(rollouts.select(["sample_id"]), table, [column])
    _check_finite(job, name, column, np.concatenate(lists(table, column)))


def _check_finite(job: Request, name: str, column: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise MeshdialError(f"{job.input(name)}: {column} has a value that is not finite")
