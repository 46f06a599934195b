"""The SLURM profile fits the rules; what it does on a cluster is tested in tests/slurm."""

import re

import pytest
import yaml

from .conftest import ROOT

PROFILE = yaml.safe_load((ROOT / "profiles" / "slurm" / "config.yaml").read_text())
DEFAULT = yaml.safe_load((ROOT / "profiles" / "default" / "config.yaml").read_text())


def rules() -> dict[str, str]:
    """The text of every rule by its name."""
    found = {}
    for path in (ROOT / "workflow" / "rules").glob("*.smk"):
        parts = re.split(r"^(?:use rule \w+ as|rule) (\w+)", path.read_text(), flags=re.M)[1:]
        found |= dict(zip(parts[::2], parts[1::2], strict=True))
    return found


def test_each_rule_is_local_or_has_a_pool():
    local = {name for name, text in rules().items() if "localrule: True" in text}
    assert {"sync_weights", "sync_weights_kept", "score_rewards"} <= local
    assert set(PROFILE["set-resources"]) == set(rules()) - local


def test_a_rule_takes_the_pool_of_the_role_that_it_runs_for():
    for name, resources in PROFILE["set-resources"].items():
        text = rules()[name.removesuffix("_kept")]
        role = re.search(r'on_mesh\("(\w+)"', text)[1]
        assert resources == PROFILE["pools"][role], name


@pytest.mark.parametrize("key", ["rerun-triggers", "rerun-incomplete", "scheduler", "nolock"])
def test_what_does_not_concern_slurm_is_as_by_default(key):
    assert PROFILE[key] == DEFAULT[key]
