"""PPO through the workflow: the critic's own chain, on the actor's mesh or on one of its own."""

import pytest
import yaml

from rl.artifacts import read_json

from .conftest import TINY, content_ids

SETTINGS = {
    "algorithm": {"preset": "ppo", "kl": {"coefficient": 0.05}},
    "learner": {"epochs": 2, "updates_per_batch": 2},
    "critic": {"warmup_iterations": 1, "optimizer": {"learning_rate": 0.005}},
}
APART = {
    "meshes": {"train": {"devices": 1}, "value": {"devices": 1}},
    "roles": {
        **dict.fromkeys(("actor", "rollout", "reference", "reward"), "train"),
        "critic": "value",
    },
}


def config_of(folder, **settings):
    path = folder / "ppo.yaml"
    values = yaml.safe_load(TINY.read_text()) | SETTINGS | settings
    path.write_text(yaml.safe_dump(values))
    return path


def results(workplace):
    ids = content_ids(workplace.path("tiny"))
    ids |= {
        f"{n:04d}/critic": read_json(workplace.path("tiny", f"{n:04d}", "critic/manifest.json"))[
            "content_id"
        ]
        for n in range(4)
    }
    return ids


@pytest.mark.slow
def test_a_critic_on_a_mesh_of_its_own_changes_the_cost_and_no_result(tmp_path_factory, workplace):
    path = config_of(workplace.folder)
    workplace.run(config=path)
    together = results(workplace)
    for n in (1, 2, 3):
        for name in ("values.parquet", "critic_update.json", "critic"):
            assert workplace.path("tiny", f"{n:04d}", name).exists()
    assert "Nothing to be done" in workplace.run(config=path)
    # One more iteration is only added.
    printed = workplace.run(config=config_of(workplace.folder, iterations=4))
    assert " 4/4 " in printed and " 3/4 " not in printed

    workplace.path("tiny").rename(workplace.path("before"))
    path = config_of(workplace.folder, cluster=APART)
    workplace.run(config=path)
    apart = results(workplace)
    differing = {
        name for name in together if not name.startswith("report") and together[name] != apart[name]
    }
    assert differing <= {"metrics.parquet"}


@pytest.mark.slow
def test_another_value_of_the_critics_clip_leaves_the_first_experience(workplace):
    workplace.run(config=config_of(workplace.folder))
    path = config_of(workplace.folder, critic=SETTINGS["critic"] | {"clip": 0.4})
    printed = workplace.run("-n", config=path)
    jobs = {tuple(line.split()[:1]) for line in printed.splitlines()}
    assert ("update_critic",) in jobs or ("update_critic_kept",) in jobs
    first = [line for line in printed.splitlines() if "0001/values.parquet" in line]
    assert not any("output" in line for line in first)


def test_a_run_of_grpo_has_no_rule_of_a_critic(workplace):
    printed = workplace.run("-n")
    assert "critic" not in printed
    assert "score_with_models" not in printed
    ppo = workplace.run("-n", config=config_of(workplace.folder))
    for rule in ("start_critic", "critic_values", "update_critic"):
        assert rule in ppo


def test_a_critic_without_a_mesh_is_named(workplace):
    roles = {role: mesh for role, mesh in APART["roles"].items() if role != "critic"}
    path = config_of(workplace.folder, cluster=APART | {"roles": roles})
    printed = workplace.run("-n", config=path, expect=1)
    assert "cluster.roles.critic is missing, and the estimator gae has a critic" in printed
