"""A policy version's trained parameters as files that depend on no device layout.

    manifest.json            version, parent, content ids, and per tensor dtype, shape, block hashes
    adapter_config.json      under LoRA: a folder that PEFT loads
    adapter_model.safetensors
    config.json ...          without LoRA: a Hugging Face model folder with its tokenizer
    model.safetensors

The content id and the block hashes are those of the tensors in the file, by their names there and
with kernels as [out, in], so that a block is one range of its bytes. Whatever mesh wrote a folder,
any mesh reads it, and reads what its devices need.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from rl import group
from rl.artifacts import (
    MANIFEST,
    Publisher,
    artifact_id,
    content_id,
    id_of_blocks,
    read_json,
    write_json,
)
from rl.block_reader import Loaded, Wanted, read_tensors
from rl.block_writer import Stored, write_in_batches, write_tensors
from rl.errors import MeshdialError
from rl.models.config_file import write_model_config
from rl.models.families import (
    ADAPTER_FILE,
    TOKEN_ID_KEYS,
    WEIGHTS_FILE,
    is_transposed,
    model_config,
    read_config,
    read_tokenizer_files,
    stored_name,
    weight_dtype,
    write_model_files,
)
from rl.models.safetensors_file import read_header
from rl.models.spec import ModelSpec
from rl.models.transformer import parameter_shapes, trainable_names

FORMAT = 2
_MANIFEST_KEYS = ("version", "parent", "content_id", "source_content_id", "dtype", "tensors")


def export_weights(
    publisher: Publisher,
    path: str | Path,
    spec: ModelSpec,
    trainable: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    *,
    base: str | Path,
    base_path: str,
    version: int,
    parent: str | None = None,
    source_content_id: str | None = None,
    manifest_extra: Mapping[str, Any] | None = None,
) -> dict:
    """Writes the folder in `spec.dtype` and returns its manifest.

    `trainable` are NumPy or JAX arrays by our names, sharded in any way, cast here where they have
    another dtype; or batches of them, of which one is in memory at a time. `base` is the folder of
    the model they belong to, `base_path` what an adapter says of where that is. `source_content_id`
    is that of the parameters in memory before any cast (computed if not given, unless they come in
    batches). A few blocks at a time are copied to the host; with several processes, each writes
    some. The same parameters give the same bytes. Nothing is published if a batch raises.
    """
    batches = trainable
    if isinstance(trainable, Mapping):
        batches = [{name: trainable[name] for name in trainable_names(spec)}]
    with publisher.directory(path) as folder:
        tensors = _write_folder(folder, spec, batches, Path(base), base_path)
        manifest = {
            **(manifest_extra or {}),
            **_described_weights(spec, tensors),
            "version": version,
            "parent": parent,
            "source_content_id": source_content_id or content_id(trainable),
            "base_content_id": artifact_id(base),
        }
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
    shardings: Mapping[str, jax.sharding.Sharding],
    *,
    version: int | None = None,
    base_content_id: str | None = None,
) -> Loaded:
    """The parameters of an export by our names, in its dtype, sharded as `shardings` says by name.

    Of the file, the blocks that this process's devices need are read, each checked against its
    hash. MeshdialError, in one sentence, if the export is of another model or adapter than
    `spec`'s, of another `version` or base than those given, or if a tensor is missing, misshapen
    or damaged.
    """
    path = Path(path)
    manifest = read_manifest(path)
    check_identity(path, manifest, version, base_content_id)
    _check_model(path, manifest, spec)
    names = {stored_name(name): name for name in trainable_names(spec)}
    file = path / (ADAPTER_FILE if spec.lora else WEIGHTS_FILE)
    surplus = sorted(read_header(file).keys() - names.keys())
    if surplus:
        raise MeshdialError(f"{file} has a tensor {surplus[0]}, which its manifest does not list")
    return _loaded(file, spec, names, manifest, "content_id", manifest["dtype"], shardings)


def load_model(
    folder: str | Path,
    manifest: Mapping[str, Any],
    dtype: str,
    shardings: Mapping[str, jax.sharding.Sharding],
) -> Loaded:
    """All parameters of a model folder by our names, cast to `dtype`, sharded as `shardings` says.

    `manifest` is that of the folder: it lists the blocks, and each that is read must match. What
    else is wrong is a MeshdialError as for `load_weights`.
    """
    folder = Path(folder)
    for key in ("tensors", "parameters_content_id"):
        if key not in manifest:
            raise MeshdialError(f"{folder / MANIFEST} has no key {key}")
    config = model_config(read_config(folder), folder / "config.json")
    spec = ModelSpec(config, head=manifest.get("head", "lm"))
    names = {stored_name(name): name for name in trainable_names(spec)}
    key = "parameters_content_id"
    return _loaded(folder / WEIGHTS_FILE, spec, names, manifest, key, dtype, shardings)


def _loaded(
    file: Path,
    spec: ModelSpec,
    names: Mapping[str, str],
    manifest: Mapping[str, Any],
    identity_key: str,
    dtype: str,
    shardings: Mapping[str, jax.sharding.Sharding],
) -> Loaded:
    """The tensors that `names` gives our names to, as the manifest lists them."""
    shapes = _stored_shapes(spec, names)
    _check_tensors_listed(file.parent / MANIFEST, manifest, identity_key, shapes)
    wanted = {
        ours: Wanted(name, is_transposed(ours), shardings[ours], weight_dtype(dtype))
        for name, ours in sorted(names.items())
    }
    return read_tensors(file, manifest["tensors"], wanted)


def _described_weights(spec: ModelSpec, tensors: Mapping[str, dict]) -> dict:
    """What the manifest says of the weights themselves."""
    return {
        "kind": "weights",
        "format": FORMAT,
        "content_id": id_of_blocks(tensors),
        "dtype": spec.dtype,
        "model": write_model_config(spec.config),
        "lora": _lora_record(spec),
        "tensors": tensors,
    }


def _lora_record(spec: ModelSpec) -> dict | None:
    if spec.lora is None:
        return None
    return {
        "rank": spec.lora.rank,
        "alpha": spec.lora.alpha,
        "targets": sorted(spec.lora.targets),
    }


def _write_folder(
    folder: Path, spec: ModelSpec, batches: Iterable[Mapping], base: Path, base_path: str
) -> dict[str, dict]:
    """A model with the base's tokenizer, or an adapter; returns what its tensors' blocks are."""
    if spec.lora:
        write_json(Publisher(), folder / "adapter_config.json", _adapter_config(spec, base_path))
        file = folder / ADAPTER_FILE
    else:
        if group.is_first():
            token_ids = {key: read_config(base).get(key) for key in TOKEN_ID_KEYS}
            files = read_tokenizer_files(base)
            write_model_files(folder, spec.config, files, spec.dtype, token_ids)
        file = folder / WEIGHTS_FILE
    shapes = _stored_shapes(spec, {stored_name(name): name for name in trainable_names(spec)})
    return write_in_batches(file, shapes, map(_stored, batches), weight_dtype(spec.dtype))


def write_parameters(file: Path, parameters: Mapping[str, Any], dtype: str) -> dict[str, dict]:
    """Writes parameters (by our names, cast to `dtype`) under their stored names, and returns
    {dtype, shape, blocks} of each tensor by its stored name."""
    return write_tensors(file, _stored(parameters), weight_dtype(dtype))


def _stored(parameters: Mapping[str, Any]) -> dict[str, Stored]:
    return {
        stored_name(name): Stored(array, is_transposed(name)) for name, array in parameters.items()
    }


def _stored_shapes(spec: ModelSpec, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """The shape as stored of each tensor that `names` gives our names to."""
    shapes = parameter_shapes(spec)
    return {
        name: shapes[ours][::-1] if is_transposed(ours) else shapes[ours]
        for name, ours in names.items()
    }


def _adapter_config(spec: ModelSpec, base_path: str) -> dict:
    """As PEFT's `save_pretrained` writes it."""
    return {
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


def check_identity(
    path: Path, manifest: Mapping, version: int | None, base: str | None = None
) -> None:
    """MeshdialError if a policy or its export is of another version, or on another base, than
    those given."""
    if version is not None and manifest["version"] != version:
        raise MeshdialError(
            f"{path} holds policy version {manifest['version']}, expected {version}"
        )
    if base is not None and manifest.get("base_content_id") != base:
        raise MeshdialError(
            f"{path} belongs to the base {manifest.get('base_content_id')}, expected {base}"
        )


def _check_model(path: Path, manifest: dict, spec: ModelSpec) -> None:
    for part, wanted in (("model", write_model_config(spec.config)), ("lora", _lora_record(spec))):
        found = manifest.get(part)
        if found == wanted:
            continue
        if not isinstance(found, dict) or wanted is None:
            raise MeshdialError(f"{path} was exported with {part} {found}, expected {wanted}")
        key = next(key for key in sorted({**found, **wanted}) if found.get(key) != wanted.get(key))
        raise MeshdialError(
            f"{path} was exported with {part}.{key} {found.get(key)}, expected {wanted.get(key)}"
        )


def _check_tensors_listed(
    where: Path, manifest: Mapping[str, Any], key: str, shapes: Mapping[str, tuple]
) -> None:
    """The manifest lists the tensors of this model, and its content id is that of its list."""
    tensors = manifest["tensors"]
    try:
        is_consistent = id_of_blocks(tensors) == manifest[key]
    except (KeyError, TypeError, AttributeError):
        is_consistent = False
    if not is_consistent:
        raise MeshdialError(f"{where} is damaged: its tensors do not match its content id")
    for name in sorted(shapes.keys() | tensors.keys()):
        found = tensors.get(name, {}).get("shape")
        wanted = list(shapes[name]) if name in shapes else None
        if found != wanted:
            raise MeshdialError(f"{where}: {name} has shape {found}, expected {wanted}")
