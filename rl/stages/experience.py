"""Experience of one iteration: prompts, rollouts and their rewards."""

import json
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from rl.artifacts import COMPONENT_PREFIX, Publisher, join, read_table, write_table
from rl.conflicts import model_name
from rl.context import Context
from rl.errors import MeshdialError
from rl.memory import memory_of
from rl.models.tokenizer import Tokenizer
from rl.rewards import score, scorer_hash
from rl.rewards.processes import Score
from rl.rollout.sampling import SamplingConfig
from rl.schedule import behaviour_version, num_sampled_prompts
from rl.stages.completions import ending, sample_completions
from rl.stages.request import Request, told_bytes
from rl.sync import rollout_policy, tokenizer_of
from rl.tasks import iteration_window, make_prompts

RANDOM_SCHEME = "threefry: fold_in(seed, iteration, prompt, sample, position)"


def prepare_prompts(job: Request, context: Context) -> str:
    """The task's training and held-out prompts, as tables."""
    train, heldout = make_prompts(job.config["task"])
    publisher, provenance = Publisher(context.check_alive), job.provenance()
    write_table(publisher, job.outputs["train"], "prompts", train, provenance)
    write_table(publisher, job.outputs["heldout"], "prompts", heldout, provenance)
    return f"{train.num_rows} prompts to train on, {heldout.num_rows} held out"


def generate_rollouts(job: Request, context: Context) -> str:
    """A group of completions for each prompt of this iteration's window."""
    config = job.config
    job.input("weights")  # without them it would be the base that is sampled
    version = behaviour_version(int(job.cost["lag"]), job.iteration)
    policy = rollout_policy(job, memory_of(context), version)
    tokenizer = tokenizer_of(memory_of(context), job.input("base"))
    prompts = read_table(job.input("prompts"), "prompts")
    keys = ("prompts_per_iteration", "oversampling")
    size = num_sampled_prompts({key: config[f"rollout.{key}"] for key in keys})
    rows = iteration_window(prompts.num_rows, size, config["seed"], job.iteration)
    window = prompts.take(rows)
    table = sample_completions(
        job,
        context,
        policy,
        tokenizer,
        window,
        (config["seed"], job.iteration, rows),
        config["rollout.group_size"],
        rollout_sampling(config, tokenizer),
    )
    provenance = job.provenance(
        tokenizer=tokenizer.content_hash,
        chat_template=tokenizer.template_hash,
        random_numbers=RANDOM_SCHEME,
        policy=policy.content_id,
    )
    write_table(
        Publisher(context.check_alive), job.outputs["rollouts"], "rollouts", table, provenance
    )
    mean_length = pc.mean(pc.list_value_length(table["completion_tokens"])).as_py()
    outcome, moved = policy.sync["outcome"], told_bytes(policy.sync["bytes_moved"])
    return (
        f"{table.num_rows} rollouts of policy {policy.version} ({outcome}, {moved} moved), mean "
        f"length {mean_length:.1f}"
    )


def rollout_sampling(config: Mapping, tokenizer: Tokenizer) -> SamplingConfig:
    """How the run samples."""
    return SamplingConfig(
        temperature=float(config["rollout.temperature"]),
        top_k=config["rollout.top_k"],
        top_p=config["rollout.top_p"],
        min_p=config["rollout.min_p"],
        time_limit_s=config["rollout.time_limit_s"],
        **ending(config, tokenizer),
    )


def score_rollouts(
    rollouts: pa.Table,
    functions: list,
    seed: int,
    config: Mapping,
    context: Context,
    **models,
) -> pa.Table:
    """The rewards of these rollouts by these functions, within the limits of the config; `models`
    are the arguments of `score` about reward models."""
    limit = config["reward.memory_limit_mb"]
    return score(
        rollouts,
        functions,
        seed,
        config["reward.time_limit_s"],
        memory_limit_bytes=None if limit is None else limit * 2**20,
        check_alive=context.check_alive,
        **models,
    )


def score_rewards(job: Request, context: Context) -> str:
    """A reward for each rollout; a scorer that failed is recorded and is no reward of 0."""
    rollouts = read_table(job.input("rollouts"), "rollouts")
    functions = job.config["reward.functions"]
    models = _model_scores(job, rollouts)
    rewards = score_rollouts(rollouts, functions, job.config["seed"], job.config, context, **models)
    if rewards["sample_id"].to_pylist() != rollouts["sample_id"].to_pylist():
        raise MeshdialError(
            f"{job.input('rollouts')}: the scorer returned other samples than it was given"
        )
    provenance = job.provenance(scorer=scorer_hash(functions, models.get("models", ())))
    write_table(
        Publisher(context.check_alive), job.outputs["rewards"], "rewards", rewards, provenance
    )
    return _told(rewards)


def _model_scores(job: Request, rollouts: pa.Table) -> dict:
    """What the reward models said of these rollouts, as arguments of `score`."""
    models = [model | {"name": model_name(model)} for model in job.config["reward.models"]]
    if not models:
        return {}
    table = read_table(job.input("model_scores"), "model_scores")
    columns = {model["name"]: COMPONENT_PREFIX + model["name"] for model in models}
    table = join(rollouts.select(["sample_id"]), table, ["failure", *columns.values()])
    failures = [json.loads(text) if text else {} for text in table["failure"].to_pylist()]
    return {
        "models": models,
        "model_scores": {
            name: [
                Score(value, failure.get(name))
                for value, failure in zip(table[column].to_pylist(), failures, strict=True)
            ]
            for name, column in columns.items()
        },
    }


def _told(rewards: pa.Table) -> str:
    scored = rewards.filter(rewards["scored_ok"])
    failed = rewards.num_rows - scored.num_rows
    mean = (
        f"mean reward {pc.mean(scored['reward']).as_py():.3f}" if scored.num_rows else "no reward"
    )
    if not failed:
        return mean
    first = next(reason for reason in rewards["failure"].to_pylist() if reason)
    return f"{mean}, {failed} not scored, the first because it {first}"
