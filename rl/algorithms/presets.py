"""Published algorithms as the parts that they are made of, and which parts fit together.

A preset fills in the keys of a config that are not written. Its numbers are the paper's where the
paper gives them. Where a paper has a KL penalty its coefficient is left to the schema's default,
since it is tuned for each task; where it has none, the coefficient is 0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Where the algorithm is from, and its settings by dotted config key."""

    paper: str
    settings: Mapping[str, Any]


def _preset(paper, advantage, ratio, clip, aggregation, kl, more=()) -> Preset:
    kind, low, high = clip
    place, estimator, has_kl = kl
    settings = {
        **{f"algorithm.advantage.{key}": value for key, value in advantage.items()},
        "algorithm.ratio": ratio,
        "algorithm.clip.kind": kind,
        "algorithm.clip.low": low,
        "algorithm.clip.high": high,
        "algorithm.aggregation": aggregation,
        "algorithm.kl.place": place,
        "algorithm.kl.estimator": estimator,
    }
    return Preset(
        paper, settings | ({} if has_kl else {"algorithm.kl.coefficient": 0.0}) | dict(more)
    )


_PPO = ("ppo", 0.2, 0.2)
# Bounds that nothing reads, but for a user who writes another kind.
_UNCLIPPED = ("none", 0.2, 0.2)
_KL_LOSS, _KL_REWARD, _NO_KL = ("loss", "k3", True), ("reward", "k1", True), ("loss", "k3", False)
_ZSCORE = {"estimator": "group_zscore"}
_GAE = {"estimator": "gae", "gamma": 1.0, "lambda": 0.95, "whiten": True}
_BY_SEQUENCE, _BY_SUM = "sequence-mean-token-mean", "sequence-mean-token-sum-norm"

PRESETS: dict[str, Preset] = {
    # name: paper, advantage, ratio, (clip, low, high), aggregation, KL
    "grpo": _preset(
        "Shao et al. 2024, DeepSeekMath, arXiv:2402.03300",
        *(_ZSCORE, "token", _PPO, _BY_SEQUENCE, _KL_LOSS),
    ),
    "dr_grpo": _preset(
        "Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783",
        *({"estimator": "group_mean"}, "token", _PPO, _BY_SUM, _NO_KL),
    ),
    # Its overlong shaping is in tokens: set algorithm.overlong.buffer_tokens (a fifth of max_tokens
    # in the paper).
    "dapo": _preset(
        "Yu et al. 2025, DAPO, arXiv:2503.14476",
        *(_ZSCORE, "token", ("ppo", 0.2, 0.28), "token-mean", _NO_KL),
        {"rollout.oversampling": 3.0},
    ),
    "gspo": _preset(
        "Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071",
        *(_ZSCORE, "sequence", ("ppo", 3e-4, 4e-4), _BY_SEQUENCE, _NO_KL),
    ),
    # The paper says only that there is no bound below; 5 is what TRL takes from arXiv:2510.13786.
    "cispo": _preset(
        "MiniMax 2025, MiniMax-M1, arXiv:2506.13585",
        *(_ZSCORE, "token", ("cispo", None, 4.0), "token-mean", _NO_KL),
    ),
    "rloo": _preset(
        "Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740",
        *({"estimator": "leave_one_out"}, "token", _UNCLIPPED, _BY_SUM, _KL_REWARD),
    ),
    "reinforce_pp": _preset(
        "Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
        *({"estimator": "global_zscore", "gamma": 1.0}, "token", _PPO, "token-mean", _KL_REWARD),
    ),
    "ppo": _preset(
        "Schulman et al. 2017, arXiv:1707.06347; KL as in Ziegler et al. 2019, arXiv:1909.08593",
        *(_GAE, "token", _PPO, "token-mean", _KL_REWARD),
    ),
}

