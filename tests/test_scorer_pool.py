"""A user's reward function may do anything: it costs its own sample, and nothing stays behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rl.config import schema
from rl.errors import ClientGone, MeshdialError
from rl.rewards import score
from rl.rewards.pool import ScorerProcess, score_in_processes
from rl.rewards.processes import CHILD, Call, Mould, Target
from tests.test_rewards import rollouts

REWARDS = """
    import ctypes, json, os, random, signal, subprocess, sys, threading, time

    def behave(completion):
        return behaviours[completion]()

    def hang():
        while True:
            pass

    def deep_hang():
        import re
        re.match("(a+)+b", "a" * 60)  # never lets go of the interpreter's lock

    def shout():
        for _ in range(200):
            print("x" * 100_000)
            sys.stderr.write("y" * 100_000)
        os.write(1, b'{"number": 1, "value": 1.0}')
        return 1.0

    def fork_and_return():
        os.fork()
        return 0.5

    def fork_and_leave():
        if os.fork() == 0:
            time.sleep(1000)
        return 0.25

    def fork_and_end():
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(5)

    def fork_and_open():
        os.fork()
        for _ in range(8):  # the numbers of the pipes that the fork has lost are among these
            files.append(open("opened", "a"))
        return 1.0

    files = []

    def fork_and_hang():
        os.fork()
        hang()

    def daemon():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(1000)
            os._exit(0)
        os.wait()
        return 1.0

    def sleep_on():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            time.sleep(1000)

    def interrupt():
        raise KeyboardInterrupt

    def children():
        subprocess.Popen(["sleep", "1000"])
        return 1.0

    def threads_left():
        threading.Thread(target=hang).start()
        return 1.0

    def eat_memory():
        return len(bytearray(3 << 30)) * 0.0

    def close_everything():
        os.closerange(0, 256)
        return 1.0

    def leave():
        sys.exit("bye")

    def raise_one():
        raise RuntimeError("bad\\nday")

    class Tensor:
        def item(self):
            return 0.75

    class Odd:
        def __float__(self):
            return 1.0

    behaviours = {
        "one": lambda: 1.0, "zero": lambda: 0.0, "integer": lambda: 3, "bool": lambda: True,
        "tensor": Tensor, "odd": Odd, "nan": lambda: float("nan"), "inf": lambda: float("-inf"),
        "text": lambda: "1.0", "none": lambda: None, "dict": lambda: {"score": 1.0},
        "huge": lambda: 10**400, "complex": lambda: 1j,
        "hang": hang, "deep hang": deep_hang, "exit": lambda: os._exit(3), "leave": leave,
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "segfault": lambda: ctypes.string_at(0),
        "raise": raise_one, "shout": shout, "fork": fork_and_return, "fork leave": fork_and_leave,
        "fork hang": fork_and_hang, "fork end": fork_and_end, "fork open": fork_and_open,
        "children": children, "daemon": daemon, "sleep on": sleep_on, "interrupt": interrupt,
        "end mould": lambda: os.kill(os.getppid(), signal.SIGKILL) or 1.0,
        "ten gigabytes": lambda: len(bytearray(10 << 30)) * 0.0, "threads": threads_left,
        "memory": eat_memory, "close": close_everything, "input": lambda: len(sys.stdin.read()),
    }

    def named(completion, ground_truth, prompt, info, seed, sample_id, completion_tokens):
        seen = [completion, ground_truth, prompt, info, seed, sample_id, completion_tokens]
        return 1.0 if seen == ["x", "2", "Q: 1+1?\\nA:", {"k": [1]}, 7, "s0", [3, 4, 5]] else 0.0

    def any_keyword(**arguments):
        return 1.0 if sorted(arguments) == ["completion", "ground_truth", "info", "prompt"] else 0.0

    def with_option(completion, *, length=3):
        return float(len(completion) == length)

    def needs(completion, temperature):
        return 1.0

    def hashed(completion):
        return hash(completion) % 1000

    def drawn():
        return random.random()

    def remembers(completion, calls=[]):
        calls.append(completion)
        return float(len(calls))

    def mark_and_hang():
        os.chdir(os.path.dirname(__file__))
        open("marked", "w").close()
        deep_hang()

    not_a_function = 3
