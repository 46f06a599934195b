"""The gate behind an iteration: no weights leave one in which anything is not as it must be."""

import math
from pathlib import Path

import numpy as np

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
from rl.schedule import behaviour_version
from rl.stages.request import Request
from rl.stages.tokens import lists


def check_iteration(job: Request, context: Context) -> str:
    """Fail the iteration before its weights leave it, if anything in it is not as it must be."""
    figures = read_json(job.input("figures"))
    rollouts = read_table(job.input("rollouts"), "rollouts")
    behaviour = behaviour_version(job.config["lag"], job.iteration)
    rewards = read_table(job.input("rewards"), "rewards")
    _check_figures(job, "figures")
    _check_drifts(job, figures, behaviour)
    _check_version(job, rollouts, behaviour)
    _check_rollouts(job, rollouts)
    _check_scores(job, join(rollouts.select(["sample_id"]), rewards, ["scored_ok", "failure"]))
    for name, column in _TOKEN_COLUMNS.items():
        if name in job.inputs:
            _check_tokens(job, name, column, rollouts)
    _check_provenance(job)
    _check_trained(job, "policy")
    if "critic" in job.inputs:
        _check_figures(job, "critic_figures")
        _check_trained(job, "critic")
    found = {
        "iteration": job.iteration,
        **{name: figures[name] for name in _DIFFERENCES if name in figures},
        "num_rollouts": rollouts.num_rows,
        "inputs": job.provenance()["inputs"],
    }
    write_json(Publisher(context.check_alive), job.outputs["checks"], found)
    differences = [f"{said} {figures[n]:.1e}" for n, said in _DIFFERENCES.items() if n in figures]
    return ", ".join(["passed", *differences])


_TOKEN_COLUMNS = {
    "advantages": "advantages",
    "reference": "reference_logprobs",
    "policy_logprobs": "policy_logprobs",
    "values": "values",
}
_DIFFERENCES = {"logprob_drift_mean": "drift", "logprob_staleness_mean": "staleness"}


def _check_figures(job: Request, name: str) -> None:
    for figure, value in read_json(job.input(name)).items():
        if not math.isfinite(value):
            raise MeshdialError(f"{job.input(name)}: {figure} is {value}, expected a finite number")


def _check_trained(job: Request, kind: str) -> None:
    version = read_json(job.input(kind) / MANIFEST)["version"]
    if version != job.iteration:
        raise MeshdialError(
            f"{job.input(kind)} holds {kind} version {version}, expected {job.iteration}"
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


# What each table was made from, and each checkpoint, as far as this iteration made it too.
_SOURCES = {
    "model_scores": ("rollouts",),
    "rewards": ("rollouts", "model_scores"),
    "reference": ("rollouts",),
    "policy_logprobs": ("rollouts",),
    "values": ("rollouts",),
    "advantages": ("rollouts", "rewards", "values", "reference", "policy_logprobs"),
    "policy": ("rollouts", "advantages", "reference", "policy_logprobs"),
    "critic": ("rollouts", "advantages", "values"),
}


def _check_provenance(job: Request) -> None:
    """The tables and the checkpoints of this iteration were made from one another."""
    for made, sources in _SOURCES.items():
        if made not in job.inputs:
            continue
        stated = _stated_inputs(job, made)
        for source in sources:
            # Log-probabilities have a part in advantages only where the reward has a KL.
            is_part = source in stated or source not in _TOKEN_COLUMNS
            if source in job.inputs and is_part:
                _check_origin(job, job.input(made), source, stated.get(source))
    for table, trained in (("policy_logprobs", "policy"), ("values", "critic")):
        if table not in job.inputs:
            continue
        before, updated = (_stated_inputs(job, name).get(trained) for name in (table, trained))
        if before != updated:
            raise MeshdialError(
                f"{job.input(table)} was made from {trained} with the content id {before}, but the "
                f"update from {updated}; delete what does not belong here"
            )


def _stated_inputs(job: Request, name: str) -> dict:
    path = job.input(name)
    stated = read_json(path / MANIFEST) if path.is_dir() else table_provenance(path)
    return stated["inputs"]


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


def _check_tokens(job: Request, name: str, column: str, rollouts) -> None:
    table = read_table(job.input(name), name)
    join(rollouts.select(["sample_id"]), table, [column])
    _check_finite(job, name, column, np.concatenate(lists(table, column)))


def _check_finite(job: Request, name: str, column: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise MeshdialError(f"{job.input(name)}: {column} has a value that is not finite")
