"""A policy or a critic under training as a folder: parameters, optimizer state and counters.

    manifest.json     counters, content ids, and the dtype and shape of every array
    arrays/           an orbax checkpoint, which any device layout restores
    checksums.json    of the files in arrays/, so that a damaged one is named

Orbax writes other bytes for the same arrays each time, so the folder is known by its content ids;
what is restored must have them.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from rl import group
from rl.artifacts import (
    MANIFEST,
    Publisher,
    content_id,
    described,
    id_of_blocks,
    json_content_id,
    read_json,
    write_json,
)
from rl.errors import MeshdialError
from rl.models.spec import ModelSpec, Parameters
from rl.models.transformer import parameter_shapes, trainable_names

FORMAT = 1
_MANIFEST_KEYS = (
    "content_id",
    "parameters_content_id",
    "optimizer_content_id",
    "counters",
    "arrays",
)
Kind = Literal["policy", "critic"]
CHECKSUMS = "checksums.json"
BATCH_BYTES = 128 * 2**20  # of parameters that are in memory at one time, unless one is larger
# They say when and where the arrays were written; a restore does without.
_FACTS_OF_THE_WRITER = ("_CHECKPOINT_METADATA", "commit_success.txt")


def save_policy(
    publisher: Publisher,
    path: str | Path,
    trainable: Parameters,
    optimizer_state: Any,
    counters: Mapping[str, int],
    manifest_extra: Mapping[str, Any] | None = None,
    kind: Kind = "policy",
) -> dict:
    """Writes the folder and returns its manifest.

    `kind` is what is trained; `optimizer_state` is any tree of arrays. The manifest's `content_id`
    names parameters, optimizer state and counters together, `parameters_content_id` the parameters
    alone.
    """
    trees = {"trainable": dict(trainable), "optimizer": _named_leaves(optimizer_state)}
    ids = {
        "parameters_content_id": content_id(trees["trainable"]),
        "optimizer_content_id": content_id(trees["optimizer"]),
        "counters": dict(counters),
    }
    manifest = {
        **(manifest_extra or {}),
        **ids,
        "kind": kind,
        "format": FORMAT,
        "content_id": json_content_id(ids),
        "arrays": _shapes(trees),
    }
    with publisher.directory(path) as folder:
        _write_arrays(folder / "arrays", trees)
        write_json(Publisher(), folder / CHECKSUMS, _checksums(folder / "arrays"))
        write_json(Publisher(), folder / MANIFEST, manifest)
    return manifest


def restore_policy(
    path: str | Path,
    abstract_trainable: Mapping[str, Any],
    abstract_optimizer_state: Any,
    kind: Kind = "policy",
) -> tuple[Parameters, Any, dict]:
    """(trainable, optimizer_state, counters) of a folder, verified against its content ids.

    The abstract trees say which arrays are expected (`jax.ShapeDtypeStruct`, or arrays) and, by
    their shardings, where they go; without one, to the default device. MeshdialError if the folder
    has other arrays, or is damaged.
    """
    path = Path(path)
    manifest = read_manifest(path, kind)
    abstract = {
        "trainable": dict(abstract_trainable),
        "optimizer": _named_leaves(abstract_optimizer_state),
    }
    _check_shapes(path, manifest["arrays"], _shapes(abstract))
    _check_files(path, _checksums(path / "arrays"))
    trees = _read_arrays(path / "arrays", abstract)
    for part, key in (("trainable", "parameters"), ("optimizer", "optimizer")):
        if content_id(trees[part]) != manifest[f"{key}_content_id"]:
            raise MeshdialError(f"{path} is damaged: its {key} do not match their content id")
    structure = jax.tree.structure(abstract_optimizer_state)
    leaves = [trees["optimizer"][name] for name in abstract["optimizer"]]
    return trees["trainable"], jax.tree.unflatten(structure, leaves), manifest["counters"]


def restore_parameters(
    path: str | Path, abstract_trainable: Mapping[str, Any]
) -> Iterator[dict[str, jax.Array]]:
    """The parameters alone, some at a time; nothing else of the arrays is read.

    They are right only if the last batch is followed by no error: then all have the content id of
    the manifest. MeshdialError otherwise as for `restore_policy`.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _check_shapes(path, manifest["arrays"], _shapes({"trainable": abstract_trainable}))
    found: dict[str, dict] = {}

    def restored(names: list[str]) -> dict[str, jax.Array]:
        abstract = {"trainable": {name: abstract_trainable[name] for name in names}}
        batch = _read_arrays(path / "arrays", abstract, partial_restore=True)["trainable"]
        found.update(described(batch))
        return batch

    try:
        for names in _batches(abstract_trainable):
            yield restored(names)  # held by no name here, so that it can go before the next
    except MeshdialError:
        raise
    except Exception:  # orbax meets damage with errors of any kind
        _check_all_files(path)
        raise
    if id_of_blocks(found) != manifest["parameters_content_id"]:
        _check_all_files(path)
        raise MeshdialError(f"{path} is damaged: its parameters do not match their content id")


