"""tunix's colocated cluster and GRPO learner on one device: actor and rollout share weights."""

from collections.abc import Callable

import optax
from tunix import (
    ClusterConfig,
    GRPOConfig,
    GRPOLearner,
    RLCluster,
    RLTrainingConfig,
    Role,
    RolloutConfig,
)
from tunix_model import Numbers, make_mesh, make_model
from workload import Shape


def make_learner(
    shape: Shape,
    num_prompts: int,
    group_size: int,
    prompt_length: int,
    max_new: int,
    reward: Callable[..., list[float]],
) -> GRPOLearner:
    mesh = make_mesh()
    training = RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-5, weight_decay=0.01),
        eval_every_n_steps=10**9,
        max_steps=10**9,
        mini_batch_size=num_prompts,
        train_micro_batch_size=num_prompts,
        rollout_micro_batch_size=num_prompts,
        compute_logps_micro_batch_size=num_prompts,
    )
    rollout = RolloutConfig(
        max_tokens_to_generate=max_new,
        max_prompt_length=prompt_length,
        kv_cache_size=prompt_length + max_new + 1,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        eos_tokens=[-1],
        return_logprobs=True,
    )
    config = ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=training,
        rollout_config=rollout,
    )
    cluster = RLCluster(actor=make_model(shape, mesh), tokenizer=Numbers(), cluster_config=config)
    algorithm = GRPOConfig(
        num_generations=group_size,
        num_iterations=1,
        beta=0.0,
        epsilon=0.2,
        loss_agg_mode="token-mean",
    )
    return GRPOLearner(cluster, algorithm, reward_fns=[reward])