READ_WITH: dict[str, tuple[str, tuple]] = {
    "algorithm.advantage.deviation": ("algorithm.advantage.estimator", ("group_zscore",)),
    "algorithm.advantage.gamma": ("algorithm.advantage.estimator", ("gae", "global_zscore")),
    "algorithm.advantage.lambda": ("algorithm.advantage.estimator", ("gae",)),
    "algorithm.advantage.whiten": ("algorithm.advantage.estimator", ("gae",)),
    "algorithm.clip.low": ("algorithm.clip.kind", ("ppo", "dual", "cispo")),
    "algorithm.clip.high": ("algorithm.clip.kind", ("ppo", "dual", "cispo")),
    "algorithm.clip.dual": ("algorithm.clip.kind", ("dual",)),
    "algorithm.length_penalty.coefficient": ("algorithm.length_penalty.kind", ("tokens", "group")),
}
"""Key -> the key that it depends on, and the values of that under which it is read."""

_GROUP_ESTIMATORS = ("group_zscore", "group_mean", "leave_one_out")


def combination_errors(config: Mapping) -> Iterator[str]:
    """A sentence for each combination of parts in a complete config that means nothing."""
    algorithm, rollout = config["algorithm"], config["rollout"]
    estimator, clip = algorithm["advantage"]["estimator"], algorithm["clip"]
    says = f"algorithm.advantage.estimator is {estimator}"
    if estimator in _GROUP_ESTIMATORS and rollout["group_size"] < 2:
        yield f"{says}, which compares within a group, and rollout.group_size is 1; take 2 or more"
    if algorithm["ratio"] == "sequence":
        yield from _sequence_errors(config, says)
    if estimator not in _GROUP_ESTIMATORS:
        yield from _groupless_errors(config, says)
    if clip["kind"] == "dual" and clip["dual"] <= 1 + clip["high"]:
        yield (
            f"algorithm.clip.dual is {clip['dual']}, expected more than 1 + algorithm.clip.high = "
            f"{1 + clip['high']}"
        )
    low, high = algorithm["pass_rate"]
    if low > high:
        yield f"algorithm.pass_rate is [{low}, {high}], expected the lower bound first"
    yield from _length_errors(algorithm, rollout)


def _sequence_errors(config: Mapping, says: str) -> Iterator[str]:
    algorithm = config["algorithm"]
    if algorithm["clip"]["kind"] == "cispo":
        yield (
            "algorithm.ratio is sequence and algorithm.clip.kind is cispo, which bounds the ratio "
            "of each token; take ratio token, or another kind"
        )
    if algorithm["advantage"]["estimator"] not in _GROUP_ESTIMATORS:
        yield f"{says}, one for each token, and algorithm.ratio is sequence; take ratio token"
    if config["lag"] > 0 and algorithm["off_policy"]["correction"] == "token":
        yield (
            "algorithm.ratio is sequence and algorithm.off_policy.correction is token; with a lag, "
            "take correction sequence or none"
        )


def _groupless_errors(config: Mapping, says: str) -> Iterator[str]:
    if config["rollout"]["oversampling"] > 1:
        yield (
            f"{says}, which knows no groups, and rollout.oversampling is "
            f"{config['rollout']['oversampling']}, which takes groups with spread; set it to 1"
        )
    if list(config["algorithm"]["pass_rate"]) != [0, 1]:
        yield f"{says}, which knows no groups, and algorithm.pass_rate leaves groups out"


def _length_errors(algorithm: Mapping, rollout: Mapping) -> Iterator[str]:
    if algorithm["length_penalty"]["kind"] == "group" and rollout["group_size"] < 2:
        yield "algorithm.length_penalty.kind is group, and rollout.group_size is 1; take 2 or more"
    buffer = algorithm["overlong"]["buffer_tokens"]
    if buffer > rollout["max_tokens"]:
        yield (
            f"algorithm.overlong.buffer_tokens is {buffer}, expected at most rollout.max_tokens = "
            f"{rollout['max_tokens']}"
        )
