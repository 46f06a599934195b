"""Ours: `update`, one on the whole batch, a group's prompt computed once."""

import jax
from meshdial_model import make_spec
from serving import Repeat, serve
from workload import SHAPES, Batch, make_batch

from rl.learner import LossConfig, OptimizerConfig, UpdateBatch, init_optimizer, pack, update
from rl.models.transformer import init_parameters

OPTIMIZER = OptimizerConfig(
    kind="adamw",
    learning_rate=1e-5,
    schedule="constant",
    warmup_updates=0,
    schedule_updates=0,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    weight_decay=0.01,
    clip_norm=None,
)
LOSS = LossConfig(
    ratio="token",
    clip="ppo",
    clip_low=0.2,
    clip_high=0.2,
    clip_dual=3.0,
    kl_coefficient=0.0,
    kl_estimator="k3",
    entropy_coefficient=None,
    aggregation="token-mean",
    max_tokens=None,
)


def prepare(job: dict) -> tuple[str, Repeat]:
    shape = SHAPES[job["shape"]]
    spec = make_spec(shape)
    trainable = init_parameters(spec.config, 0)
    state = init_optimizer(OPTIMIZER, trainable)
    batch = make_batch(shape, **job["batch"])
    packed = as_update_batch(batch)

    def repeat() -> dict:
        nonlocal trainable, state
        trainable, state, figures = update(
            spec,
            trainable,
            {},
            state,
            packed,
            LOSS,
            OPTIMIZER,
            job["micro_batch_tokens"],
            1,
        )
        jax.block_until_ready((trainable, state))
        return {"tokens": batch.num_trained_tokens, "loss": figures["loss"]}

    return f"jax {jax.__version__}", repeat


def as_update_batch(batch: Batch) -> UpdateBatch:
    prompts, completions, advantages = zip(*batch.rows, strict=True)
    size = len(batch.completions_PG[0])
    return pack(
        group_ids=[row // size for row in range(len(prompts))],
        prompt_tokens=prompts,
        completion_tokens=completions,
        advantages=[[a] * len(tokens) for a, tokens in zip(advantages, completions, strict=True)],
        rollout_logprobs=[[0.0] * len(completion) for completion in completions],
        temperature=1.0,
    )


if __name__ == "__main__":
    serve(prepare)
