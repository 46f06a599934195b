"""tunix's GRPOLearner: all rows in one batch, no KL, one optimizer step an iteration.

An iteration lasts from one batch of prompts being asked for to the next, so all that the learner
does is in it.
"""

import jax
import numpy as np
import tunix
from flax import nnx
from serving import Repeat, serve
from tunix_cluster import make_learner
from tunix_model import Numbers
from turnstile import Turnstile
from workload import SHAPES, make_requests, reward_of


def prepare(job: dict) -> tuple[str, Repeat]:
    shape = SHAPES[job["shape"]]
    prompts = make_requests(shape, **job["requests"]).prompts
    texts = np.array([Numbers().decode(prompt) for prompt in prompts])
    size, max_new = job["group_size"], job["max_new"]
    learner = make_learner(shape, len(prompts), size, len(prompts[0]), max_new, reward)
    turnstile = Turnstile()

    def batches():
        while True:
            actor = learner.rl_cluster.actor_trainer.model
            jax.block_until_ready(jax.tree.leaves(nnx.state(actor)))
            turnstile.wait()
            yield {"prompts": texts}

    turnstile.start(lambda: learner.train(batches()))

    def repeat() -> dict:
        turnstile.once()
        return {"tokens": len(prompts) * size * max_new}

    return f"tunix {tunix.__version__}, jax {jax.__version__}", repeat


def reward(prompts: list[str], completions: list[str], **_) -> list[float]:
    return [reward_of(Numbers().encode(text)) for text in completions]


if __name__ == "__main__":
    serve(prepare)
