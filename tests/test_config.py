import pytest
import yaml

from rl.config import SCHEMA, complete, expand, read, schema
from rl.errors import MeshdialError


def refused(config, *words):
    """`config` is refused with one line that has these words."""
    with pytest.raises(MeshdialError) as caught:
        complete(config)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence, sentence


def test_defaults_are_filled_in_at_every_depth():
    config = complete({"run": "x", "algorithm": {"kl": {"coefficient": 0.5}}})
    assert config["algorithm"]["kl"] == {"place": "loss", "coefficient": 0.5, "estimator": "k3"}
    assert config["rollout"]["group_size"] == 8
    assert config["reward"]["functions"][0] == {
        "function": "exact_match",
        "weight": 1.0,
        "name": None,
        "options": {},
        "normalise": "none",
    }
    assert config["cluster"]["meshes"] == {"all": {"devices": 1, "axes": {}}}


def test_defaults_are_filled_into_a_chosen_branch():
    config = complete({"run": "x", "warm_start": {"updates": 7}})
    assert config["warm_start"]["updates"] == 7
    assert config["warm_start"]["batch_size"] == 64
    assert complete({"run": "x"})["warm_start"] is None


def test_completing_a_complete_config_changes_nothing():
    config = complete({"run": "x"})
    assert complete(config) == config


def test_the_given_config_is_left_alone():
    given = {"run": "x", "rollout": {}}
    complete(given)
    assert given == {"run": "x", "rollout": {}}


def test_every_key_of_the_schema_has_a_default_or_is_required():
    def lacking(rules, path=""):
        for key, rule in rules.get("properties", {}).items():
            if "default" not in rule and key not in rules.get("required", []):
                yield path + key
            yield from lacking(rule, f"{path}{key}.")

    # A warm start and an architecture are there whole or not at all: their keys have defaults too.
    assert list(lacking(schema())) == []
    for rules in schema()["$defs"].values():
        assert list(lacking(rules)) == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["key run is missing"]),
        ({"run": "x", "iteratons": 3}, ["iteratons", "did you mean iterations"]),
        ({"run": "x", "rollout": {"groupsize": 3}}, ["rollout.groupsize", "group_size"]),
        ({"run": "x", "iterations": "many"}, ["iterations is 'many'", "integer"]),
        ({"run": "x", "iterations": True}, ["iterations is True", "integer"]),
        ({"run": "x", "rollout": {"group_size": 1}}, ["rollout.group_size is 1", "take 2 or more"]),
        ({"run": "x", "rollout": {"temperature": 0}}, ["temperature is 0", "more than 0"]),
        ({"run": "shared"}, ["'shared'", "reserved"]),
        ({"run": "Big Run"}, ["'Big Run'", "lower-case"]),
        ({"run": "x", "keep": "some"}, ["keep is 'some'", "all", "last", "integer"]),
        ({"run": "x", "keep": 0}, ["keep is 0", "at least 1"]),
        ({"run": "x", "iterations": 3.0}, ["iterations is 3.0", "integer"]),
        ({"run": "x", "optimizer": {"learning_rate": float("nan")}}, ["learning_rate is nan"]),
        ({"run": "x", "optimizer": {"learning_rate": float("inf")}}, ["learning_rate is inf"]),
        ({"run": "x", "reward": {"functions": []}}, ["reward.functions is empty", "at least one"]),
        ({"run": "x", "lag": -1}, ["lag is -1", "expected at least 0"]),
        ({"run": "x", "cluster": {"meshes": {}}}, ["cluster.meshes is {}", "at least 1 entry"]),
        ({"run": "x", "cluster": {"meshes": {1: {"devices": 1}}}}, ["a mesh called 1", "letters"]),
        ({"run": "x", "cluster": {"meshes": {"a": {"devices": "-2"}}}}, ["devices is -2", "1"]),
        ({"run": "x", "warm_start": {"updates": 0}}, ["warm_start.updates is 0"]),
        ({"run": "x", "warm_start": {"update": 1}}, ["warm_start.update", "updates"]),
        ({"run": "x", "model": {"architecture": {"layer": 1}}}, ["architecture.layer", "layers"]),
        ({"run": "x", "lora": {"targets": ["qproj"]}}, ["targets", "qproj", "q_proj"]),
        ({"run": "x", "optimizer": {"betas": [0.9]}}, ["optimizer.betas", "2"]),
        ({"run": "x", "optimizer": {"clip_norm": 0}}, ["clip_norm is 0", "more than 0"]),
        ({"run": "x", "reward": {"functions": [{"functon": "a"}]}}, ["reward.functions.0"]),
        ("addition", ["expected object"]),
        ({"run": "x", "rollout": {"page_size": 12}}, ["page_size is 12", "a multiple of 8"]),
        ({"run": "x", "rollout": {"kv_cache_mb": 0}}, ["kv_cache_mb is 0", "at least 1"]),
        ({"run": "x", "rollout": {"time_limit_s": 0}}, ["time_limit_s is 0", "more than 0"]),
        ({"run": "x", "rollout": {"forbidden_tokens": ["a"]}}, ["tokens.0 is 'a'", "integer"]),
        ({"run": "x", "rollout": {"stop_token_ids": [-1]}}, ["ids.0 is -1", "at least 0"]),
    ],
)
def test_what_does_not_fit_the_schema_is_refused_in_one_sentence(config, words):
    refused(config, *words)


def test_updates_take_equal_shares_of_whole_groups():
    refused(
        {"run": "x", "learner": {"updates_per_batch": 3}},
        "rollout.prompts_per_iteration is 8",
        "8 x 8",
        "learner.updates_per_batch = 3",
    )
    assert complete({"run": "x", "learner": {"updates_per_batch": 4}})


