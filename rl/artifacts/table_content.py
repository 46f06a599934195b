"""The content id of a table: its columns by name, type and value, however Arrow holds them.

Each column is read as a few streams of bytes (which values are there, how long each list or string
is, and the values), so that chunks, slices and the garbage below a null make no difference.
"""

import hashlib
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rl.artifacts.content import canonical_json, raw_bytes, tagged


def table_content_id(table: pa.Table) -> str:
    """The content id of a table, whatever the order of its columns and its place in a file."""
    digest = hashlib.sha256()
    for name in sorted(table.column_names):
        column = table[name]
        streams = defaultdict(hashlib.sha256)
        for chunk in column.chunks:
            _feed(streams, "", chunk)
        values = {path: stream.hexdigest() for path, stream in streams.items()}
        line = [name, _spelled(column.type), len(column), values if len(column) else {}]
        digest.update(canonical_json(line).encode() + b"\n")
    return tagged(digest)


def _spelled(kind: pa.DataType) -> str:
    """The type without the name and nullability of a list's item, which vary with the writer."""
    return f"list<{_spelled(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)


def _feed(streams: dict, path: str, array: pa.Array) -> None:
    streams[path + "present"].update(_flags(pc.is_valid(array)))
    array = array.drop_null()
    if pa.types.is_list(array.type):
        streams[path + "lengths"].update(_numbers(pc.list_value_length(array), "<i8"))
        _feed(streams, path + "items/", array.flatten())
    elif pa.types.is_string(array.type):
        streams[path + "lengths"].update(_numbers(pc.binary_length(array), "<i8"))
        streams[path + "text"].update(_text(array))
    elif pa.types.is_boolean(array.type):
        streams[path + "values"].update(_flags(array))
    elif pa.types.is_integer(array.type) or pa.types.is_floating(array.type):
        streams[path + "values"].update(raw_bytes(array.to_numpy(zero_copy_only=False)))
    else:
        raise TypeError(f"a column of {array.type} has no content id")


def _flags(array: pa.BooleanArray) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False).astype(np.uint8)


def _numbers(array: pa.Array, dtype: str) -> np.ndarray:
    return raw_bytes(array.to_numpy(zero_copy_only=False).astype(dtype))


def _text(array: pa.StringArray) -> memoryview:
    """The bytes of all strings, one after the other; the array has no nulls."""
    if not len(array):
        return memoryview(b"")
    _, offsets, text = array.buffers()
    bounds = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    return memoryview(text)[bounds[0] : bounds[-1]] if text else memoryview(b"")
