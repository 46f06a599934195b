# Around the jobs of an invocation: one workflow at a time, no silent re-making of the past, and a
# line for each stage in place of the scheduler's own.

import logging

from rl.workflow import take_run_lock

CHATTER = ("job_started", "job_finished", "progress")


def is_worth_showing(record):
    """Each stage says itself when it is done, so the scheduler need not."""
    event = getattr(record, "event", None)
    return str(event) not in CHATTER and not record.getMessage().startswith("Select jobs")


if not workflow.dryrun:
    logging.getLogger("snakemake.logging").addFilter(is_worth_showing)


def iterations_to_restore(name, run):
    """Finished iterations that would run again for no reason but that `keep` let them go."""
    updates = {}
    for job in workflow.dag.needrun_jobs():
        if job.rule.name.startswith("update_actor") and job.wildcards.run == name:
            updates[int(job.wildcards.iteration)] = job
    finished = [n for n in sorted(updates) if Path(updates[n].output.figures).exists()]
    if not finished or not is_restored(updates[finished[0]]):
        return []
    return finished


def is_restored(job):
    """Whether only the checkpoint that `keep` let go is missing: nothing behind it has changed."""
    if (
        Path(job.output.policy).exists()
        or workflow.dag.reason(job).is_provenance_triggered()
    ):
        return False
    if workflow.dag.reason(job).forced:
        return False
    tables = {job.input.rollouts, job.input.advantages, *job.input.reference}
    remade = {
        path
        for other in workflow.dag.dependencies(job)
        if workflow.dag.needrun(other)
        for path in other.output
    }
    return not tables & remade


def check_restoration():
    for name, run in RUNS.items():
        restored = iterations_to_restore(name, run)
        if len(restored) > 1 and not run["allow_remake"]:
            raise WorkflowError(
                f"run {name}: a missing file needs policy versions that were not kept (keep: "
                f"{run['keep']}), so that iterations {restored[0]} to {restored[-1]} would be made "
                "again; allow it with --config allow_remake=true"
            )


onstart:
    try:
        take_run_lock(Path("results"))
    except MeshdialError as error:
        raise WorkflowError(str(error)) from None
    check_restoration()
