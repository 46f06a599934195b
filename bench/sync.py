"""What a weight sync costs, beside a plain copy of the same bytes, in one run.

    python bench/sync.py                    # SmolLM2-135M's shapes in float32
    python bench/sync.py --shapes llama-1b  # 1.2 B parameters in bfloat16

Each round measures everything once, in turn: a copy of the exported file (`shutil.copyfile`, then
flushed to the disk, as an export is), an export, a load, a read of the file into memory (which
checks nothing), a reshard from the mesh of the export to another, a plain `device_put` of the same
arrays between the same devices, and an alias. Medians and spread are over the rounds; the file was
just written, so reads come from the page cache. Values are random, since zeros copy too fast.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "6")

import jax
import numpy as np

from rl import sharding
from rl.artifacts import Publisher, content_id, write_json
from rl.memory import Memory
from rl.models.families import WEIGHTS_FILE, write_model_files
from rl.models.spec import ModelConfig, ModelSpec, Parameters
from rl.models.transformer import parameter_shapes
from rl.processes.runtime import parse_process_layout
from rl.sync import synced
from rl.weights import export_weights, load_weights

SHAPES = {
    "smollm2-135m": (
        "float32",
        ModelConfig(49152, 576, 1536, 30, 9, 3, 64, tie_word_embeddings=True),
    ),
    "llama-1b": (
        "bfloat16",
        ModelConfig(128256, 2048, 8192, 16, 32, 8, 64, tie_word_embeddings=True),
    ),
}
MESHES = {
    "one device to another": "train:devices=1+decode:devices=1,first=1",
    "fsdp 4 to fsdp 2": "train:devices=4,fsdp=4+decode:devices=2,first=4,fsdp=2",
    "fsdp 4 to tensor 2": "train:devices=4,fsdp=4+decode:devices=2,first=4,tensor=2",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--meshes", choices=MESHES, help="only these")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where the files go (default: the temporary folder)")
    arguments = parser.parse_args()
    dtype, config = SHAPES[arguments.shapes]
    if arguments.layers:
        config = ModelConfig(**{**vars(config), "num_hidden_layers": arguments.layers})
    spec = ModelSpec(config, None, dtype)
    print(f"{arguments.shapes}, {config.num_hidden_layers} layers, {dtype}")
    for name in [arguments.meshes] if arguments.meshes else MESHES:
        layouts = parse_process_layout(MESHES[name])
        if any(config.num_key_value_heads % dict(mesh.axes).get("tensor", 1) for mesh in layouts):
            print(f"\n{name}: the heads cannot be divided")
            continue
        actor, rollout = (sharding.device_mesh(layouts, mesh.name) for mesh in layouts)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            report(name, measured(Path(folder), spec, actor, rollout, arguments.rounds))


def measured(folder: Path, spec: ModelSpec, actor, rollout, rounds: int) -> dict:
    """{what: (seconds of each round, CPU-seconds of each round, bytes)}."""
    shapes = parameter_shapes(spec)
    there = sharding.parameter_shardings(shapes, actor)
    here = sharding.parameter_shardings(shapes, rollout)
    parameters = random_parameters(spec, there)
    base, weights = folder / "base", folder / "weights"
    write_model_files(base, spec.config, {}, spec.dtype)
    write_json(Publisher(), base / "manifest.json", {"content_id": "sha256:0"})
    source_id = content_id(parameters)
    size = sum(value.nbytes for value in parameters.values())

    def export() -> None:
        options = {"base": base, "base_path": "../base", "version": 1}
        export_weights(
            Publisher(), weights, spec, parameters, source_content_id=source_id, **options
        )

    def sync_from(memory: Memory) -> None:
        with sharding.on(rollout):
            synced(memory, weights, spec, "sha256:0")

    def resharding() -> Callable[[], None]:
        memory = Memory()
        memory.put(parameters, "parameters", source_id, sharding.name_of(actor))
        return lambda: sync_from(memory)

    with sharding.on(rollout):
        held = Memory()
        held.put(
            jax.device_put(parameters, here), "parameters", source_id, sharding.name_of(rollout)
        )
    file = weights / WEIGHTS_FILE
    export()
    actions = {
        "copy": lambda: copy(file, folder / "copy"),
        "export": export,
        "read": lambda: read(file),
        "load": lambda: jax.block_until_ready(load_weights(weights, spec, here).parameters),
        "device_put": lambda: jax.block_until_ready(jax.device_put(parameters, here)),
        "reshard": resharding(),
        "alias": lambda: sync_from(held),
    }
    seconds, cpu_seconds = ({name: [] for name in actions} for _ in range(2))
    for number in range(rounds + 1):
        actions["reshard"] = resharding()
        for name, action in actions.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            action()
            if number:  # the first round compiles and fills caches
                seconds[name].append(time.perf_counter() - started)
                cpu_seconds[name].append(time.process_time() - cpu_started)
    return {name: (seconds[name], cpu_seconds[name], size) for name in actions}


def random_parameters(spec: ModelSpec, shardings: dict) -> Parameters:
    generator = np.random.default_rng(0)

    def make(shape: tuple[int, ...]) -> np.ndarray:
        values = generator.standard_normal(shape, np.float32)
        return values.astype(spec.dtype)

    return {
        name: jax.device_put(make(shape), shardings[name])
        for name, shape in parameter_shapes(spec).items()
    }


def copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


def read(file: Path) -> None:
    """The file's bytes in memory of their own."""
    memory = np.empty(file.stat().st_size, np.uint8)
    with open(file, "rb", buffering=0) as opened:
        done = 0
        while done < memory.size:
            done += opened.readinto(memory[done:].data)


def report(name: str, found: dict) -> None:
    beside = {"export": "copy", "load": "copy", "reshard": "device_put"}
    size = found["copy"][2]
    print(f"\n{name}, {size / 1e6:.0f} MB\n")
    print("| | GB/s | spread | CPU-seconds a GB | beside | ratio |\n|---|---|---|---|---|---|")
    for what, (seconds, cpu_seconds, _) in found.items():
        middle = statistics.median(seconds)
        if what == "alias":
            print(f"| alias | {middle * 1e3:.2f} ms | {spread(seconds, 1e3)} | | | |")
            continue
        other = beside.get(what)
        rates = [size / 1e9 / value for value in seconds]
        ratio = f"{statistics.median(found[other][0]) / middle:.2f}" if other else ""
        line = f"{size / 1e9 / middle:.2f} | {min(rates):.2f} to {max(rates):.2f}"
        cpu = statistics.median(cpu_seconds) / (size / 1e9)
        print(f"| {what} | {line} | {cpu:.2f} | {other or ''} | {ratio} |")


def spread(seconds: list[float], factor: float) -> str:
    return f"{min(seconds) * factor:.2f} to {max(seconds) * factor:.2f}"


if __name__ == "__main__":
    main()
