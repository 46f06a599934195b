import hashlib
import json
import os
import re
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from rl.config import expand as expand_runs
from rl.config import leaves
from rl.config import sweep_name
from rl.errors import MeshdialError
from rl.conflicts import model_name as component_name
from rl.mesh import HOST, ROLES, layout, layouts, pool, process_layout, roles_on_meshes
from rl.mesh import uses_critic
from rl.models.folder import model_files
from rl.report.sinks import check_sink
from rl.processes.runtime import LAUNCHERS
from rl.rewards.functions import module_file, parse_functions
from rl.schedule import (
    are_weights_kept,
    behaviour_version,
    is_anchored,
    is_evaluated,
    is_kept,
    penalises_reward,
    reference_version,
)
from rl.stage_table import stage_config
from rl.tasks import task_files
from rl.workflow import enter_workflow

# Long runs are long chains of jobs, which Snakemake walks recursively.
sys.setrecursionlimit(100_000)
enter_workflow(is_remote=workflow.remote_exec)


def check_files(run):
    """Before anything runs: the user's prompt tables, models and reward modules are there."""
    sources = {f"reward.models.{n}": m for n, m in enumerate(run["reward"]["models"])}
    sources |= {"critic": run["critic"]} if uses_critic(run) else {}
    for key, block in sources.items():
        if block["source"] and not Path(block["source"]).expanduser().is_dir():
            raise MeshdialError(
                f"run {run['run']}: {key}.source is {block['source']!r}, and there is no such folder"
            )
    for path in task_files(run["task"]):
        if not Path(path).is_file():
            raise MeshdialError(f"run {run['run']}: task file {path} is missing")
    for functions in (run["reward"]["functions"], run["evaluation"]["functions"]):
        for function in parse_functions(functions):
            if not function.is_built_in:
                module_file(function.module_and_function[0])


CONFIGFILES = workflow.config_settings.configfiles
try:
    RUNS = expand_runs(
        config,
        (
            Path(CONFIGFILES[-1]).parent
            if CONFIGFILES
            else Path(workflow.basedir, "configs")
        ),
    )
    for run in RUNS.values():
        check_sink(run["metrics"]["sink"])
        check_files(run)
except MeshdialError as error:
    raise WorkflowError(str(error)) from None
RUN_ORDER = list(RUNS)
SWEEP = sweep_name(config)


def shared_stage(name, inputs="", outputs="", costs=""):
    """The command of a stage; the names of its inputs, outputs and costs are those of the rule."""
    return (
        f"python -m rl.client {name} --launcher {{resources.launcher}} --mesh {{resources.mesh}}"
        " --meshes {resources.meshes} --config {params.config:q}"
        + "".join(f" --input {key}={{input.{key}:q}}" for key in inputs.split())
        + "".join(f" --output {key}={{output.{key}:q}}" for key in outputs.split())
        + "".join(f" --cost {key}={{resources.{key}}}" for key in costs.split())
        + " --log {log.text:q} --timings {log.timings:q}"
    )


def stage(name, inputs="", outputs="", costs=""):
    """As `shared_stage`, of one iteration of one run."""
    place = " --run {wildcards.run} --iteration {wildcards.iteration} --last {resources.last}"
    return shared_stage(name, inputs, outputs, costs) + place


def run_of(wildcards):
    """The config of the run that a job belongs to."""
    run = RUNS[wildcards.run]
    if int(getattr(wildcards, "iteration", 0)) > run["iterations"]:
        raise WorkflowError(
            f"run {wildcards.run} has iterations: {run['iterations']}, and "
            f"{wildcards.iteration} is beyond it"
        )
    return run


def slice_of(name):
    """The part of a run's config that the stage `name` reads: what its results depend on."""
    return lambda wildcards: json.dumps(
        stage_config(run_of(wildcards), name), sort_keys=True
    )


# Text, since Snakemake scales a number down in silence to a limit of the same name.
def cost(key, block, choose=run_of):
    """A setting that changes cost alone, so that it is no reason to run a stage again."""
    return lambda wildcards: json.dumps(choose(wildcards)[block][key])


def engine_costs(choose=run_of):
    """What the rollout engine may use."""
    keys = ("max_rows", "page_size", "kv_cache_mb")
    return {key: cost(key, "rollout", choose) for key in keys}


def is_rematerialised(wildcards):
    """Whether the update computes layers again rather than keep them: 0 or 1."""
    return str(int(run_of(wildcards)["learner"]["remat"] == "layer"))


def lag_of(wildcards):
    """For a check alone: which version is sampled with is decided by the input."""
    return str(run_of(wildcards)["lag"])


def last_iteration(wildcards):
    """For the progress line alone, and therefore a resource."""
    return str(run_of(wildcards)["iterations"])


def run_priority(wildcards):
    """The runs of a batch go depth first: an early run is finished before a late one goes on.

    So do the iterations of a run, several of which a lag allows to sample at once.
    """
    return priority_at(wildcards.run, int(getattr(wildcards, "iteration", 0)))


def evaluation_priority(wildcards):
    """Where rollouts have a mesh to themselves, updates wait for them and not for an evaluation:
    it comes behind the rollouts that sample from the same version."""
    run, version = run_of(wildcards), int(wildcards.iteration)
    if len(layouts(run)) == 1:
        return run_priority(wildcards)
    return priority_at(wildcards.run, version + 1 + run["lag"]) - 1


def priority_at(name, iteration):
    return 100_000 * (len(RUNS) - RUN_ORDER.index(name)) - 2 * iteration
