"""A model as a Hugging Face folder, in and out, and the map between its names and ours.

Ours are flat, with kernels as [in, out]; a checkpoint stores [out, in]. Reading gives views of
memory maps, so a kernel is a transposed view and no byte is copied before it is needed; writing
takes one tensor at a time.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rl.errors import MeshdialError
from rl.models.config_file import (
    CLASSIFIER,
    head_of,
    read_model_config,
    write_model_config,
)
from rl.models.json_file import read_json_object, to_json
from rl.models.safetensors_file import DTYPES, LazyTensor, read_safetensors, write_safetensors
from rl.models.spec import Head, ModelConfig, ModelSpec
from rl.models.tokenizer import TOKENIZER_FILES
from rl.models.transformer import parameter_shapes

WEIGHT_DTYPES = {str(DTYPES[tag]): DTYPES[tag] for tag in ("F32", "BF16", "F16")}
TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
PEFT_PREFIX = "base_model.model."
WEIGHTS_FILE, ADAPTER_FILE = "model.safetensors", "adapter_model.safetensors"

# Buffers that old checkpoints carry and every implementation computes for itself.
_COMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_SUFFIXES = {"embedding": "weight", "kernel": "weight", "scale": "weight", "bias": "bias"}
_LORA_SUFFIXES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}


def hf_name(name: str) -> str:
    """`layers.0.mlp.up_proj.kernel` -> `model.layers.0.mlp.up_proj.weight`."""
    stem, suffix = name.rsplit(".", 1)
    prefix = "" if stem in ("lm_head", "score") else "model."
    return f"{prefix}{stem}.{_SUFFIXES[suffix]}"


def peft_name(name: str) -> str:
    """`layers.0.mlp.up_proj.lora_a` -> PEFT's `base_model.model.model.layers...lora_A.weight`."""
    stem, suffix = name.rsplit(".", 1)
    return f"{PEFT_PREFIX}model.{stem}.{_LORA_SUFFIXES[suffix]}"


def stored_name(name: str) -> str:
    """The name of a parameter, an adapter's or a model's, in a checkpoint."""
    return peft_name(name) if name.endswith(tuple(_LORA_SUFFIXES)) else hf_name(name)


def is_transposed(name: str) -> bool:
    """Whether a checkpoint stores this parameter as [out, in] where ours is [in, out]."""
    return name.endswith((".kernel", ".lora_a", ".lora_b"))


def transposed(tensor) -> np.ndarray | LazyTensor:
    """[out, in] <-> [in, out]: a view of a numpy array, a promise of one for anything else."""
    if isinstance(tensor, np.ndarray):
        return tensor.T
    shape, dtype = tuple(tensor.shape)[::-1], np.dtype(tensor.dtype)
    return LazyTensor(shape, dtype, lambda: np.asarray(tensor).T)


def read_model(folder: Path | str, head: Head = "lm") -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """(config, parameters by our names) of a Hugging Face folder, one file or sharded.

    `head` value: of a sequence-classification model with one label, whose score is the value.

    Parameters are read-only views of memory maps in the checkpoint's own dtype. Raises
    MeshdialError for a folder without config.json or safetensors, an architecture that is not
    implemented, and a tensor that is missing, misshapen or unknown.
    """
    folder = Path(folder)
    values = read_config(folder)
    config = model_config(values, folder / "config.json")
    _check_head(folder, values, head)
    tensors = _read_tensors(folder)
    return config, named_parameters(config, tensors, folder, head)


def _check_head(folder: Path, values: dict, wanted: Head) -> None:
    try:
        found = head_of(values)
    except MeshdialError as error:
        raise MeshdialError(f"{folder / 'config.json'}: {error}") from error
    if found != wanted:
        kinds = {"lm": "a language model (ForCausalLM)", "value": f"a classifier ({CLASSIFIER})"}
        raise MeshdialError(
            f"{folder} holds {kinds[found]} by the architectures of its config.json, expected "
            f"{kinds[wanted]}"
        )


def read_config(folder: Path) -> dict:
    """The folder's config.json."""
    if not (folder / "config.json").is_file():
        raise MeshdialError(f"{folder} has no config.json, so it is no Hugging Face model folder")
    return read_json_object(folder / "config.json")


