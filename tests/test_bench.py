"""The benchmarks' drivers run, ours alone, on a tiny shape; and their arithmetic."""

import json
import random
import subprocess
import sys
from pathlib import Path

import alternating
import pytest
import workload
from alternating import Contender, Worker

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize(
    ("script", "options", "contender"),
    [
        ("rollout", ["--requests", "16", "--slots", "8", "--max-new", "8"], "meshdial-xla"),
        ("update", ["--batch", "groups"], "meshdial"),
        ("grpo", ["--prompts", "2", "--max-new", "8", "--backend", "xla"], "meshdial"),
    ],
)
def test_a_driver_runs_ours_alone_and_prints_a_table(tmp_path, script, options, contender):
    found = tmp_path / "found.json"
    command = [sys.executable, str(BENCH / f"{script}.py"), "--shape", "tiny", *options]
    command += ["--contenders", contender, "--repetitions", "1", "--json", str(found)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith(f"| {contender} |")]
    figures = json.loads(found.read_text())["contenders"][contender]
    (repetition,) = figures["repetitions"]
    assert repetition["tokens"] == figures["first"]["tokens"] > 0
    rate = repetition["tokens"] / repetition["cpu_seconds"]
    assert [row.split("|")[2].strip() for row in rows] == [alternating.short(rate)]


def test_what_is_not_installed_or_fails_is_named_and_the_others_go_on(tmp_path, capsys):
    missing = Contender("far", "meshdial_update", "nowhere")
    broken = Contender("broken", "no_such_script")
    arguments = alternating.parser("").parse_args(["--peers", str(tmp_path)])
    assert alternating.take_turns([missing, broken], {}, arguments) == []
    said = capsys.readouterr().out
    assert f"far is not installed: python bench/install_peers.py nowhere --into {tmp_path}" in said
    assert "broken failed: " in said and "no_such_script.py" in said


def test_a_table_holds_medians_and_the_spread_of_the_rounds_ratios():
    ours = worker("ours", None, [1.0, 2.0, 4.0])
    theirs = worker("theirs", "peers", [4.0, 4.0, 8.0])
    _, _, first, second = alternating.table([ours, theirs])
    assert first == "| ours | 50 | 25 to 100 | 2 |  | 3.0 s | 1.00 GiB |"
    # Ratios of the rounds are 4, 2 and 2; that of the medians is 50 / 25.
    assert second == (
        "| theirs | 25 | 12.5 to 25 | 4 | 2.00 times, 2 to 4 (2.00) | 1.0 s | 1.00 GiB |"
    )


def worker(name: str, environment: str | None, cpu_seconds: list[float]) -> Worker:
    found = [
        {"tokens": 100, "seconds": 2 * value, "cpu_seconds": value, "peak_bytes": 2**30}
        for value in cpu_seconds
    ]
    first = {"cpu_seconds": 5.0}
    return Worker(Contender(name, "", environment), None, None, first, found)


def test_the_peers_environments_are_the_extras_of_the_project():
    assert set(alternating.extras()) == {"torch", "llamacpp", "tunix"}
    assert all("==" in packages[0] for packages in alternating.extras().values())


@pytest.mark.parametrize(("name", "millions"), [("a", 5.0), ("b", 134.5)])
def test_shapes_have_the_parameters_they_claim(name, millions):
    assert workload.SHAPES[name].num_parameters / 1e6 == pytest.approx(millions, abs=0.06)


def test_fewer_requests_are_the_first_of_more():
    shape = workload.SHAPES["tiny"]
    few, many = workload.make_requests(shape, 16), workload.make_requests(shape, 64)
    assert few.prompts == many.prompts[:2] and few.limits_PG == many.limits_PG[:2]
    assert all(64 <= len(prompt) <= 128 for prompt in many.prompts)
    assert len(many.samples) == 64


def test_lengths_are_geometric():
    generator = random.Random(0)
    lengths = [workload.geometric(generator, 48) for _ in range(20000)]
    assert min(lengths) == 1
    assert sum(lengths) / len(lengths) == pytest.approx(48, rel=0.03)
    share = sum(length > 96 for length in lengths) / len(lengths)
    assert share == pytest.approx((1 - 1 / 48) ** 96, abs=0.01)


def test_flops_of_a_batch_are_three_forward_passes():
    shape = workload.SHAPES["tiny"]
    batch = workload.make_batch(shape, 1, 1, 3, (2, 2))
    by_token = sum(shape.flops_per_token(context) for context in range(1, 6))
    without_head = 3 * 2 * shape.vocabulary * shape.width
    assert batch.flops(shape) == pytest.approx(3 * (by_token - without_head))
