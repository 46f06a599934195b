"""Parquet tables: checked against their schema when written and when read, with provenance inside.

The parquet footer holds, under the key `meshdial`, canonical JSON: the table's kind, the stage and
its version, the config that it read, the content ids of its inputs, whatever else the stage says of
how it worked, and the content id of the table itself. The same table gives the same bytes.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rl.artifacts.content import canonical_json
from rl.artifacts.publisher import Publisher
from rl.artifacts.schemas import OPEN_KINDS, SCHEMAS
from rl.artifacts.table_content import table_content_id
from rl.errors import MeshdialError

FOOTER_KEY = b"meshdial"
PROVENANCE_KEYS = ("stage", "stage_version", "config", "inputs")
ROW_GROUP_ROWS = 16384


def make_table(kind: str, columns: Mapping[str, Sequence]) -> pa.Table:
    """A table of this kind from Python lists or NumPy arrays; MeshdialError names a bad column."""
    arrays = {}
    for name, values in columns.items():
        wanted = _wanted_types(kind, list(columns)).get(name)
        try:
            arrays[name] = pa.array(values, wanted)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise MeshdialError(
                f"the {kind} table: column {name} does not hold {wanted}: {error}"
            ) from None
    return conformed(pa.table(arrays), kind, f"the {kind} table")


def write_table(
    publisher: Publisher,
    path: str | Path,
    kind: str,
    table: pa.Table,
    provenance: Mapping[str, Any],
) -> str:
    """Writes a table and returns its content id.

    `provenance` must have stage, stage_version, config and inputs ({name: content id}), may have
    more, and must not depend on the clock, the host or the process.
    """
    missing = [key for key in PROVENANCE_KEYS if key not in provenance]
    if missing:
        raise ValueError(f"the provenance of {path} lacks {', '.join(missing)}")
    table = conformed(table, kind, str(path))
    identity = table_content_id(table)
    footer = canonical_json({**provenance, "kind": kind, "content_id": identity})
    with publisher.file(path) as draft:
        _write_parquet(draft, table, footer.encode())
    return identity


def read_table(path: str | Path, kind: str, expect: Mapping[str, Any] | None = None) -> pa.Table:
    """Reads a table of this kind whole, and checks it against its schema and its content id.

    `expect` names entries of the provenance that must be as given; `{"inputs": {"weights": ID}}`
    asks for that input and leaves the others open.
    """
    with _opened(path) as file:
        footer = _footer(file, path)
        if footer["kind"] != kind:
            raise MeshdialError(f"{path} is a table of {footer['kind']}, not of {kind}")
        table = conformed(_read_all(file, path), kind, str(path))
    if table_content_id(table) != footer["content_id"]:
        raise MeshdialError(f"{path} is damaged: its values do not match the content id it states")
    _check_expected(footer, expect or {}, path)
    return table


def table_provenance(path: str | Path) -> dict:
    """What a table's footer says, without reading the table."""
    with _opened(path) as file:
        return _footer(file, path)


def conformed(table: pa.Table, kind: str, where: str) -> pa.Table:
    """The table in its schema's column order; MeshdialError names the column that does not fit."""
    types = _wanted_types(kind, table.column_names)
    for name in table.column_names:
        if name not in types:
            raise MeshdialError(f"{where} has a column {name}, which a {kind} table has not")
        if table.column_names.count(name) > 1:
            raise MeshdialError(f"{where} has the column {name} twice")
    for name, wanted in types.items():
        if name not in table.column_names:
            raise MeshdialError(f"{where} has no column {name}, which a {kind} table needs")
        found = table.schema.field(name).type
        if found != wanted:
            raise MeshdialError(f"{where}: column {name} is {found}, expected {wanted}")
    table = pa.Table.from_arrays([table[name] for name in types], schema=_full_schema(kind, types))
    for field in table.schema:
        _check_nulls(table[field.name], field, where)
    if "sample_id" in types:
        _check_unique(table["sample_id"], where)
    return table


