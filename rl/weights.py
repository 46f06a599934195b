"""A policy version's trained parameters as files that depend on no device layout.

    manifest.json            version, parent, content ids, and per tensor dtype, shape, block hashes
    adapter_config.json      under LoRA: a folder that PEFT loads
    adapter_model.safetensors
    config.json ...          without LoRA: a Hugging Face model folder with its tokenizer
    model.safetensors

The content id and the block hashes are those of the parameters in memory, by our names and with
kernels as [in, out]: what a process holds and what a file says are the same where the ids are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl.artifacts import (
    MANIFEST,
    Publisher,
    artifact_id,
    content_id,
    described,
    host_array,
    id_of_blocks,
    read_json,
    write_json,
)
from rl.errors import MeshdialError
from rl.models.families import (
    TOKEN_ID_KEYS,
    hf_name,
    is_transposed,
    peft_name,
    read_config,
    read_tokenizer_files,
    transposed,
    weight_dtype,
    write_model,
)
from rl.models.safetensors_file import LazyTensor, read_safetensors, write_safetensors
from rl.models.spec import ModelSpec
from rl.models.transformer import parameter_shapes, trainable_names

FORMAT = 1
_MANIFEST_KEYS = ("version", "parent", "content_id", "source_content_id", "dtype", "tensors")


def export_weights(
    publisher: Publisher,
    path: str | Path,
    spec: ModelSpec,
    trainable: Mapping[str, Any],
    *,
    base: str | Path,
    base_path: str,
    version: int,
    parent: str | None = None,
    source_content_id: str | None = None,
    manifest_extra: Mapping[str, Any] | None = None,
) -> dict:
    """Writes the folder in `spec.dtype` and returns its manifest.

    `trainable` are NumPy or JAX arrays by our names, cast here where they have another dtype.
    `base` is the folder of the model they belong to, `base_path` what an adapter says of where
    that is. `source_content_id` is that of the parameters before any cast (computed if not given).
    One tensor at a time is copied to the host. The same parameters give the same bytes.
    """
    tensors = {name: _cast(trainable[name], spec.dtype) for name in trainable_names(spec)}
    manifest = {
        **(manifest_extra or {}),
        **_described_weights(spec, tensors),
        "version": version,
        "parent": parent,
        "source_content_id": source_content_id or content_id(trainable),
        "base_content_id": artifact_id(base),
    }
    with publisher.directory(path) as folder:
        if spec.lora:
            _write_adapter(folder, spec, tensors, base_path)
        else:
            _write_full(folder, spec, tensors, Path(base))
        write_json(Publisher(), folder / MANIFEST, manifest)
    return manifest


def read_manifest(path: str | Path) -> dict:
    """The manifest of an export; MeshdialError if it is missing, damaged or of another format."""
    where = Path(path) / MANIFEST
    manifest = read_json(where)
    if not isinstance(manifest, dict) or manifest.get("kind") != "weights":
        raise MeshdialError(f"{where} is not the manifest of exported weights")
    if manifest.get("format") != FORMAT:
        raise MeshdialError(f"{where} has format {manifest.get('format')}, expected {FORMAT}")
    for key in _MANIFEST_KEYS:
        if key not in manifest:
            raise MeshdialError(f"{where} has no key {key}")
    return manifest


def load_weights(
    path: str | Path,
    spec: ModelSpec,
    *,
    version: int | None = None,
    base_content_id: str | None = None,
) -> dict[str, np.ndarray]:
    """The parameters of an export by our names, in its dtype, each block checked against its hash.

    MeshdialError, in one sentence, if the export is of another model or adapter than `spec`'s, of
    another `version` or base than those given, or if a tensor is missing, misshapen or damaged.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _check_identity(path, manifest, version, base_content_id)
    _check_model(path, manifest, spec)
    names = trainable_names(spec)
    _check_tensors_listed(path, manifest, {name: parameter_shapes(spec)[name] for name in names})
    file = path / ("adapter_model.safetensors" if spec.lora else "model.safetensors")
    if not file.is_file():
        raise MeshdialError(f"{file} is missing")
    stored, stored_name = read_safetensors(file), peft_name if spec.lora else hf_name
    surplus = sorted(stored.keys() - {stored_name(name) for name in names})
    if surplus:
        raise MeshdialError(f"{file} has a tensor {surplus[0]}, which its manifest does not list")
    return {
        name: _verified(file, stored_name(name), is_transposed(name), stored, entry)
        for name, entry in sorted(manifest["tensors"].items())
    }


def _cast(array: Any, dtype: str) -> LazyTensor:
    """The array on the host in that dtype, made when asked for and not kept."""
    wanted = weight_dtype(dtype)
    return LazyTensor(
        tuple(array.shape), wanted, lambda: host_array(array).astype(wanted, copy=False)
    )


