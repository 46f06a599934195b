"""What runs again when something has changed, and what does not."""

import yaml

from rl.artifacts import read_json

from .conftest import TINY, content_ids, wait_for

ROLLOUT_SIDE = ("rollouts.parquet", "rewards.parquet", "reference.parquet", "advantages.parquet")


def changed(workplace, **settings):
    """The tiny config with other values of dotted keys (`__` for a dot), as a file."""
    config = yaml.safe_load(TINY.read_text())
    for dotted, value in settings.items():
        block, *path = config, *dotted.split("__")
        for key in path[:-1]:
            block = block.setdefault(key, {})
        block[path[-1]] = value
    target = workplace.folder / "config.yaml"
    target.write_text(yaml.safe_dump(config))
    return target


def stages_run(printed):
    """(iteration, stage) of every line that a stage said."""
    found = []
    for line in printed.splitlines():
        words = line.split()
        if len(words) > 2 and words[0] in ("tiny", "shared"):
            is_run = words[0] == "tiny"
            found.append((words[1].split("/")[0] if is_run else "", words[2 if is_run else 1]))
    return found


def test_a_new_kl_coefficient_leaves_the_experience_of_iteration_1(copied):
    before = content_ids(copied.path("tiny"))
    times = {n: copied.path("tiny", "0001", n).stat().st_mtime_ns for n in ROLLOUT_SIDE}
    printed = copied.run(config=changed(copied, algorithm__kl__coefficient=0.5))
    ran = stages_run(printed)
    assert ("1", "update_actor") in ran and ("2", "generate_rollouts") in ran
    for stage in (
        "generate_rollouts",
        "score_rewards",
        "reference_logprobs",
        "estimate_advantages",
    ):
        assert ("1", stage) not in ran
    for name, time in times.items():
        assert copied.path("tiny", "0001", name).stat().st_mtime_ns == time
    after = content_ids(copied.path("tiny"))
    assert after["0003/policy"] != before["0003/policy"]


def test_more_iterations_only_add_jobs(copied):
    before = content_ids(copied.path("tiny"))
    printed = copied.run(config=changed(copied, iterations=4))
    ran = stages_run(printed)
    assert {iteration for iteration, _ in ran} == {"4", "report_run"}
    assert ("4", "update_actor") in ran
    after = content_ids(copied.path("tiny"))
    assert all(after[name] == identity for name, identity in before.items() if name[:4].isdigit())


def test_a_setting_of_cost_alone_runs_nothing(copied):
    costs = {"learner__micro_batch_tokens": 100, "learner__remat": "layer", "rollout__max_rows": 4}
    costs |= {"rollout__page_size": 8, "rollout__kv_cache_mb": 64}
    config = changed(copied, checks__max_logprob_drift=0.02, **costs)
    assert "Nothing to be done" in copied.run(config=config)


def test_another_dial_or_launcher_runs_nothing(copied):
    meshes = {"train": {"devices": 4, "axes": {"fsdp": 2, "tensor": 2}}, "decode": {"devices": 1}}
    roles = {"actor": "train", "reference": "train", "rollout": "decode", "reward": "decode"}
    config = changed(copied, cluster={"meshes": meshes, "roles": roles})
    for launcher in ("warm", "shared", "cold"):
        chosen = ("--default-resources", f"launcher='{launcher}'")
        assert "Nothing to be done" in copied.run(*chosen, config=config)
    said = copied.run("--default-resources", "launcher='worm'", config=config, expect=1)
    assert "the launcher is 'worm', expected one of warm, shared, cold, pool" in said


def test_a_deleted_table_comes_back_byte_for_byte(copied):
    target = copied.path("tiny", "0002", "rewards.parquet")
    content, before = target.read_bytes(), content_ids(copied.path("tiny"))
    target.unlink()
    copied.run()
    assert target.read_bytes() == content
    assert content_ids(copied.path("tiny")) == before
    assert "Nothing to be done" in copied.run()


def test_a_deleted_figure_is_drawn_again(copied):
    figure = copied.path("tiny", "report", "stage_timeline.svg")
    content = figure.read_bytes()
    figure.unlink()
    copied.run()
    assert figure.read_bytes() == content


def test_what_is_not_kept_goes_and_comes_back_only_when_allowed(workplace):
    config = changed(workplace, keep="last")
    workplace.run(config=config)
    before = content_ids(workplace.path("tiny"))
    assert not workplace.path("tiny", "0001", "policy").exists()
    assert not workplace.path("tiny", "0001", "weights").exists()
    assert workplace.path("tiny", "0003", "policy").exists()
    assert "Nothing to be done" in workplace.run(config=config)

    planned = workplace.run(
        "-n", config=changed(workplace, keep="last", algorithm__clip={"low": 0.1})
    )
    assert ["generate_rollouts", "2"] in [line.split() for line in planned.splitlines()]
    config = changed(workplace, keep="last")

    target = workplace.path("tiny", "0003", "rollouts.parquet")
    content = target.read_bytes()
    target.unlink()
    printed = workplace.run(config=config, expect=1)
    sentence = next(line for line in printed.splitlines() if "not kept" in line)
    assert "iterations 1 to 2" in sentence or "iterations 1 to 3" in sentence
    assert "--config allow_remake=true" in sentence
    assert not target.exists()

    workplace.run("--config", "allow_remake=true", config=config)
    assert target.read_bytes() == content
    after = content_ids(workplace.path("tiny"))
    assert after == before


def test_two_workflows_do_not_share_a_results_folder(copied):
    target = copied.path("tiny", "0003", "advantages.parquet")
    target.unlink()
    first = copied.start()
    wait_for(lambda: copied.path(".lock").exists() and target.exists())
    printed = copied.run("--forcerun", "report_run", expect=1)
    assert "is in use by another workflow" in printed
    assert first.wait() == 0


def test_a_sweep_shares_the_base_and_a_new_seed_runs_alone(workplace):
    sweep = {"run": "pair", "sweep": {"base": str(TINY), "grid": {"seed": [0]}}}
    sweep["iterations"] = 1
    path = workplace.folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep))
    workplace.run(config=path)
    sweep["sweep"]["grid"]["seed"] = [0, 1]
    path.write_text(yaml.safe_dump(sweep))
    printed = workplace.run(config=path)
    assert "pair_seed-1 1/1" in printed and "pair_seed-0 1/1" not in printed
    assert "init_policy" not in printed and "evaluate_policy" in printed
    assert len(list(workplace.path("shared", "models").iterdir())) == 1
    assert len(list(workplace.path("shared", "evaluations").glob("*.parquet"))) == 1
    assert workplace.path("comparisons", "pair", "final.csv").read_text().count("\n") == 2
    checks = read_json(workplace.path("pair_seed-1", "0001", "checks.json"))
    assert checks["iteration"] == 1