"""
TIME_LIMIT_S = 1.0
REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(REWARDS))


def scored(completions, function="mine:behave", options=None, time_limit_s=TIME_LIMIT_S, **more):
    spec = {"function": function, "name": "mine", "options": options or {}}
    table = score(rollouts(completions), [spec], 7, time_limit_s, **more)
    return [(row["reward"], row["failure"]) for row in table.to_pylist()]


def processes_in(folder):
    """The pids of the processes whose working directory is `folder`, but for this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_there = os.readlink(entry / "cwd") == str(folder)
            is_alive = "\nState:\tZ" not in (entry / "status").read_text()
        except OSError:
            continue
        if is_there and is_alive and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def wait_until_gone(folder):
    wait_until(lambda: not processes_in(folder), 5)


def wait_until(condition, limit_s):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "returned, reward",
    [
        ("one", 1.0),
        ("zero", 0.0),
        ("integer", 3.0),
        ("bool", 1.0),
        ("tensor", 0.75),
        ("input", 0.0),
    ],
)
def test_numbers_are_rewards(returned, reward):
    assert scored([returned]) == [(reward, None)]


BAD_RETURNS = {
    "nan": "ValueError: returned nan, expected a finite number",
    "inf": "ValueError: returned -inf, expected a finite number",
    "text": "TypeError: returned str, expected a float",
    "none": "TypeError: returned NoneType, expected a float",
    "dict": "TypeError: returned dict, expected a float",
    "odd": "TypeError: returned Odd, expected a float",
    "complex": "TypeError: returned complex, expected a float",
    "huge": "OverflowError: int too large to convert to float",
    "raise": "RuntimeError: bad day (mine.py, line ",
    "leave": "SystemExit: bye (mine.py, line ",
    "interrupt": "KeyboardInterrupt (mine.py, line ",
}


def test_what_is_no_number_is_a_failure_and_never_zero():
    outcomes = scored(["zero", *BAD_RETURNS, "zero"])
    assert outcomes[0] == outcomes[-1] == (0.0, None)
    for (reward, failure), why in zip(outcomes[1:-1], BAD_RETURNS.values(), strict=True):
        assert reward is None
        assert failure.startswith(f"mine: {why}")


CRASHES = {
    "exit": "the process ended with exit status 3",
    "kill": "the process was ended by signal 9 (Killed)",
    "segfault": "the process was ended by signal 11 (Segmentation fault)",
    "close": "the process ",
    "fork end": "the process ended with exit status 5",
    "hang": "no answer within 1 s",
    "deep hang": "no answer within 1 s",
    "fork hang": "no answer within 1 s",
    "sleep on": "no answer within 1 s",
}


def test_a_crash_or_a_hang_costs_one_sample(tmp_path):
    outcomes = scored(
        [word for crash in CRASHES for word in (crash, "one", "zero")], num_processes=3
    )
    for crash, triple in zip(CRASHES, zip(*[iter(outcomes)] * 3, strict=True), strict=True):
        reward, failure = triple[0]
        assert reward is None and failure.startswith(f"mine: {CRASHES[crash]}")
        assert triple[1:] == ((1.0, None), (0.0, None))
    wait_until_gone(tmp_path)


def test_forks_threads_and_output_disturb_no_later_sample(tmp_path):
    words = [
        "shout",
        "one",
        "fork",
        "one",
        "fork leave",
        "zero",
        "children",
        "one",
        "daemon",
        "one",
        "threads",
        "one",
    ]
    rewards = [1.0, 1.0, 0.5, 1.0, 0.25, 0.0, *[1.0] * 6]
    outcomes = scored(words, num_processes=1, time_limit_s=20)
    assert outcomes == [(reward, None) for reward in rewards]
    wait_until_gone(tmp_path)


def test_a_function_that_ends_its_parent_costs_no_later_sample(tmp_path):
    words = ["end mould", "exit", "one", "exit", "zero"]
    outcomes = scored(words, num_processes=1)
    assert [reward for reward, _ in outcomes] == [1.0, None, 1.0, None, 0.0]
    assert outcomes[3][1] == "mine: the process ended with exit status 3"
    wait_until_gone(tmp_path)


