"""A preset is its parts, written out, and parts that do not fit are refused by name."""

import pytest

from rl.algorithms.presets import PRESETS, READ_WITH
from rl.config import complete, leaves, schema
from rl.conflicts import lookup
from rl.errors import MeshdialError


def config(**blocks):
    return complete({"run": "a", **blocks})


def nested(settings):
    tree: dict = {}
    for dotted, value in settings.items():
        *blocks, key = dotted.split(".")
        place = tree
        for block in blocks:
            place = place.setdefault(block, {})
        place[key] = value
    return tree


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_equals_its_parts_written_out(name):
    chosen = config(algorithm={"preset": name})
    parts = nested(PRESETS[name].settings)
    if name == "rloo":  # nothing reads the bounds of no clipping, so that none may be written
        parts["algorithm"]["clip"] = {"kind": "none"}
    written = complete({"run": "a", **parts})
    chosen["algorithm"].pop("preset")
    written["algorithm"].pop("preset")
    assert written == chosen


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_keys_that_there_are(name):
    known = dict(leaves(config()))
    assert set(PRESETS[name].settings) | set(READ_WITH) <= set(known)
    assert "arXiv:" in PRESETS[name].paper


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_writes_out_all_its_parts(name):
    settings = PRESETS[name].settings
    parts = {"advantage.estimator", "ratio", "clip.kind", "clip.low", "clip.high", "aggregation"}
    parts |= {"kl.place", "kl.estimator"}
    assert {f"algorithm.{part}" for part in parts} <= set(settings)
    has_no_kl = {"dr_grpo", "dapo", "gspo", "cispo"}
    assert (settings.get("algorithm.kl.coefficient") == 0) is (name in has_no_kl)


def test_another_kind_of_clipping_has_bounds_where_the_presets_own_has_none():
    chosen = config(algorithm={"preset": "rloo", "clip": {"kind": "ppo"}})["algorithm"]["clip"]
    assert (chosen["low"], chosen["high"]) == (0.2, 0.2)


def test_the_schema_knows_the_presets_and_defaults_to_one_that_changes_nothing():
    block = schema()["properties"]["algorithm"]["properties"]
    assert block["preset"]["enum"] == list(PRESETS)
    plain = dict(leaves(config()))
    for key, value in PRESETS[block["preset"]["default"]].settings.items():
        rules = schema()
        for part in key.split("."):
            rules = rules["properties"][part]
        assert rules["default"] == value == plain[key]


def test_a_written_key_wins_over_the_preset():
    chosen = config(
        algorithm={"preset": "dapo", "clip": {"high": 0.5}}, rollout={"oversampling": 2}
    )
    assert lookup(chosen, "algorithm.clip.high") == 0.5
    assert lookup(chosen, "algorithm.clip.low") == 0.2
    assert lookup(chosen, "rollout.oversampling") == 2
    assert lookup(chosen, "algorithm.aggregation") == "token-mean"


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"algorithm": {"clip": {"dual": 4}}}, "clip.dual is 4, which is read only where"),
        ({"algorithm": {"advantage": {"lambda": 0.9}}}, "lambda is 0.9, which is read only where"),
        (
            {"algorithm": {"preset": "rloo", "clip": {"high": 0.3}}},
            "clip.high is 0.3, which is read only where",
        ),
        ({"rollout": {"group_size": 1}}, "group_zscore, which compares within a group"),
        (
            {"algorithm": {"preset": "gspo", "clip": {"kind": "cispo"}}},
            "ratio is sequence and algorithm.clip.kind is cispo",
        ),
        ({"algorithm": {"preset": "ppo", "ratio": "sequence"}}, "one for each token"),
        ({"algorithm": {"preset": "gspo"}, "lag": 1}, "off_policy.correction is token"),
        (
            {"algorithm": {"preset": "ppo"}, "rollout": {"oversampling": 2}},
            "gae, which knows no groups, and rollout.oversampling is 2",
        ),
        (
            {"algorithm": {"preset": "reinforce_pp", "pass_rate": [0.1, 0.9]}},
            "global_zscore, which knows no groups, and algorithm.pass_rate",
        ),
        (
            {"algorithm": {"clip": {"kind": "dual", "dual": 1.1}}},
            "clip.dual is 1.1, expected more than 1 .* = 1.2",
        ),
        ({"algorithm": {"pass_rate": [0.9, 0.1]}}, "expected the lower bound first"),
        ({"algorithm": {"overlong": {"buffer_tokens": 99}}}, "buffer_tokens is 99, expected at"),
        ({"critic": {"clip": 0.9}}, "critic.clip is 0.9, which is read only where the algorithm"),
        (
            {"algorithm": {"preset": "dapo", "kl": {"place": "reward"}}},
            "kl.place is 'reward', which is read only where algorithm.kl.coefficient is more",
        ),
        (
            {"algorithm": {"preset": "dapo"}, "reference": {"refresh_every": 2}},
            "reference.refresh_every is 2, which is read only where",
        ),
        ({"evaluation": {"pass_at": [4]}}, "pass_at is .4., which is read only where"),
        ({"task": {"pass_rate": [0.8, 0.2]}}, "task.pass_rate is .0.8, 0.2., which is read only"),
        (
            {"evaluation": {"functions": [{"function": "regex", "normalise": "group"}]}},
            "evaluation.functions.0.normalise is group",
        ),
        (
            {"reward": {"functions": [{"function": "exact_match", "weight": 0.5}]}},
            "add up to 0.5 at most, and an answer is right at 1",
        ),
        (
            {
                "reward": {"functions": [{"function": "exact_match", "normalise": "batch"}]},
                "algorithm": {"pass_rate": [0.1, 0.9]},
            },
            "a component of reward is normalised",
        ),
        (
            {
                "algorithm": {
                    "preset": "ppo",
                    "length_penalty": {"kind": "group", "coefficient": 0.1},
                },
                "rollout": {"group_size": 1},
            },
            "length_penalty.kind is group, and rollout.group_size is 1",
        ),
    ],
)
def test_what_means_nothing_is_refused(blocks, message):
    with pytest.raises(MeshdialError, match=message):
        config(**blocks)