def model_config(values: dict, path: Path) -> ModelConfig:
    """The config in our words; an unsupported one is refused with its file named."""
    try:
        return read_model_config(values)
    except MeshdialError as error:
        raise MeshdialError(f"{path}: {error}") from error


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    if (folder / WEIGHTS_FILE).is_file():
        return read_safetensors(folder / WEIGHTS_FILE)
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        pickled = " (pickled weights are never loaded)" if any(folder.glob("*.bin")) else ""
        raise MeshdialError(
            f"{folder} has neither {WEIGHTS_FILE} nor model.safetensors.index.json{pickled}"
        )
    shard_names = read_json_object(index).get("weight_map")
    if not isinstance(shard_names, dict):
        raise MeshdialError(f"{index} has no weight_map")
    shards = {name: _read_shard(folder, index, name) for name in sorted({*shard_names.values()})}
    for tensor, shard in shard_names.items():
        if tensor not in shards[shard]:
            raise MeshdialError(f"{folder / shard} lacks tensor {tensor}, which {index} puts there")
    return {tensor: shards[shard][tensor] for tensor, shard in shard_names.items()}


def _read_shard(folder: Path, index: Path, name: str) -> dict[str, np.ndarray]:
    if not (folder / name).is_file():
        raise MeshdialError(f"{folder / name} is missing; {index} names it")
    return read_safetensors(folder / name)


def named_parameters(
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray | LazyTensor],
    where: Path,
    head: Head = "lm",
) -> dict[str, np.ndarray | LazyTensor]:
    """Checkpoint tensors under our names, all of them there, each of the shape it must have."""
    parameters = {}
    for name, shape in parameter_shapes(ModelSpec(config, head=head)).items():
        stored = hf_name(name)
        if stored not in tensors:
            raise MeshdialError(f"{where}: tensor {stored} is missing")
        tensor = tensors[stored]
        expected = shape[::-1] if is_transposed(name) else shape
        if tuple(tensor.shape) != expected:
            raise MeshdialError(
                f"{where}: tensor {stored} has shape {list(tensor.shape)};"
                f" the model's config makes it {list(expected)}"
            )
        parameters[name] = transposed(tensor) if is_transposed(name) else tensor
    _refuse_unknown(config, tensors, {hf_name(name) for name in parameters}, where)
    return parameters


def _refuse_unknown(config: ModelConfig, tensors: Mapping, known: set[str], where: Path) -> None:
    """A tensor that we would ignore means that the model is not the one that config.json says."""
    if config.tie_word_embeddings:
        known = known | {"lm_head.weight"}  # some checkpoints store the tied matrix twice
    unknown = sorted(name for name in tensors if name not in known and not _COMPUTED.search(name))
    if unknown:
        raise MeshdialError(
            f"{where}: tensor {unknown[0]} has no place in the model that its config describes"
        )


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """File name -> content of what belongs to the tokenizer in a model folder."""
    return {
        name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()
    }


def write_model(
    folder: Path | str,
    config: ModelConfig,
    parameters: Mapping[str, np.ndarray | LazyTensor],
    tokenizer_files: Mapping[str, bytes],
    dtype: str = "float32",
    token_ids: Mapping[str, int | list[int] | None] | None = None,
    head: Head = "lm",
) -> None:
    """Writes a folder that transformers loads too: config, weights cast to `dtype`, tokenizer.

    `parameters` are by our names: numpy or jax arrays, or lazy tensors, which are made one at a
    time. `token_ids` (bos_token_id, ...) go to config.json, and to generation_config.json where
    `tokenizer_files` has none. The same input gives the same bytes.
    """
    write_model_files(folder, config, tokenizer_files, dtype, token_ids, head)
    stored = {
        hf_name(name): transposed(tensor) if is_transposed(name) else tensor
        for name, tensor in parameters.items()
    }
    write_safetensors(Path(folder) / WEIGHTS_FILE, stored, weight_dtype(dtype))


def write_model_files(
    folder: Path | str,
    config: ModelConfig,
    tokenizer_files: Mapping[str, bytes],
    dtype: str = "float32",
    token_ids: Mapping[str, int | list[int] | None] | None = None,
    head: Head = "lm",
) -> None:
    """Writes what `write_model` does but the weights."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    known_ids = {key: value for key, value in (token_ids or {}).items() if value is not None}
    files = {"generation_config.json": to_json(known_ids), **tokenizer_files}
    files["config.json"] = to_json(
        {**write_model_config(config, head), **known_ids, "torch_dtype": dtype}
    )
    for name, content in files.items():
        (folder / name).write_bytes(content)


def weight_dtype(name: str) -> np.dtype:
    if name not in WEIGHT_DTYPES:
        raise MeshdialError(f"model dtype: found {name!r}; expected {', '.join(WEIGHT_DTYPES)}")
    return WEIGHT_DTYPES[name]