def test_a_fork_that_returns_writes_nowhere(tmp_path):
    assert scored(["fork open", "one"], num_processes=1) == [(1.0, None), (1.0, None)]
    assert (tmp_path / "opened").read_text() == ""


def test_memory_is_limited():
    outcomes = scored(["memory", "one"], memory_limit_bytes=1 << 30)
    assert outcomes[0][0] is None and "MemoryError" in outcomes[0][1]
    assert outcomes[1] == (1.0, None)


def test_ten_gigabytes_are_refused_by_the_default_limit():
    limit = schema()["properties"]["reward"]["properties"]["memory_limit_mb"]["default"] << 20
    outcomes = scored(["ten gigabytes", "one"], memory_limit_bytes=limit)
    assert outcomes[0][0] is None and outcomes[0][1].startswith("mine: MemoryError (mine.py, line ")
    assert outcomes[1] == (1.0, None)


HANGING = [
    {0, 1, 2, 3},  # before any call was answered
    {0, 2, 4, 6},  # all in the same lane
    {7, 8, 40, 63},
]


@pytest.mark.parametrize("hanging", HANGING, ids=str)
@pytest.mark.parametrize("word", ["hang", "sleep on"])
def test_four_hanging_samples_of_64_cost_one_time_limit(tmp_path, hanging, word):
    words = [word if number in hanging else "one" for number in range(64)]
    started = time.monotonic()
    outcomes = scored(words, time_limit_s=2.0)
    assert time.monotonic() - started < 2.0 + 2.0
    for number, outcome in enumerate(outcomes):
        late = (None, "mine: no answer within 2 s")
        assert outcome == (late if number in hanging else (1.0, None))
    wait_until_gone(tmp_path)


@pytest.mark.parametrize("has_threads", [False, True])
def test_a_slow_import_is_made_once_where_forks_are_safe(tmp_path, has_threads):
    start = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    (tmp_path / "slow.py").write_text(
        "import os, threading, time\n"
        f"open({str(tmp_path / 'imports')!r}, 'a').write('x')\n"
        "time.sleep(1)\n"
        f"{start if has_threads else ''}\n"
        "def f(completion):\n"
        "    os._exit(1) if completion == 'exit' else None\n"
        "    return 1.0\n"
    )
    outcomes = scored(["exit", "one"] * 3, "slow:f", num_processes=1, time_limit_s=0.8)
    assert [reward for reward, _ in outcomes] == [None, 1.0] * 3
    assert len((tmp_path / "imports").read_text()) == (4 if has_threads else 1)


def test_a_slow_function_that_answers_is_not_cut_short(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ndef f(): time.sleep(0.4); return 1.0\n")
    assert scored(["x"] * 8, "slow:f", time_limit_s=5.0) == [(1.0, None)] * 8


def test_a_function_gets_the_arguments_that_it_names():
    table = score(rollouts(["x"], info={"k": [1]}), [{"function": "mine:named"}], 7, 5.0)
    assert table["reward"].to_pylist() == [1.0]
    assert scored(["x"], "mine:any_keyword") == [(1.0, None)]
    assert [r for r, _ in scored(["xx", "xxx"], "mine:with_option", {"length": 2})] == [1.0, 0.0]


@pytest.mark.parametrize(
    "function, options, why",
    [
        ("mine:missing", {}, "module 'mine' has no attribute 'missing'"),
        ("mine:not_a_function", {}, "mine:not_a_function is not a function"),
        ("mine:needs", {}, "it asks for temperature; it can have completion, ground_truth, "),
        ("mine:with_option", {"width": 2}, "it takes no option width"),
        (
            "mine:with_option",
            {"completion": "x"},
            "the option completion has the name of an argument",
        ),
        ("broken:f", {}, "SyntaxError"),
        ("imports:f", {}, "ModuleNotFoundError: No module named 'no_such_package'"),
        ("ends:f", {}, "while its module was imported, the process ended with exit status 4"),
    ],
)
def test_a_function_that_cannot_be_called_stops_the_stage(tmp_path, function, options, why):
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "imports.py").write_text("import no_such_package\n")
    (tmp_path / "ends.py").write_text("import os\nos._exit(4)\n")
    with pytest.raises(MeshdialError) as error:
        scored(["x"], function, options)
    assert str(error.value).startswith(f"reward function {function}: ")
    assert why in str(error.value)