def _batches(leaves: Mapping[str, Any]) -> Iterator[list[str]]:
    """The names of so many leaves as fit into BATCH_BYTES."""
    names, waiting = [], 0
    for name, leaf in sorted(leaves.items()):
        nbytes = leaf.size * leaf.dtype.itemsize
        if names and waiting + nbytes > BATCH_BYTES:
            yield names
            names, waiting = [], 0
        names.append(name)
        waiting += nbytes
    if names:
        yield names


def abstract_trainable(spec: ModelSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape and dtype of each parameter that `spec` trains, by name."""
    shapes = parameter_shapes(spec)
    return {
        name: jax.ShapeDtypeStruct(shapes[name], jnp.dtype(spec.dtype))
        for name in trainable_names(spec)
    }


def _named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path in it, in the tree's order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _shapes(trees: Mapping[str, Mapping[str, Any]]) -> dict:
    return {
        part: {
            name: {"dtype": jnp.dtype(leaf.dtype).name, "shape": list(leaf.shape)}
            for name, leaf in leaves.items()
        }
        for part, leaves in trees.items()
    }


def _check_shapes(path: Path, found: Any, wanted: dict) -> None:
    for part, leaves in wanted.items():
        stored = found[part]
        for name in sorted(leaves.keys() | stored.keys()):
            if stored.get(name) != leaves.get(name):
                raise MeshdialError(
                    f"{path}: {part} {name} is {_told(stored.get(name))}, "
                    f"expected {_told(leaves.get(name))}"
                )


def _told(array: Mapping | None) -> str:
    return "absent" if array is None else f"{array['dtype']} {array['shape']}"


def read_manifest(path: Path, kind: Kind = "policy") -> dict:
    """The manifest of a checkpoint of this kind; MeshdialError if it is missing, damaged or of
    another format."""
    where = path / MANIFEST
    manifest = read_json(where)
    if not isinstance(manifest, dict) or manifest.get("kind") != kind:
        raise MeshdialError(f"{where} is not the manifest of a {kind}")
    if manifest.get("format") != FORMAT:
        raise MeshdialError(f"{where} has format {manifest.get('format')}, expected {FORMAT}")
    for key in _MANIFEST_KEYS:
        if key not in manifest:
            raise MeshdialError(f"{where} has no key {key}")
    keys = ("parameters_content_id", "optimizer_content_id", "counters")
    if json_content_id({key: manifest[key] for key in keys}) != manifest["content_id"]:
        raise MeshdialError(f"{where} is damaged: its entries do not match its content id")
    return manifest


def _write_arrays(path: Path, trees: dict) -> None:
    # Uncompressed: trained floats shrink by a tenth, and four times the time goes into it.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(jax.tree.map(_viewed, trees)))
    if group.is_first():
        for name in _FACTS_OF_THE_WRITER:
            (path / name).unlink(missing_ok=True)
    group.barrier("arrays are written")


def _viewed(array: Any) -> Any:
    """An array in the host's memory as NumPy, without a copy: orbax saves it three times faster."""
    devices = array.devices() if isinstance(array, jax.Array) else ()
    is_on_host = len(devices) == 1 and next(iter(devices)).platform == "cpu"
    return np.asarray(array) if is_on_host else array


def _checksums(arrays: Path) -> dict[str, str]:
    """{file below `arrays`: SHA-256 of its bytes in hex}; a group's processes share the work."""
    sums = _sums(arrays, _files(arrays)[group.rank() :: group.size()])
    return dict(sorted(pair for found in group.gather(sums) for pair in found.items()))


def _files(arrays: Path) -> list[Path]:
    return sorted(file for file in arrays.rglob("*") if file.is_file())


def _sums(arrays: Path, files: Iterable[Path]) -> dict[str, str]:
    sums = {}
    for file in files:
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256")
        sums[file.relative_to(arrays).as_posix()] = digest.hexdigest()
    return sums


def _check_all_files(path: Path) -> None:
    """As `_check_files`, in a process of a group that has failed where the others may not have."""
    arrays = path / "arrays"
    _check_files(path, _sums(arrays, _files(arrays)))


def _check_files(path: Path, found: Mapping[str, str]) -> None:
    """Orbax tells damage in a screen of messages from its threads; this is told before it runs."""
    wanted = read_json(path / CHECKSUMS)
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            raise MeshdialError(f"{path / 'arrays' / name} is missing")
        if wanted.get(name) != found[name]:
            raise MeshdialError(
                f"{path / 'arrays' / name} is damaged: its bytes do not match its checksum"
            )


def _read_arrays(path: Path, abstract: dict, partial_restore: bool = False) -> dict:
    """The arrays that `abstract` names, all that there are unless it is a partial restore."""
    placed = jax.tree.map(_placed, abstract)
    arguments = ocp.args.PyTreeRestore(
        item=placed,
        restore_args=ocp.checkpoint_utils.construct_restore_args(placed),
        partial_restore=partial_restore,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path.absolute(), args=arguments)


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )
