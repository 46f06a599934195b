"""Reward models: what each says of the rollouts."""

import json

from rl.artifacts import COMPONENT_PREFIX, Publisher, make_table, read_table, write_table
from rl.context import Context
from rl.memory import memory_of
from rl.rewards.model_scoring import model_scores
from rl.stages.request import Request
from rl.sync import load_base, tokenizer_of


def score_with_models(job: Request, context: Context) -> str:
    """A score of each rollout by each of the models, whose folders are inputs `model.NAME`.

    One model is computed with at a time. A rollout that a model cannot score is recorded with the
    reason.
    """
    rollouts = read_table(job.input("rollouts"), "rollouts")
    prompts = read_table(job.input("prompts"), "prompts")
    columns, failures = {}, [{} for _ in range(rollouts.num_rows)]
    for name in job.config["names"]:
        folder = job.input(f"model.{name}")
        model = load_base(memory_of(context), folder)
        tokenizer = tokenizer_of(memory_of(context), folder)
        with job.computing():
            scores = model_scores(
                *(model.spec, model.parameters, tokenizer, rollouts, prompts),
                *(job.cost["micro_batch_tokens"], context.watched(job.stage)),
            )
        columns[COMPONENT_PREFIX + name] = [score.value for score in scores]
        for reasons, score in zip(failures, scores, strict=True):
            if score.value is None:
                reasons[name] = score.failure
    columns |= {
        "sample_id": rollouts["sample_id"].to_pylist(),
        "failure": [json.dumps(reasons) if reasons else None for reasons in failures],
    }
    table = make_table("model_scores", columns)
    publisher = Publisher(context.check_alive)
    write_table(publisher, job.outputs["model_scores"], "model_scores", table, job.provenance())
    num_failed = sum(bool(reasons) for reasons in failures)
    said = f"{rollouts.num_rows} rollouts by {len(job.config['names'])} reward models"
    return said + (f", {num_failed} not scored" if num_failed else "")