@pytest.mark.parametrize(
    "setting",
    [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"forbidden_tokens": [0]}, {"min_tokens": 2}],
)
def test_training_on_truncated_samples_has_a_key_of_its_own(setting):
    (key,) = setting
    refused({"run": "x", "rollout": setting}, f"rollout.{key}", "rollout.train_on_truncated")
    assert complete({"run": "x", "rollout": setting | {"train_on_truncated": True}})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model": {"source": "scratch"}}, ["model.source", "architecture is missing"]),
        ({"model": {"architecture": {}}}, ["model.source", "architecture is given"]),
        ({"optimizer": {"schedule": "linear"}}, ["linear", "optimizer.horizon"]),
        ({"optimizer": {"name": "adam", "weight_decay": 0.1}}, ["weight_decay is 0.1", "adamw"]),
        (
            {"model": {"source": "scratch", "architecture": {"heads": 3, "width": 32}}},
            ["architecture.width is 32", "multiple"],
        ),
        ({"optimizer": {"warmup": 5, "horizon": 5}}, ["horizon is 5", "warmup = 5"]),
        (
            {"rollout": {"min_tokens": 17, "train_on_truncated": True}},
            ["min_tokens is 17", "rollout.max_tokens = 16"],
        ),
        ({"task": {"name": "table"}}, ["table", "train_file is None"]),
        ({"task": {"train_file": "a.jsonl"}}, ["addition", "a.jsonl"]),
    ],
)
def test_keys_that_contradict_each_other_are_refused(config, words):
    refused({"run": "x"} | config, *words)


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"meshes": {"a": {"devices": 4, "axes": {"fsdp": 2}}}}, ["meshes.a", "4", "2"]),
        ({"roles": {"actor": "train"}}, ["roles.actor is 'train'", "all"]),
        ({"roles": {"actr": "all"}}, ["cluster.roles.actr", "actor"]),
        (
            {"meshes": {"a": {"devices": 1}, "b": {"devices": 1}}, "roles": {"actor": "a"}},
            ["roles.rollout is missing", "a, b"],
        ),
        ({"meshes": {"host": {"devices": 1}}}, ["called 'host'", "not host"]),
        ({"meshes": {"a+b": {"devices": 1}}}, ["called 'a+b'", "lower-case"]),
        ({"meshes": {"a": {"devices": 1, "axes": {"model": 1}}}}, ["unknown key", "axes.model"]),
    ],
)
def test_a_dial_that_cannot_work_is_refused(cluster, words):
    refused({"run": "x", "cluster": cluster}, *words)


def test_a_single_config_is_one_run():
    assert list(expand({"run": "x"})) == ["x"]


def test_a_grid_is_one_run_for_each_combination():
    runs = expand(
        {"run": "add", "sweep": {"grid": {"seed": [0, 1], "algorithm.kl.coefficient": [0, 0.01]}}}
    )
    assert list(runs) == [
        "add_seed-0_coefficient-0",
        "add_seed-0_coefficient-0.01",
        "add_seed-1_coefficient-0",
        "add_seed-1_coefficient-0.01",
    ]
    last = runs["add_seed-1_coefficient-0.01"]
    assert (last["seed"], last["algorithm"]["kl"]["coefficient"]) == (1, 0.01)
    assert last["algorithm"]["kl"]["estimator"] == "k3"
    assert last["run"] == "add_seed-1_coefficient-0.01"


def test_a_list_of_runs_may_be_named_and_crossed_with_a_grid():
    runs = expand(
        {
            "run": "add",
            "sweep": {
                "runs": [{"name": "plain"}, {"name": "random", "reward.time_limit_s": 2}],
                "grid": {"seed": [3]},
            },
        }
    )
    assert list(runs) == ["add_plain_seed-3", "add_random_seed-3"]
    assert runs["add_random_seed-3"]["reward"]["time_limit_s"] == 2


def test_a_sweep_stands_on_a_base_file_and_overrides_it(tmp_path):
    (tmp_path / "base.yaml").write_text("run: base\niterations: 3\nrollout: {group_size: 4}\n")
    runs = expand(
        {"iterations": 5, "sweep": {"base": "base.yaml", "grid": {"seed": [7]}}}, tmp_path
    )
    (name, config), *more = runs.items()
    assert (name, more) == ("base_seed-7", [])
    assert (config["iterations"], config["rollout"]["group_size"]) == (5, 4)


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({"gird": {}}, ["sweep", "gird"]),
        ({"grid": {"seed": 3}}, ["grid.seed is 3", "list"]),
        ({"grid": ["seed"]}, ["grid is ['seed']", "mapping"]),
        ({"grid": {"sed": [3]}}, ["run x_sed-3", "unknown key sed", "seed"]),
        ({"runs": [{"name": "a"}, {"name": "a", "seed": 2}]}, ["two runs", "x_a"]),
        ({"base": "missing.yaml", "grid": {}}, ["missing.yaml"]),
    ],
)
def test_a_sweep_that_cannot_be_expanded_is_refused(sweep, words, tmp_path):
    with pytest.raises(MeshdialError) as caught:
        expand({"run": "x", "sweep": sweep}, tmp_path)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_file_that_is_no_mapping_is_refused(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(MeshdialError, match=r"list\.yaml.*mapping"):
        read(path)
    path.write_text("a: [1\n")
    with pytest.raises(MeshdialError, match=r"list\.yaml: not a YAML file"):
        read(path)


def test_the_schema_describes_itself():
    rules = yaml.safe_load(SCHEMA.read_text())
    assert rules["additionalProperties"] is False
