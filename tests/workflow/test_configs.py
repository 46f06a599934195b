"""Every config in the repository is read and planned."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .conftest import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def snakemake(*arguments, cwd=ROOT):
    command = [str(Path(sys.executable).parent / "snakemake"), "--cores", "1", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_config_of_the_repository_plans(config, tmp_path):
    # What a script makes before the workflow starts.
    (tmp_path / "results" / "reward_models" / "sort_digits").mkdir(parents=True)
    done = snakemake("--dry-run", "--configfile", str(config), "--directory", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "report_run" in done.stdout + done.stderr


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_config_opens_with_what_it_is_and_its_command(config):
    first, second = config.read_text().splitlines()[:2]
    assert first.startswith("# ") and second.startswith("#   snakemake --cores 2")
    is_default = config.stem == "addition"
    assert is_default or f"--configfile configs/{config.name}" in second


def test_the_default_config_is_addition(tmp_path):
    done = snakemake("--dry-run", "--quiet", "host", "--directory", str(tmp_path))
    assert "results/addition/0012/policy" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"iteratons": 3}, "unknown key iteratons; did you mean iterations?"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size is 1; take 2 or more"),
        ({"learner": {"updates_per_batch": 3}}, "learner.updates_per_batch = 3 does not divide"),
        (
            {"cluster": {"meshes": {"all": {"devices": 4, "axes": {"fsdp": 2}}}}},
            "cluster.meshes.all has devices: 4",
        ),
        (
            {"reward": {"functions": [{"function": "exact"}]}},
            "reward.functions.0.function is 'exact'",
        ),
        ({"reward": {"functions": [{"function": "nosuch:f"}]}}, "reward module nosuch: not found"),
        ({"task": {"name": "table", "train_file": "no.jsonl"}}, "task file no.jsonl is missing"),
        ({"metrics": {"sink": "wandb"}}, "pip install 'meshdial[wandb]'"),
    ],
)
def test_a_wrong_config_is_one_sentence_before_anything_runs(change, words, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump({"run": "wrong"} | change))
    done = snakemake("--configfile", str(path), "--directory", str(tmp_path))
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()


def test_a_setting_on_the_command_line_is_read_as_its_type(tmp_path):
    setting = 'algorithm={"kl":{"coefficient":0}}'
    done = snakemake("--dry-run", "--directory", str(tmp_path), "--config", setting)
    assert done.returncode == 0, done.stderr
    assert "reference_logprobs" not in done.stdout + done.stderr


def test_an_unknown_run_is_named(tmp_path):
    done = snakemake("--directory", str(tmp_path), "results/nosuch/metrics.parquet")
    assert done.returncode != 0
    assert "nosuch" in done.stdout + done.stderr
