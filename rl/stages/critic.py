"""The critic: version 0, its values of given rollouts, and the update towards their returns."""

import numpy as np
import pyarrow as pa

from rl.artifacts import MANIFEST, Publisher, join, read_json, read_table, write_json
from rl.context import Context
from rl.errors import MeshdialError
from rl.learner import UpdateBatch, ValueLossConfig, init_optimizer, update_values
from rl.memory import memory_of
from rl.models.transformer import VALUE_HEAD, init_lora, init_value_head
from rl.sharding import placed
from rl.stages.learning import device_peak, optimizer_config
from rl.stages.policy import publish_trained
from rl.stages.request import Request
from rl.stages.scoring import write_scores
from rl.stages.tokens import lists, update_batch
from rl.sync import base_facts, first_optimizer, load_base, load_critic


def start_critic(job: Request, context: Context) -> str:
    """Critic version 0: its trunk as it is, or under an adapter that changes nothing yet, with
    the trunk's own value head, or one that says 0 of every state."""
    folder = job.input("trunk")
    config, manifest = base_facts(folder)
    _check_tokenizer(job)
    spec = job.critic_spec(config, manifest["dtype"])
    base = load_base(memory_of(context), folder, is_private=not spec.lora)
    has_head = base.head == "value"
    trainable = placed(init_value_head(spec)) if not has_head else {}
    if spec.lora:
        trainable |= placed(init_lora(spec, job.config["seed"]))
        if has_head:  # a copy, which an update may overwrite
            trainable |= {VALUE_HEAD: base.parameters[VALUE_HEAD].copy()}
    else:
        kept = {n: value for n, value in base.parameters.items() if n != "lm_head.kernel"}
        trainable = kept | trainable
    kind = job.config["critic.optimizer.name"]
    state = placed(init_optimizer(first_optimizer(kind), trainable))
    publish_trained(job, context, trainable, state, kind, 0, None, "critic")
    count = sum(value.size for value in trainable.values())
    return f"{count / 1e6:.2f} M trainable parameters"


def _check_tokenizer(job: Request) -> None:
    """The critic reads the policy's tokens."""
    (critics, policys) = (
        read_json(job.input(name) / MANIFEST)["tokenizer"].get("tokenizer.json")
        for name in ("trunk", "base")
    )
    if critics != policys:
        raise MeshdialError(
            f"{job.input('trunk')}, which the critic starts from, has another tokenizer.json than "
            f"the policy's {job.input('base')}; a critic reads the policy's tokens"
        )


def critic_values(job: Request, context: Context) -> str:
    """What critic n-1 expects of the state before each token."""
    critic = load_critic(job, memory_of(context), job.iteration - 1)
    model = critic.spec, critic.trainable, critic.frozen
    values = write_scores(job, context, "values", "values", *model)
    return f"mean value {np.concatenate(values).mean():.3f}"


def update_critic(job: Request, context: Context) -> str:
    """Critic n from critic n-1 and the returns of one batch."""
    config = job.config
    batch = _batch(job)
    critic = load_critic(job, memory_of(context), job.iteration - 1, is_taken=True)
    with job.computing():
        trainable, state, figures = update_values(
            critic.spec,
            critic.trainable,
            critic.frozen,
            critic.optimizer_state,
            batch,
            ValueLossConfig(config["critic.clip"]),
            optimizer_config(config["critic.optimizer"]),
            job.cost["micro_batch_tokens"],
            config["critic.updates_per_batch"],
            progress=context.watched(job.stage),
            remat="layer" if job.cost["remat"] else "none",
            epochs=config["critic.epochs"],
        )
    job.costs_found |= device_peak()
    kind, version = config["critic.optimizer"]["name"], critic.version + 1
    publish_trained(job, context, trainable, state, kind, version, critic.content_id, "critic")
    write_json(Publisher(context.check_alive), job.outputs["figures"], figures)
    explained = figures["explained_variance"]
    return f"value loss {figures['value_loss']:.4g}, explained variance {explained:.3f}"


def _batch(job: Request) -> UpdateBatch:
    """The groups that are used, with values and returns; a sample without returns, which has no
    reward, is not trained on."""
    rollouts = read_table(job.input("rollouts"), "rollouts")
    advantages = read_table(job.input("advantages"), "advantages")
    values = read_table(job.input("values"), "values")
    returns = join(rollouts.select(["sample_id"]), advantages, ["returns"])["returns"]
    filled, masks = [], []
    for found, mask in zip(returns, lists(rollouts, "completion_mask"), strict=True):
        filled.append(
            found.values.to_numpy() if found.is_valid else np.zeros(len(mask), np.float32)
        )
        masks.append(mask & found.is_valid)
    target = pa.table(
        {"sample_id": rollouts["sample_id"], "returns": pa.array(filled, pa.list_(pa.float32()))}
    )
    place = rollouts.schema.get_field_index("completion_mask")
    rollouts = rollouts.set_column(place, "completion_mask", pa.array(masks))
    tables = {"values": (values, "values"), "returns": (target, "returns")}
    return update_batch(rollouts, 1.0, job.config["rollout.max_tokens"], tables, advantages)