def _described_weights(spec: ModelSpec, tensors: Mapping[str, LazyTensor]) -> dict:
    """What the manifest says of the weights themselves."""
    described_tensors = {name: described(np.asarray(tensor)) for name, tensor in tensors.items()}
    return {
        "kind": "weights",
        "format": FORMAT,
        "content_id": id_of_blocks(described_tensors),
        "dtype": spec.dtype,
        "model": spec.config.to_hf(),
        "lora": _lora_record(spec),
        "tensors": described_tensors,
    }


def _lora_record(spec: ModelSpec) -> dict | None:
    if spec.lora is None:
        return None
    return {
        "rank": spec.lora.rank,
        "alpha": spec.lora.alpha,
        "targets": sorted(spec.lora.targets),
    }


def _write_full(
    folder: Path, spec: ModelSpec, tensors: Mapping[str, LazyTensor], base: Path
) -> None:
    """A whole model, with the base's tokenizer."""
    values = read_config(base)
    token_ids = {key: values.get(key) for key in TOKEN_ID_KEYS}
    files = read_tokenizer_files(base)
    write_model(folder, spec.config, tensors, files, spec.dtype, token_ids)


def _write_adapter(
    folder: Path, spec: ModelSpec, tensors: Mapping[str, LazyTensor], base_path: str
) -> None:
    """An adapter as PEFT's `save_pretrained` writes it."""
    config = {
        "base_model_name_or_path": base_path,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": spec.lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": spec.lora.rank,
        "target_modules": sorted(spec.lora.targets),
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }
    write_json(Publisher(), folder / "adapter_config.json", config)
    stored = {peft_name(name): transposed(tensor) for name, tensor in tensors.items()}
    file = folder / "adapter_model.safetensors"
    write_safetensors(file, stored, weight_dtype(spec.dtype))


def _check_identity(path: Path, manifest: dict, version: int | None, base: str | None) -> None:
    if version is not None and manifest["version"] != version:
        raise MeshdialError(
            f"{path} holds policy version {manifest['version']}, expected {version}"
        )
    if base is not None and manifest.get("base_content_id") != base:
        raise MeshdialError(
            f"{path} belongs to the base {manifest.get('base_content_id')}, expected {base}"
        )


def _check_model(path: Path, manifest: dict, spec: ModelSpec) -> None:
    for part, wanted in (("model", spec.config.to_hf()), ("lora", _lora_record(spec))):
        found = manifest.get(part)
        if found == wanted:
            continue
        if not isinstance(found, dict) or wanted is None:
            raise MeshdialError(f"{path} was exported with {part} {found}, expected {wanted}")
        key = next(key for key in sorted({**found, **wanted}) if found.get(key) != wanted.get(key))
        raise MeshdialError(
            f"{path} was exported with {part}.{key} {found.get(key)}, expected {wanted.get(key)}"
        )


def _check_tensors_listed(path: Path, manifest: dict, shapes: Mapping[str, tuple]) -> None:
    """The manifest lists the tensors of this model, and its content id is that of its list."""
    where, tensors = path / MANIFEST, manifest["tensors"]
    try:
        is_consistent = id_of_blocks(tensors) == manifest["content_id"]
    except (KeyError, TypeError, AttributeError):
        is_consistent = False
    if not is_consistent:
        raise MeshdialError(f"{where} is damaged: its tensors do not match its content id")
    for name in sorted(shapes.keys() | tensors.keys()):
        found = tensors.get(name, {}).get("shape")
        wanted = list(shapes[name]) if name in shapes else None
        if found != wanted:
            raise MeshdialError(f"{where}: {name} has shape {found}, expected {wanted}")


def _verified(
    file: Path, name: str, is_stored_transposed: bool, stored: Mapping, entry: Mapping
) -> np.ndarray:
    """A tensor's own copy of its values, which are those that the manifest was written for."""
    if name not in stored:
        raise MeshdialError(f"{file} has no tensor {name}")
    tensor = transposed(stored[name]) if is_stored_transposed else stored[name]
    array = np.array(tensor, order="C")
    found = described(array)
    for key in ("dtype", "shape"):
        if found[key] != entry[key]:
            raise MeshdialError(
                f"{file}: tensor {name} has {key} {found[key]}, its manifest says {entry[key]}"
            )
    for number, (one, other) in enumerate(zip(found["blocks"], entry["blocks"], strict=True)):
        if one != other:
            raise MeshdialError(
                f"{file} is damaged: block {number} of tensor {name} does not match its hash"
            )
    return array
