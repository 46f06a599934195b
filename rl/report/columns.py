"""Some columns of a stage's table: a report needs a few bits a token, not the whole rollout."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rl.artifacts import SCHEMAS, table_provenance
from rl.errors import MeshdialError

FINISH_REASONS = ("stop", "length", "timeout")


def read_columns(
    path: Path, kind: str, names: Sequence[str], prefix: str | None = None
) -> pa.Table:
    """The named columns, and all those that start with `prefix`, of a table of this kind.

    Unlike `artifacts.read_table` it does not verify the content id, which takes every column.
    Raises MeshdialError for a table that is missing, unreadable or of another kind, or that lacks a
    column or has it in another type.
    """
    found_kind = table_provenance(path)["kind"]
    if found_kind != kind:
        raise MeshdialError(f"{path} is a table of {found_kind}, not of {kind}")
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        for name in names:
            _check_column(path, kind, schema, name)
        extra = [name for name in schema.names if prefix and name.startswith(prefix)]
        try:
            return file.read(columns=[*names, *extra])
        except (pa.ArrowException, OSError) as error:
            raise MeshdialError(f"{path} is not a readable parquet table: {error}") from None


def _check_column(path: Path, kind: str, schema: pa.Schema, name: str) -> None:
    wanted = SCHEMAS[kind].field(name).type
    if name not in schema.names:
        raise MeshdialError(f"{path} has no column {name}, which a {kind} table needs")
    if schema.field(name).type != wanted:
        raise MeshdialError(
            f"{path}: column {name} is {schema.field(name).type}, expected {wanted}"
        )


def token_counts(masks: pa.ChunkedArray) -> np.ndarray:
    """Tokens per completion. A mask has one bit for each token, so it is the cheapest to read."""
    return pc.list_value_length(masks).to_numpy()


def finish_fractions(reasons: pa.ChunkedArray) -> dict[str, float]:
    counts = {c["values"]: c["counts"] for c in pc.value_counts(reasons).to_pylist()}
    return {f"finish_{r}_fraction": counts.get(r, 0) / len(reasons) for r in FINISH_REASONS}


def floats(column: pa.ChunkedArray) -> np.ndarray:
    return column.to_numpy().astype(np.float64)
