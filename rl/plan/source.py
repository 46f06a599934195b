"""The sizes of a model before there is a single weight of it."""

from collections.abc import Mapping
from pathlib import Path

from rl.errors import MeshdialError
from rl.models.config_file import read_model_config
from rl.models.json_file import read_json_object
from rl.models.scratch import scratch_config
from rl.models.sources import PACKAGE_PREFIX, SCRATCH, open_model
from rl.models.spec import ModelConfig


def model_sizes(model: Mapping, given: str | None, shared: Path) -> ModelConfig:
    """Of a config's model block; from the file or folder `given` in its place, where there is one.

    `shared` holds the models that runs have made, which is where a package's sizes are looked up.
    MeshdialError where the sizes are known only after a download.
    """
    if given is not None:
        return _of_path(Path(given).expanduser(), "--model")
    source = model["source"]
    if source == SCRATCH:
        return scratch_config(model["architecture"])
    made = _made_from(source, shared)
    if made is not None:
        return _of_file(made / "config.json")
    if source.startswith(PACKAGE_PREFIX):
        raise MeshdialError(
            f"model.source is {source}, whose sizes are not known before it is downloaded: give "
            "--model with a config.json"
        )
    return _of_path(Path(source).expanduser(), "model.source")


def value_model_sizes(source: str, shared: Path) -> ModelConfig | None:
    """Of a critic's or a reward model's source; None where there is no such model yet."""
    file = (_made_from(source, shared) or Path(source).expanduser()) / "config.json"
    return _of_file(file) if file.is_file() else None


def _made_from(source: str, shared: Path) -> Path | None:
    """The folder of the model that a run made from this source."""
    for manifest in sorted(shared.glob("*/manifest.json")):
        is_whole = (manifest.parent / "config.json").is_file()
        if is_whole and read_json_object(manifest).get("source") == source:
            return manifest.parent
    return None


def _of_path(path: Path, key: str) -> ModelConfig:
    """Of a config.json, a folder with one, an adapter's folder, or a .gguf file."""
    if (path / "config.json").is_file():
        return _of_file(path / "config.json")
    if path.suffix == ".json" and path.is_file():
        return _of_file(path)
    if (path / "adapter_config.json").is_file() or path.suffix == ".gguf":
        return open_model(str(path)).config
    raise MeshdialError(f"{key} is {str(path)!r}, which is no config.json and no folder with one")


def _of_file(path: Path) -> ModelConfig:
    try:
        return read_model_config(read_json_object(path))
    except MeshdialError as error:
        sentence = str(error)
        raise MeshdialError(
            sentence if sentence.startswith(str(path)) else f"{path}: {sentence}"
        ) from None
