"""The metrics table, sent on to TensorBoard or Weights & Biases. Both are optional extras."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa

from rl.artifacts import Publisher
from rl.errors import MeshdialError
from rl.report.metrics import run_name


def write_tensorboard(publisher: Publisher, folder: Path, metrics: pa.Table) -> None:
    """Replace `folder` by a TensorBoard log of the whole run: each figure as `stage/name`.

    Event files carry the time and host of their writing, so the folder is a view of the run and not
    an artifact of it. Raises MeshdialError if the extra `tensorboard` is not installed.
    """
    module = _extra("tensorboard")
    with publisher.directory(folder) as draft, module.SummaryWriter(str(draft)) as writer:
        for row in metrics.to_pylist():
            tag = f"{row['stage']}/{row['name']}"
            writer.add_scalar(tag, row["value"], row["iteration"])


def send_to_wandb(
    metrics: pa.Table, config: Mapping[str, Any], folder: Path, project: str = "meshdial"
) -> str:
    """Send the whole run to Weights & Biases as a new run there, and return its address.

    wandb reads its key, entity and mode (offline, say) from its own settings and environment, and
    keeps its files below `folder`. Runs of one name are grouped: a run that was extended appears
    once more, because a step that was sent cannot be sent again.

    Raises MeshdialError if the extra `wandb` is not installed.
    """
    module = _extra("wandb")
    name = run_name(metrics)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"project": project, "name": name, "group": name, "dir": str(folder)}
    with module.init(config=dict(config), **settings) as run:
        rows = sorted(metrics.to_pylist(), key=lambda row: row["iteration"])
        for iteration, figures in groupby(rows, key=lambda row: row["iteration"]):
            run.log({f"{f['stage']}/{f['name']}": f["value"] for f in figures}, step=iteration)
        return run.url or ""


def check_sink(sink: str) -> None:
    """MeshdialError if `sink` (none, tensorboard or wandb) needs an extra that is not installed.

    Cheap, so that a run can ask before it starts rather than when it reports.
    """
    if sink in MODULES and not _is_installed(MODULES[sink]):
        raise _missing(sink)


def _extra(sink: str) -> ModuleType:
    check_sink(sink)
    return importlib.import_module(MODULES[sink])


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def _missing(sink: str) -> MeshdialError:
    return MeshdialError(
        f"metrics.sink is {sink}, which needs the package {MODULES[sink]}, and that is not "
        f"installed: pip install 'meshdial[{sink}]'."
    )


# The package behind each sink; the extra of the distribution is called like the sink.
MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
