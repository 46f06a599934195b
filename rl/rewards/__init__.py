"""Rewards of completions: built-in functions, and the user's own as `module:function`.

A user's function names the arguments that it wants among `completion, ground_truth, prompt, info`
(a dict) and the other columns of a rollout, and returns a float; its module is looked for in the
working directory first. It runs in processes that are ended when a call takes too long, and what it
prints is thrown away; what one call leaves behind another may or may not find. A function that
fails costs that one sample: its reward is then missing, never 0.
"""

from rl.rewards.built_in import BUILT_INS
from rl.rewards.functions import scorer_hash
from rl.rewards.processes import Score
from rl.rewards.scoring import score

__all__ = ["BUILT_INS", "Score", "score", "scorer_hash"]
