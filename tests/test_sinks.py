"""The metrics table sent on: nothing lost on the way, and a clear sentence without the extra."""

import importlib.util
import struct
import sys
from types import SimpleNamespace

import pytest

from rl.artifacts import SCHEMAS, Publisher, make_table
from rl.errors import MeshdialError
from rl.report.sinks import check_sink, send_to_wandb, write_tensorboard

ROWS = [
    ("addition", 0, "evaluate_policy", "accuracy", 0.25),
    ("addition", 1, "update_actor", "kl", 0.5),
    ("addition", 1, "update_actor", "loss", -1.5),
    ("addition", 2, "update_actor", "kl", 0.75),
]
METRICS = make_table(
    "metrics", dict(zip(SCHEMAS["metrics"].names, zip(*ROWS, strict=True), strict=True))
)
SCALARS = {
    ("evaluate_policy/accuracy", 0, 0.25),
    ("update_actor/kl", 1, 0.5),
    ("update_actor/loss", 1, -1.5),
    ("update_actor/kl", 2, 0.75),
}


class FakeWriter:
    """Records what tensorboardX.SummaryWriter is asked."""

    def __init__(self):
        self.scalars = []
        self.is_closed = False

    def __call__(self, folder):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.is_closed = True

    def add_scalar(self, tag, value, iteration):
        self.scalars.append((tag, iteration, value))


def test_tensorboard_gets_every_figure(tmp_path, monkeypatch):
    writer = FakeWriter()
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=writer))
    write_tensorboard(Publisher(), tmp_path / "log", METRICS)
    assert set(writer.scalars) == SCALARS
    assert writer.is_closed


def events(path):
    """The records of a TFRecord file: length, its checksum, content, its checksum."""
    content = path.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        yield content[12 : 12 + length]
        content = content[12 + length + 4 :]


@pytest.mark.filterwarnings("ignore")  # another package's own deprecations
@pytest.mark.skipif(importlib.util.find_spec("tensorboardX") is None, reason="an optional extra")
def test_the_real_tensorboard_writer_replaces_the_log(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    for _ in range(2):  # the second time as after a re-run
        write_tensorboard(Publisher(), tmp_path / "log", METRICS)
    (path,) = (tmp_path / "log").iterdir()
    found = set()
    for record in events(path):
        event = Event.FromString(record)
        found |= {(value.tag, event.step, value.simple_value) for value in event.summary.value}
    assert found == SCALARS


class FakeRun:
    """Records what a wandb run is asked."""

    url = "https://wandb.example/run"

    def __init__(self):
        self.logged = []
        self.is_finished = False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.is_finished = True

    def log(self, figures, step):
        self.logged.append((step, figures))


def test_wandb_gets_one_record_an_iteration_in_order(tmp_path, monkeypatch):
    run, asked = FakeRun(), {}
    fake = SimpleNamespace(init=lambda **settings: asked.update(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    address = send_to_wandb(METRICS.take([3, 2, 1, 0]), {"seed": 7}, tmp_path / "wandb")
    assert address == "https://wandb.example/run"
    assert asked == {
        "project": "meshdial",
        "name": "addition",
        "group": "addition",
        "dir": str(tmp_path / "wandb"),
        "config": {"seed": 7},
    }
    assert run.logged == [
        (0, {"evaluate_policy/accuracy": 0.25}),
        (1, {"update_actor/kl": 0.5, "update_actor/loss": -1.5}),
        (2, {"update_actor/kl": 0.75}),
    ]
    assert run.is_finished


@pytest.mark.parametrize(
    ("module", "extra", "send"),
    [
        ("tensorboardX", "tensorboard", lambda to: write_tensorboard(Publisher(), to, METRICS)),
        ("wandb", "wandb", lambda to: send_to_wandb(METRICS, {}, to)),
        ("wandb", "wandb", lambda to: check_sink("wandb")),
    ],
)
def test_a_missing_extra_is_one_sentence_and_leaves_nothing(
    tmp_path, monkeypatch, module, extra, send
):
    monkeypatch.setitem(sys.modules, module, None)  # an import of it now fails
    with pytest.raises(MeshdialError) as error:
        send(tmp_path / "log")
    assert str(error.value) == (
        f"metrics.sink is {extra}, which needs the package {module}, and that is not "
        f"installed: pip install 'meshdial[{extra}]'."
    )
    assert list(tmp_path.iterdir()) == []


def test_check_sink_asks_for_nothing_that_is_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())
    check_sink("wandb")
    check_sink("none")
