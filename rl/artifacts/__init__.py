"""Every file that crosses a stage's boundary: schemas, atomic writes, provenance, content ids.

A stage reads tables (`read_table`), JSON (`read_json`) and folders with a manifest; it names its
inputs by `artifact_id`, and publishes what it made under its final name whole (`Publisher`).
"""

from pathlib import Path

from rl.artifacts.content import (
    block_hashes,
    canonical_json,
    content_id,
    described,
    id_of_blocks,
    json_content_id,
)
from rl.artifacts.publisher import Publisher, read_json, write_json
from rl.artifacts.schemas import COMPONENT_PREFIX, SCHEMAS, group_id, sample_id
from rl.artifacts.table_content import table_content_id
from rl.artifacts.tables import join, make_table, read_table, table_provenance, write_table
from rl.errors import MeshdialError

MANIFEST = "manifest.json"


def artifact_id(path: str | Path) -> str:
    """The content id of an artifact as it states it: a parquet table, a JSON file, or a folder.

    MeshdialError if the artifact is missing or states none. A JSON file's id is that of its value.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        return table_provenance(path)["content_id"]
    if path.is_dir():
        manifest = read_json(path / MANIFEST)
        if "content_id" not in manifest:
            raise MeshdialError(f"{path / MANIFEST} has no key content_id")
        return manifest["content_id"]
    return json_content_id(read_json(path))


__all__ = [
    "COMPONENT_PREFIX",
    "MANIFEST",
    "SCHEMAS",
    "Publisher",
    "artifact_id",
    "block_hashes",
    "canonical_json",
    "content_id",
    "described",
    "group_id",
    "id_of_blocks",
    "join",
    "json_content_id",
    "make_table",
    "read_json",
    "read_table",
    "sample_id",
    "table_content_id",
    "table_provenance",
    "write_json",
    "write_table",
]
