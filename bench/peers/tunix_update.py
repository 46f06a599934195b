"""tunix: `RLCluster.update_actor` with GRPO's loss, on the padded rows."""

import jax
import jax.numpy as jnp
import numpy as np
import tunix
from flax import nnx
from serving import Repeat, serve
from tunix.rl.common import TrainExample
from tunix_cluster import make_learner
from workload import SHAPES, Batch, make_batch


def prepare(job: dict) -> tuple[str, Repeat]:
    shape = SHAPES[job["shape"]]
    batch = make_batch(shape, **job["batch"])
    longest = max(len(completion) for _, completion, _ in batch.rows)
    learner = make_learner(
        shape,
        len(batch.prompts),
        max(len(batch.completions_PG[0]), 2),  # which the loss does not look at
        len(batch.prompts[0]),
        longest,
        reward=lambda **_: [],
    )
    cluster = learner.rl_cluster
    example = padded(batch, longest)

    def repeat() -> dict:
        cluster.update_actor([example], None)
        jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))
        return {"tokens": batch.num_trained_tokens}

    return f"tunix {tunix.__version__}, jax {jax.__version__}", repeat


def padded(batch: Batch, longest: int) -> TrainExample:
    num_rows = len(batch.rows)
    completions_BT = np.full((num_rows, longest), 1, np.int32)
    for row, (_, completion, _) in zip(completions_BT, batch.rows, strict=True):
        row[: len(completion)] = completion
    prompts_BT = np.array([prompt for prompt, *_ in batch.rows], np.int32)
    return TrainExample(
        prompt_ids=jnp.asarray(prompts_BT),
        prompt_mask=jnp.ones(prompts_BT.shape, bool),
        completion_ids=jnp.asarray(completions_BT),
        completion_mask=jnp.asarray(completions_BT != 1),
        advantages=jnp.asarray([advantage for *_, advantage in batch.rows], jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )


if __name__ == "__main__":
    serve(prepare)
