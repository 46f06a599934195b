"""Ours: an iteration of GRPO in one process: generate, reward, advantages, update.

The functions are those of the stages; the stages' files and the workflow around them are left out.
"""

import time

import jax
import numpy as np
from meshdial_model import NoText, make_spec
from meshdial_update import LOSS, OPTIMIZER
from serving import Repeat, serve
from workload import SHAPES, make_requests, reward_of

from rl.algorithms.advantages import group_advantages
from rl.learner import init_optimizer, pack, update
from rl.models.transformer import init_parameters
from rl.rollout.sampler import EngineConfig, generate
from rl.rollout.sampling import SamplingConfig


def prepare(job: dict) -> tuple[str, Repeat]:
    shape = SHAPES[job["shape"]]
    spec = make_spec(shape)
    policy = init_parameters(spec.config, 0)
    state = init_optimizer(OPTIMIZER, policy)
    prompts = make_requests(shape, **job["requests"]).prompts
    sampling = SamplingConfig(max_tokens=job["max_new"])
    engine = EngineConfig(max_rows=job["slots"], backend=job["backend"])
    size, num_tokens = job["group_size"], len(prompts) * job["group_size"] * job["max_new"]
    group_ids = [p for p in range(len(prompts)) for _ in range(size)]
    iterations = iter(range(10**9))

    def repeat() -> dict:
        nonlocal policy, state
        keys = (0, next(iterations), range(len(prompts)))
        began = time.process_time()
        groups = generate(spec, policy, {}, NoText(), prompts, keys, size, sampling, engine)
        rollout_seconds = time.process_time() - began
        samples = [completion for group in groups for completion in group]
        rewards = [reward_of(completion.tokens.tolist()) for completion in samples]
        advantages, _ = group_advantages(rewards, group_ids, [True] * len(samples))
        batch = pack(
            group_ids=group_ids,
            prompt_tokens=[prompts[p] for p in group_ids],
            completion_tokens=[completion.tokens for completion in samples],
            advantages=[
                np.full(len(completion.tokens), advantage)
                for completion, advantage in zip(samples, advantages, strict=True)
            ],
            rollout_logprobs=[completion.logprobs for completion in samples],
            temperature=1.0,
            max_tokens=job["max_new"],
        )
        micro = job["micro_batch_tokens"]
        policy, state, figures = update(spec, policy, {}, state, batch, LOSS, OPTIMIZER, micro, 1)
        jax.block_until_ready((policy, state))
        assert figures["num_tokens"] == num_tokens
        return {
            "tokens": num_tokens,
            "rollout_cpu_seconds": rollout_seconds,
            "drift": figures["logprob_drift_max"],
        }

    return f"jax {jax.__version__}", repeat


if __name__ == "__main__":
    serve(prepare)