def join(left: pa.Table, right: pa.Table, columns: Sequence[str]) -> pa.Table:
    """`left` with these columns of `right`, matched by `sample_id`, in `left`'s order.

    MeshdialError if a sample of either has no partner, or has two.
    """
    for name in columns:
        if name not in right.column_names:
            raise MeshdialError(f"the table to join has no column {name}")
        if name in left.column_names:
            raise ValueError(f"both tables to join have a column {name}")
    ids, other_ids = left["sample_id"], right["sample_id"]
    _check_unique(ids, "the left table of a join")
    _check_unique(other_ids, "the table to join")
    places = pc.index_in(ids, value_set=other_ids)
    if places.null_count:
        lost = ids.filter(pc.is_null(places))
        raise MeshdialError(
            f"{len(lost)} samples are missing from the table to join, first {lost[0]}"
        )
    if len(other_ids) > len(ids):
        surplus = other_ids.filter(pc.invert(pc.is_in(other_ids, value_set=ids)))
        raise MeshdialError(f"{len(surplus)} samples are only in the table to join: {surplus[0]}")
    for name in columns:
        left = left.append_column(right.schema.field(name), right[name].take(places))
    return left


def _wanted_types(kind: str, names: Sequence[str]) -> dict[str, pa.DataType]:
    """{column: type} in order: the schema's columns, then the open ones by name."""
    if kind not in SCHEMAS:
        raise ValueError(f"there is no table kind {kind!r}")
    types = {field.name: field.type for field in SCHEMAS[kind]}
    if kind in OPEN_KINDS:
        prefix, open_type = OPEN_KINDS[kind]
        types |= {name: open_type for name in sorted(names) if name.startswith(prefix)}
    return types


def _full_schema(kind: str, types: Mapping[str, pa.DataType]) -> pa.Schema:
    fixed = SCHEMAS[kind]
    return pa.schema(list(fixed) + [pa.field(n, types[n]) for n in list(types)[len(fixed) :]])


def _check_nulls(column: pa.ChunkedArray, field: pa.Field, where: str) -> None:
    if not field.nullable and column.null_count:
        row = pc.index(pc.is_null(column), True)
        raise MeshdialError(f"{where}: column {field.name} has no value in row {row}")
    if pa.types.is_list(field.type) and any(c.flatten().null_count for c in column.chunks):
        raise MeshdialError(f"{where}: column {field.name} has a list with a missing item")


def _check_unique(ids: pa.ChunkedArray, where: str) -> None:
    if len(ids) == len(ids.unique()):
        return
    counts = ids.value_counts()
    twice = next(c["values"] for c in counts if c["counts"].as_py() > 1)
    raise MeshdialError(f"{where} has the sample_id {twice} more than once")


def _write_parquet(path: Path, table: pa.Table, footer: bytes) -> None:
    with pq.ParquetWriter(
        path,
        table.schema,
        compression="zstd",
        version="2.6",
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        writer.add_key_value_metadata({FOOTER_KEY: footer})


def _opened(path: str | Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise MeshdialError(f"{path} is missing") from None
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _read_all(file: pq.ParquetFile, path: str | Path) -> pa.Table:
    try:
        return file.read()
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str | Path, error: Exception) -> MeshdialError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return MeshdialError(f"{path} is not a readable parquet table: {reason}")


def _footer(file: pq.ParquetFile, path: str | Path) -> dict:
    text = (file.metadata.metadata or {}).get(FOOTER_KEY)
    if text is None:
        raise MeshdialError(f"{path} was not written by meshdial: its footer has no provenance")
    try:
        footer = json.loads(text)
    except ValueError as error:
        raise MeshdialError(f"{path} is damaged: its provenance is not JSON: {error}") from None
    for key in ("kind", "content_id", *PROVENANCE_KEYS):
        if key not in footer:
            raise MeshdialError(f"{path} is damaged: its provenance has no key {key}")
    return footer


def _check_expected(footer: Mapping, expect: Mapping, path: str | Path) -> None:
    for key, wanted in expect.items():
        found = footer.get(key)
        if key == "inputs":
            found = {name: found.get(name) for name in wanted}
        if canonical_json(found) != canonical_json(wanted):
            raise MeshdialError(f"{path} was made with {key} {found}, expected {wanted}")
