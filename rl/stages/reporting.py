"""What a run says of itself when it is done, and how the runs of a sweep compare."""

from pathlib import Path

from rl.artifacts import Publisher, read_table, write_table
from rl.context import Context
from rl.report.comparison import Run, comparison_csv, comparison_rows, comparison_svg, group_runs
from rl.report.figures import write_figures
from rl.report.metrics import collect_metrics, collect_timings
from rl.report.page import comparison_html
from rl.report.sinks import send_to_wandb, write_tensorboard
from rl.report.summary import summary_lines
from rl.report.timeline import collect_spans
from rl.schedule import is_evaluated
from rl.stage_table import STAGES
from rl.stages.request import Request

TABLES = ("rollouts", "rewards", "advantages", "update", "critic_update")


def report_run(job: Request, context: Context) -> str:
    """Metrics, figures and a summary. Inputs are templates of `{iteration}` (and `{stage}`)."""
    tables = _tables(job)
    metrics = collect_metrics(job.run, tables, job.config["evaluation.pass_at"])
    timing_files = _timings(job)
    timings = collect_timings(job.run, timing_files)
    sources = {"metrics": metrics, "timings": timings, "spans": collect_spans(timing_files)}
    publisher = Publisher(context.check_alive)
    figures = {name: path for name, path in job.outputs.items() if name != "metrics"}
    write_figures(publisher, figures, sources)
    inputs = {f"{n:04d}/{name}": path for n in tables for name, path in tables[n].items()}
    write_table(publisher, job.outputs["metrics"], "metrics", metrics, job.provenance(inputs))
    _send(job, publisher, metrics)
    curve = Path(job.shown(job.outputs["learning_curve"]))
    for line in summary_lines(metrics, timings, curve):
        context.progress(line)
    return job.shown(job.outputs["metrics"])


def _iterations(job: Request) -> range:
    return range(1, job.config["iterations"] + 1)


def _tables(job: Request) -> dict[int, dict[str, Path]]:
    every, last = job.config["evaluation.every"], job.config["iterations"]
    names = [name for name in TABLES if name in job.inputs]
    tables = {n: {name: _at(job, name, n) for name in names} for n in _iterations(job)}
    for n in _iterations(job):
        if is_evaluated(every, n, last):
            tables[n]["evaluation"] = _at(job, "evaluation", n)
    if "first_evaluation" in job.inputs:
        tables[0] = {"evaluation": job.input("first_evaluation")}
    return tables


def _timings(job: Request) -> dict[int, dict[str, Path]]:
    return {
        n: {stage: _at(job, "timings", n, stage=stage) for stage in STAGES}
        for n in (0, *_iterations(job))
    }


def _at(job: Request, name: str, iteration: int, **more: str) -> Path:
    template = str(job.input(name))
    return Path(template.format(iteration=f"{iteration:04d}", **more))


def _send(job: Request, publisher: Publisher, metrics) -> None:
    folder = job.outputs["metrics"].parent
    match job.config["metrics"]["sink"]:
        case "tensorboard":
            write_tensorboard(publisher, folder / "tensorboard", metrics)
        case "wandb":
            send_to_wandb(metrics, job.config, folder)


def compare_runs(job: Request, context: Context) -> str:
    """The runs of a sweep side by side; those that differ in their seed alone are pooled."""
    template = str(job.input("metrics"))
    runs = [
        Run(settings, read_table(template.format(run=name), "metrics"))
        for name, settings in job.config["runs"].items()
    ]
    groups = group_runs(runs)
    rows, drawing = comparison_rows(groups), comparison_svg(groups)
    texts = {
        "table": comparison_csv(rows).encode(),
        "curves": drawing,
        "page": comparison_html(rows, drawing, job.config["sweep"]).encode(),
    }
    publisher = Publisher(context.check_alive)
    for name, content in texts.items():
        with publisher.file(job.outputs[name]) as draft:
            draft.write_bytes(content)
    return f"{len(runs)} runs in {len(groups)} settings: {job.shown(job.outputs['page'])}"
