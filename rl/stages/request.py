"""What a stage is asked to do: its slice of the config and its paths."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.artifacts import artifact_id
from rl.errors import MeshdialError
from rl.models.spec import LoraConfig, ModelConfig, ModelSpec


@dataclass
class Request:
    """One stage of one iteration. `config` maps dotted keys to values that the results depend on,
    `cost` names those that they do not; `costs_found` collects what the stage measured of itself
    for its timings."""

    stage: str
    config: Mapping[str, Any]
    inputs: Mapping[str, Path]
    outputs: Mapping[str, Path]
    cost: Mapping[str, int | float | None]
    iteration: int = 0
    last: int = 0
    run: str = ""
    timings: Path | None = None
    root: Path = Path(".")
    costs_found: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Request":
        """Relative paths are below `cwd`; an input without a path is one the run does not have."""
        root = Path(values.get("cwd", "."))
        return cls(
            stage=values["stage"],
            config=values["config"],
            inputs={name: root / path for name, path in values["inputs"].items() if path},
            outputs={name: root / path for name, path in values["outputs"].items()},
            cost=dict(values.get("cost", {})),
            iteration=int(values.get("iteration") or 0),
            last=int(values.get("last") or 0),
            run=values.get("run") or "",
            timings=root / values["timings"] if values.get("timings") else None,
            root=root,
        )

    def provenance(self, inputs: Mapping[str, Path] | None = None, **more: Any) -> dict:
        """What an artifact of this stage says of its making; `inputs` are the request's own."""
        inputs = self.inputs if inputs is None else inputs
        return {
            "stage": self.stage,
            "stage_version": self.config["stage_version"],
            "config": {k: v for k, v in self.config.items() if k != "stage_version"},
            "inputs": {name: artifact_id(path) for name, path in sorted(inputs.items())},
            **more,
        }

    def shown(self, path: Path) -> str:
        """`path` as whoever asked for the stage would write it."""
        return os.path.relpath(path, self.root)

    def input(self, name: str) -> Path:
        if name not in self.inputs:
            raise MeshdialError(f"stage {self.stage} needs --input {name}=PATH")
        return self.inputs[name]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around the model's programs and the loop that drives them, for the timings."""
        started = time.perf_counter()
        yield
        spent = time.perf_counter() - started
        self.costs_found["compute_seconds"] = self.costs_found.get("compute_seconds", 0.0) + spent

    def spec(self, config: ModelConfig, dtype: str) -> ModelSpec:
        """The policy's: the base's sizes with this run's adapter."""
        return ModelSpec(config, _lora(self.config["lora"]), dtype)

    def critic_spec(self, config: ModelConfig, dtype: str) -> ModelSpec:
        """The critic's: its trunk's sizes with its own adapter and a value head."""
        return ModelSpec(config, _lora(self.config["critic.lora"]), dtype, head="value")


def _lora(block: Mapping[str, Any] | None) -> LoraConfig | None:
    if block is None or block["rank"] == 0:
        return None
    return LoraConfig(block["rank"], float(block["alpha"]), tuple(block["targets"]))


def told_bytes(count: int) -> str:
    """A number of bytes for a progress line: `0 B`, `38.9 kB`, `5.0 MB`."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
