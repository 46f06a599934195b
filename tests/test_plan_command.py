"""`meshdial plan` from the command line: where sizes come from, what is printed and refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rl.cli import main
from rl.errors import MeshdialError
from rl.models.config_file import write_model_config
from rl.plan.measured import measured_run
from rl.plan.source import model_sizes
from rl.plan.table import aligned, size_text, time_text

from .test_plan import LLAMA_7B, LLAMA_70B, TINY

ROOT = Path(__file__).parents[1]
SORT_DIGITS = ROOT / "configs" / "sort_digits.yaml"
ADDITION = ROOT / "configs" / "addition.yaml"


def saved(folder, config, name="config.json"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(write_model_config(config)))
    return str(folder / name)


def planned(capsys, *arguments, config=ADDITION):
    assert main(["plan", "--configfile", str(config), *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments, config=ADDITION):
    assert main(["plan", "--configfile", str(config), *arguments]) == 1
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    return output.err


def test_a_7b_and_a_70b_by_their_config_alone(tmp_path, capsys):
    for config, count in ((LLAMA_7B, 6_738_415_616), (LLAMA_70B, 68_976_648_192)):
        found = planned(capsys, "--model", saved(tmp_path, config))
        assert found["run"]["parameters"] == count
        assert found["sync"]["exported_bytes"]["full"] == 4 * count
        assert found["sync"]["moved_bytes"]["colocated"] == {"full": 0, "lora": 0}
    # 70B in float32 is 276 GB, on a device of 80 GB.
    assert found["memory"][0]["fits"] == "no"


def test_todays_dial_and_the_alternatives_side_by_side(tmp_path, capsys):
    found = planned(capsys, "--model", saved(tmp_path, TINY), "--devices", "4")
    labels = [(row["dial"], row["lag"], row["devices"]) for row in found["iterations"]]
    assert labels == [
        ("today", 0, 1),
        ("all colocated", 0, 4),
        ("all colocated", 1, 4),
        ("rollout apart", 0, 4),
        ("rollout apart", 1, 4),
        ("rollout apart, with the reference", 0, 4),
        ("rollout apart, with the reference", 1, 4),
        ("rollout and reference apart", 0, 4),
        ("rollout and reference apart", 1, 4),
    ]


def test_a_disaggregated_dial(tmp_path, capsys):
    cluster = {
        "meshes": {
            "train": {"devices": 4, "axes": {"fsdp": 4}},
            "decode": {"devices": 2, "axes": {"tensor": 2}},
        },
        "roles": {"actor": "train", "reference": "train", "rollout": "decode", "reward": "decode"},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"run": "apart", "lag": 1, "cluster": cluster}))
    found = planned(capsys, "--model", saved(tmp_path, TINY), config=file)
    assert [mesh["mesh"] for mesh in found["memory"]] == ["train 4 (fsdp 4)", "decode 2 (tensor 2)"]
    assert [role["role"] for mesh in found["memory"] for role in mesh["roles"]] == [
        "actor",
        "reference",
        "rollout",
    ]
    assert found["iterations"][0]["lag"] == 1 and found["iterations"][0]["devices"] == 6
    # 5 heads cannot be split in two
    odd = saved(tmp_path / "odd", type(TINY)(96, 160, 384, 2, 5, 5, 32))
    assert "num_attention_heads" in refused(capsys, "--model", odd, config=file)


def test_a_model_from_scratch_and_its_table(capsys):
    assert main(["plan", "--configfile", str(SORT_DIGITS), "--device", "CPU-core"]) == 0
    output = capsys.readouterr().out
    assert "4 layers of width 128, 855 k parameters, all trained, float32" in output
    assert "prompts are taken to have 6 tokens" in output
    for title in ("Memory of", "One sync", "Stages at their bound", "Seconds per iteration"):
        assert f"\n{title}" in output
    assert "yes, 1%" in output
    assert "reference" not in output.split("One sync")[0].split("Memory of")[1]  # there is no KL


def test_no_device_is_touched_and_the_same_is_printed_twice(tmp_path):
    command = [sys.executable, "-m", "rl.cli", "plan", "--configfile", str(ADDITION)]
    command += ["--model", saved(tmp_path, LLAMA_7B), "--devices", "8"]
    environment = {**os.environ, "JAX_PLATFORMS": "none_such", "PYTHONPATH": str(ROOT)}
    runs = [
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout != ""


# Where sizes come from


def test_sizes_of_a_folder_or_of_a_model_that_a_run_has_made(tmp_path):
    saved(tmp_path / "model", TINY)
    assert model_sizes({"source": str(tmp_path / "model")}, None, tmp_path / "none") == TINY
    made = tmp_path / "shared" / "tiny-1"
    saved(made, LLAMA_7B)
    (made / "manifest.json").write_text(json.dumps({"source": "pypi:tiny==1"}))
    assert model_sizes({"source": "pypi:tiny==1"}, None, tmp_path / "shared") == LLAMA_7B
    with pytest.raises(MeshdialError, match="give --model with a config"):
        model_sizes({"source": "pypi:tiny==2"}, None, tmp_path / "shared")


def test_wrong_input_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "not known before it is downloaded" in refused(capsys)
    assert "no config.json" in refused(capsys, "--model", "nowhere")
    mamba = tmp_path / "config.json"
    mamba.write_text(json.dumps({"model_type": "mamba"}))
    assert f"{mamba}: model config: model_type" in refused(capsys, "--model", str(mamba))
    model = ("--model", saved(tmp_path / "m", TINY))
    assert "expected one of addition" in refused(capsys, *model, "--run", "x")
    assert "--devices is 0" in refused(capsys, *model, "--devices", "0")
    assert "--sync-over is 'x'" in refused(capsys, *model, "--sync-over", "x")
    assert "no timings of an update" in refused(capsys, *model, "--measured", str(tmp_path))
    assert "no such config file" in refused(capsys, config=tmp_path / "none.yaml")


# After a run


def timings(folder, number, **stages):
    (folder / f"{number:04d}" / "timings").mkdir(parents=True)
    for rule, cost in stages.items():
        (folder / f"{number:04d}" / "timings" / f"{rule}.json").write_text(json.dumps(cost))


def make_run(folder):
    """Three iterations; updates end at 30 (they compile at first), 36 and 44."""
    timings(folder, 0, sync_weights={"seconds": 9, "sync": {"outcome": "load"}})
    for number, (began, seconds) in enumerate([(10, 20.0), (32, 4.0), (38, 6.0)], start=1):
        rollouts = {
            "seconds": 3.0,
            "compute_seconds": 2.5,
            "rollout": {"num_tokens": 100 * number, "seconds": 2.0},
            "sync": {
                **{"outcome": "load", "bytes_moved": 640, "bytes_read": 640, "seconds": 0.5},
                "bytes_written": 0,
            },
        }
        update = {"seconds": seconds, "compute_seconds": seconds - 1, "peak_memory_bytes": 7}
        timings(
            folder,
            number,
            sync_weights={"seconds": 0.25, "sync": {"outcome": "cast", "bytes_written": 640}},
            generate_rollouts=rollouts,
            update_actor=update | {"started": began},
        )


def test_figures_of_a_run_are_medians_without_its_first_iteration(tmp_path):
    make_run(tmp_path)
    found = measured_run(tmp_path)
    assert found.num_iterations == 2
    assert found.stages == {"rollouts": 2.5, "update": 4.0}
    assert found.whole["update_actor"] == 5.0
    assert found.tokens_per_second == 125.0  # of 100 and 150
    assert found.iteration_seconds == 7.0  # of 6 and 8
    assert found.peak_memory == 7
    assert found.sync == {
        "outcome": "load",
        "bytes_moved": 640,
        "bytes_read": 640,
        "bytes_written": 640,
        "seconds": 0.5,
    }
    assert found.mean_prompt is None


def test_a_run_that_does_not_say_when_its_stages_began(tmp_path):
    make_run(tmp_path)
    for path in tmp_path.glob("*/timings/update_actor.json"):
        cost = json.loads(path.read_text())
        del cost["started"]
        path.write_text(json.dumps(cost))
    assert measured_run(tmp_path).iteration_seconds is None


def test_measured_beside_predicted(tmp_path, capsys):
    make_run(tmp_path / "run")
    arguments = ["--model", saved(tmp_path, TINY), "--measured", str(tmp_path / "run")]
    rows = {row["figure"]: row for row in planned(capsys, *arguments)["measured"]["rows"]}
    adapter = 2 * 4 * 8 * (256 + (128 + 64) + 256 + (384 + 128))  # q, v, o, down; two layers
    assert rows["export, written"] == {
        "figure": "export, written",
        "unit": "bytes",
        "predicted": adapter,
        "measured": 640,
    }
    assert rows["iteration"]["measured"] == 7.0
    assert rows["update, computing"]["measured"] == 4.0
    assert main(["plan", "--configfile", str(ADDITION), *arguments]) == 0
    output = capsys.readouterr().out
    line = next(line for line in output.splitlines() if line.startswith("iteration  "))
    assert "7.00 s" in line
    assert "Measured, medians over 2 iterations (sync: load; iteration: from update" in output


def test_a_run_of_another_dial_is_no_comparison(tmp_path, capsys):
    make_run(tmp_path / "run")
    for path in (tmp_path / "run").glob("*/timings/update_actor.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"mesh": "train"}))
    model = ("--model", saved(tmp_path, TINY))
    said = refused(capsys, *model, "--measured", str(tmp_path / "run"))
    assert "which ran on the meshes train; the config has all" in said


# The table


def test_quantities_have_three_digits():
    assert [size_text(n) for n in (0, 5, 1234, 26_953_662_464, 999_900_000, None)] == [
        "0 B",
        "5.00 B",
        "1.23 kB",
        "27.0 GB",
        "1,000 MB",
        "-",
    ]
    assert [time_text(s) for s in (0, 2e-5, 0.0428, 3.5, 12345.6)] == [
        "0 s",
        "20.0 µs",
        "42.8 ms",
        "3.50 s",
        "12,346 s",
    ]


def test_columns_are_aligned():
    rows = [["mesh", "peak"], ["train 4", "1 GB"], ["a note"], ["d", "12.5 GB"]]
    assert aligned(rows) == "mesh        peak\ntrain 4     1 GB\na note\nd        12.5 GB"


def test_what_the_other_roles_cost_is_printed(tmp_path, capsys):
    path = tmp_path / "ppo.yaml"
    path.write_text("run: ppo\nalgorithm: {preset: ppo}\nlearner: {epochs: 2}\n")
    model = ("--model", saved(tmp_path, TINY))
    assert main(["plan", "--configfile", str(path), *model]) == 0
    output = capsys.readouterr().out
    assert "critic  406 k parameters" in output and ", 2 epochs, cache" in output
    for words in ("values", "critic's one of"):
        assert words in output.split("Stages at their bound")[1]
    path.write_text("run: dapo\nalgorithm: {preset: dapo}\n")
    assert main(["plan", "--configfile", str(path), *model]) == 0
    output = capsys.readouterr().out
    assert "24 prompts (8 of them trained on) x 8 completions" in output
    assert "critic" not in output.split("Seconds per iteration")[0]
