# Around the jobs of an invocation: one workflow at a time, no silent re-making of the past, and a
# line for each stage in place of the scheduler's own.

import logging

from rl.workflow import take_run_lock

CHATTER = ("job_started", "job_finished", "progress")


def is_worth_showing(record):
    """Each stage says itself when it is done or why it failed, so the scheduler need not."""
    event = str(getattr(record, "event", None))
    if event in ("job_finished", "job_error"):
        tell_from_elsewhere(record, event)
        event = str(record.event)
    text = record.getMessage()
    is_failed_stage = "CalledProcessError" in text and "rl.client" in text
    return (
        event not in CHATTER
        and not text.startswith("Select jobs")
        and not is_failed_stage
    )


def tell_from_elsewhere(record, event):
    """Of a stage that ran as a job of its own, where nobody saw its lines, show them here."""
    if workflow.local_exec or not workflow.is_main_process:
        return
    jobid = record.job_id if event == "job_finished" else record.jobid
    jobs = (job for job in workflow.dag.jobs if workflow.dag.jobid(job) == jobid)
    job = next(jobs, None)
    if job is None or job.is_local:
        return
    log = Path(job.log.text)
    lines = log.read_text().splitlines() if log.exists() else []
    lines = lines or [f"{job.rule.name} {event}; {log} is not to be seen here yet"]
    if event == "job_error":
        lines = [f"{record.rule_name}: {record.rule_msg}", *lines[-1:]]
        lines.append(f"more in {', '.join(record.log)}")
    record.msg, record.event = "\n".join(lines), None


if not workflow.dryrun:
    logging.getLogger("snakemake.logging").addFilter(is_worth_showing)


def iterations_to_restore(name):
    """Finished iterations that would run again only to restore versions that are gone."""
    updates = {}
    for job in workflow.dag.needrun_jobs():
        is_update = job.rule.name.startswith(("update_actor", "update_critic"))
        if is_update and job.wildcards.run == name:
            updates[int(job.wildcards.iteration)] = job
    finished = [n for n in sorted(updates) if Path(updates[n].output.figures).exists()]
    return finished if finished and is_restored(updates[finished[0]]) else []


def is_restored(job):
    """Whether nothing behind the job has changed, so that it would make what it made before."""
    return not any(has_cause_of_its_own(other) for other in [job, *ancestors(job)])


def has_cause_of_its_own(job):
    reason = workflow.dag.reason(job)
    versions = {job.output.get(name) for name in ("policy", "critic", "weights")}
    return bool(
        reason.is_provenance_triggered()
        or reason.forced
        or reason.updated_input
        or reason.incomplete_output
        or set(reason.missing_output) - versions
    )


def ancestors(job):
    """The jobs behind `job` that are going to run."""
    found, ahead = set(), [job]
    while ahead:
        behind = workflow.dag.dependencies[ahead.pop()]
        new = {other for other in behind if workflow.dag.needrun(other)} - found
        found |= new
        ahead += new
    return found


def check_restoration():
    for name, run in RUNS.items():
        restored = iterations_to_restore(name)
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