def test_randomness_depends_on_the_sample_and_not_on_the_process():
    drawn = [scored(["x"] * 6, "mine:drawn", num_processes=count) for count in (1, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 6
    first, second = scored(["x", "x"], "mine:hashed", num_processes=2)
    assert first == second


def test_a_sample_goes_to_the_process_of_its_place():
    counts = [reward for reward, _ in scored(list("abcdef"), "mine:remembers", num_processes=2)]
    assert counts == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_an_edited_module_is_read_again_and_leaves_no_bytecode(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    for reward in (1.0, 2.0):
        (tmp_path / "edited.py").write_text(f"def f(): return {reward}\n")
        assert scored(["x"], "edited:f") == [(reward, None)]
    assert not (tmp_path / "__pycache__").exists()


def test_large_arguments_go_through_whole():
    text = "é\n" * 500_000
    assert scored([text], "mine:with_option", {"length": 1_000_000}) == [(1.0, None)]


def test_an_abandoned_stage_ends_its_processes(tmp_path):
    def check_alive():
        raise ClientGone

    started = time.monotonic()
    with pytest.raises(ClientGone):
        scored(["hang"] * 4, time_limit_s=60, check_alive=check_alive)
    assert time.monotonic() - started < 20
    wait_until_gone(tmp_path)


def test_a_process_that_died_between_calls_costs_nothing(tmp_path):
    target = Target("mine", "behave", [str(tmp_path), *sys.path], {}, 5.0)
    mould = Mould(target, ["completion"])
    process = ScorerProcess(mould)
    assert process.call(Call({"completion": "one"}, 0)).value == 1.0
    os.kill(process.process.pid, signal.SIGKILL)
    wait_until(process.process.is_spoiled, 5)
    assert process.call(Call({"completion": "zero"}, 0)) == (0.0, None)
    process.end()
    mould.end()
    wait_until_gone(tmp_path)


ORPHAN = """
import sys
from rl.rewards.pool import score_in_processes
from rl.rewards.processes import Call, Mould, Target
target = Target("mine", "mark_and_hang", [{folder!r}, *sys.path], {{}}, 30.0)
score_in_processes(Mould(target, ["completion"]), [Call({{"completion": "x"}}, 0)], 1)
"""


def test_a_hanging_call_ends_although_its_parent_was_killed(tmp_path):
    command = [sys.executable, "-c", ORPHAN.format(folder=str(tmp_path))]
    parent = subprocess.Popen(command, cwd=REPOSITORY)
    wait_until(lambda: (tmp_path / "marked").exists(), 30)
    (child,) = processes_in(tmp_path)
    parent.kill()
    parent.wait()
    wait_until(lambda: child not in processes_in(tmp_path), 5)


def test_an_idle_process_ends_with_its_input(tmp_path):
    setup = {
        "module": "mine",
        "function": "behave",
        "search_path": [str(tmp_path), *sys.path],
        "options": {},
        "memory_limit_bytes": None,
        "offered": ["completion"],
    }
    call = {"number": 1, "arguments": {"completion": "threads"}, "seed": 0, "alarm_s": 30}
    lines = "".join(json.dumps(message) + "\n" for message in (setup, call))
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen([sys.executable, str(CHILD)], stdin=theirs) as process:
        theirs.close()
        ours.sendall(lines.encode())
        ours.shutdown(socket.SHUT_WR)
        with ours.makefile() as file:
            replies = [json.loads(line) for line in file]
    assert replies == [{"wanted": ["completion"], "is_mould": True}, {"number": 1, "value": 1.0}]
    assert process.returncode == 0


def test_no_calls_start_nothing():
    assert score_in_processes(Mould(Target("nowhere", "f", [], {}, 1.0), []), [], 2) == []
