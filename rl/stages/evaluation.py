"""Held-out accuracy of a policy version, or of the base."""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from rl import group
from rl.artifacts import Publisher, read_table, write_table
from rl.context import Context
from rl.memory import memory_of
from rl.models.tokenizer import Tokenizer
from rl.rewards import scorer_hash
from rl.rollout.sampling import SamplingConfig
from rl.stages.completions import ending, sample_completions
from rl.stages.experience import score_rollouts
from rl.stages.request import Request
from rl.sync import rollout_policy, tokenizer_of

SEED = 0


def evaluate_policy(job: Request, context: Context) -> str:
    """One completion of every held-out prompt, and as many samples as the config wants for pass@k,
    and whether each earned the full reward."""
    config = job.config
    policy = rollout_policy(job, memory_of(context), job.iteration)
    tokenizer = tokenizer_of(memory_of(context), job.input("base"))
    prompts = read_table(job.input("prompts"), "prompts")
    prompts = prompts.slice(0, config["evaluation.max_prompts"])
    parts = []
    for is_sampled, size in ((False, 1), (True, config["evaluation.num_samples"])):
        if size:
            # A sample has another seed than the first completion: it may be drawn at the same
            # temperature, and is named after it.
            keys = (SEED + is_sampled, job.iteration, list(range(prompts.num_rows)))
            sampling = evaluation_sampling(config, tokenizer, is_sampled)
            table = sample_completions(
                job, context, policy, tokenizer, prompts, keys, size, sampling
            )
            flags = pa.array([is_sampled] * table.num_rows)
            parts.append(table.append_column("is_sampled", flags))
    table = _scored(pa.concat_tables(parts), config, context)
    write_table(
        Publisher(context.check_alive),
        job.outputs["evaluation"],
        "evaluation",
        table,
        job.provenance(
            tokenizer=tokenizer.content_hash,
            policy=policy.content_id,
            scorer=scorer_hash(config["evaluation.functions"]),
        ),
    )
    table = table.filter(pc.invert(table["is_sampled"]))
    correct = table["is_correct"].to_pylist().count(True)
    return f"held-out accuracy {correct / table.num_rows:.3f} ({correct} of {table.num_rows})"


def evaluation_sampling(
    config: Mapping, tokenizer: Tokenizer, is_sampled: bool = False
) -> SamplingConfig:
    """Evaluation has temperatures of its own. Completions end as the run's do, but for its time
    limit, and top-k, top-p and min-p are off."""
    key = "sample_temperature" if is_sampled else "temperature"
    temperature = float(config[f"evaluation.{key}"])
    return SamplingConfig(temperature=temperature, **ending(config, tokenizer))


def _scored(table: pa.Table, config: Mapping, context: Context) -> pa.Table:
    """The table with its rewards: of a group, the first process alone runs the user's functions."""

    def score() -> dict[str, list]:
        functions = config["evaluation.functions"]
        rewards = score_rollouts(table, functions, SEED, config, context)
        return rewards.select(["reward", "scored_ok"]).to_pydict()

    scored = group.first(score)
    is_correct = [value is not None and value >= 1.0 for value in scored["reward"]]
    table = table.append_column("reward", pa.array(scored["reward"], pa.float64()))
    table = table.append_column("is_correct", pa.array(is_correct, pa.bool_()))
    return table.append_column("scored_ok", pa.array(scored["scored_ok"], pa.bool_()))
