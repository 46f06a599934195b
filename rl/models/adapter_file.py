"""A PEFT LoRA adapter folder, merged into its base tensor by tensor.

kernel + lora_a @ lora_b * scale, in float32, where scale is alpha / rank (or alpha / sqrt(rank)
under rank-stabilised LoRA, Kalajdzievski 2023). What a plain adapter does not have (DoRA, trained
biases, whole modules) is refused: ignoring it would silently give another model.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from rl.errors import MeshdialError
from rl.models.families import peft_name
from rl.models.json_file import read_json_object
from rl.models.safetensors_file import LazyTensor, read_safetensors

Tensors = Mapping[str, np.ndarray | LazyTensor]

_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}


def read_adapter(folder: Path) -> tuple[str, Callable[[Tensors], Tensors]]:
    """(the base's source, base parameters -> merged parameters) of an adapter folder.

    A base path is looked up from the adapter's folder first, then from the working directory.
    """
    path = folder / "adapter_config.json"
    config = read_json_object(path)
    for key, allowed in _PLAIN.items():
        if config.get(key, allowed[0]) not in allowed:
            raise MeshdialError(
                f"{path}: {key} is {config[key]!r}; only a plain LoRA adapter can be merged"
            )
    if not (folder / "adapter_model.safetensors").is_file():
        raise MeshdialError(f"{folder} has no adapter_model.safetensors")
    tensors = read_safetensors(folder / "adapter_model.safetensors")
    base = _base_source(path, config)
    _check_base(folder / "manifest.json", Path(base) / "manifest.json")
    return base, partial(_merge, folder, _scale(path, config), tensors)


def _base_source(path: Path, config: dict) -> str:
    source = config.get("base_model_name_or_path")
    if not isinstance(source, str) or not source:
        raise MeshdialError(f"{path}: base_model_name_or_path is {source!r}, expected a source")
    beside = path.parent / source
    if beside.exists() and beside.resolve() == path.parent.resolve():
        raise MeshdialError(f"{path}: base_model_name_or_path is the adapter itself")
    return str(beside) if beside.exists() else source


def _check_base(exported: Path, base: Path) -> None:
    """An adapter that says which base it was trained on is merged into no other."""
    if not exported.is_file() or not base.is_file():
        return
    wanted = read_json_object(exported).get("base_content_id")
    found = read_json_object(base).get("content_id")
    if wanted is not None and wanted != found:
        raise MeshdialError(f"{exported}: base_content_id is {wanted}, but {base} has {found}")


def _scale(path: Path, config: dict) -> float:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise MeshdialError(f"{path}: r is {rank!r} and lora_alpha {alpha!r}, expected numbers")
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


def _merge(folder: Path, scale: float, tensors: Tensors, base: Tensors) -> Tensors:
    merged, used = dict(base), set()
    for name in base:
        stem = name.removesuffix(".kernel")
        pair = (peft_name(f"{stem}.lora_a"), peft_name(f"{stem}.lora_b"))
        if name == stem or not tensors.keys() & set(pair):
            continue
        merged[name] = _merged_kernel(folder, scale, base[name], pair, tensors)
        used.update(pair)
    unknown = sorted(tensors.keys() - used)
    if unknown:
        raise MeshdialError(f"{folder}: adapter tensor {unknown[0]} has no place in the base model")
    if not used:
        raise MeshdialError(f"{folder}: the adapter holds no tensor")
    return merged


def _merged_kernel(folder: Path, scale: float, kernel, pair: tuple[str, str], tensors: Tensors):
    missing = [name for name in pair if name not in tensors]
    if missing:
        raise MeshdialError(f"{folder}: adapter tensor {missing[0]} is missing")
    a, b = (tensors[name] for name in pair)  # as stored: [rank, in] and [out, rank]
    if a.ndim != 2 or b.ndim != 2 or (a.shape[1], b.shape[0]) != tuple(kernel.shape):
        raise MeshdialError(
            f"{folder}: adapter tensors {pair[0]} {list(a.shape)} and lora_B {list(b.shape)} do"
            f" not fit the base's {list(kernel.shape)}"
        )
    if a.shape[0] != b.shape[1]:
        raise MeshdialError(
            f"{folder}: adapter tensor {pair[0]} has rank {a.shape[0]}, its lora_B {b.shape[1]}"
        )
    return LazyTensor(
        tuple(kernel.shape), np.dtype(np.float32), partial(_add_update, kernel, a, b, scale)
    )


def _add_update(kernel, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Works on the checkpoint's [out, in] orientation, and gives its transposed view."""
    update = np.float32(scale) * (b.astype(np.float32) @ a.astype(np.float32))
    update += np.asarray(kernel, np.float32).T
    return update.T
