"""The learner turns one batch of scored rollouts into the next policy version.

1. `pack` lays the rollouts out by groups.
2. `update` divides the batch into updates, each with token weights over all of its tokens.
3. Each update packs its completions into micro-batches under a budget of tokens, all of one shape,
   a group's prompt once in each, and adds up their gradients in place.
4. The optimizer clips the sum and applies it to the trainable parameters, which it overwrites.

`supervised_update` does the same with the likelihood of given completions, and `score_batch`
runs the forward pass alone, for the log-probabilities of a reference or a proximal policy.
`update_values` trains a critic in the same way, and `score_batch` gives its values.
"""

from rl.learner.batch import UpdateBatch, pack, pack_supervised, unpack
from rl.learner.loss import LossConfig, ValueLossConfig
from rl.learner.optimizer import OptimizerConfig, init_optimizer, learning_rate_at, make_optimizer
from rl.learner.scores import score_batch
from rl.learner.update import supervised_update, update, update_values

__all__ = [
    "LossConfig",
    "OptimizerConfig",
    "UpdateBatch",
    "ValueLossConfig",
    "init_optimizer",
    "learning_rate_at",
    "make_optimizer",
    "pack",
    "pack_supervised",
    "score_batch",
    "supervised_update",
    "unpack",
    "update",
    "update_values",
]
