"""Completions as Arrow columns, without a copy of their texts and token ids on the way."""

import json
from array import array
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

import pyarrow as pa

from pipeline.errors import ResumeError
from schemas.completion import COMPLETION_SCHEMA, Completion

_TIMES = {"started_at": "started_at_s", "finished_at": "finished_at_s"}


def completion_table(
    completions: Sequence[Completion],
    carried_schema: pa.Schema,
    own_schema: pa.Schema = COMPLETION_SCHEMA,
) -> pa.Table:
    """Build the run's own columns followed by the carried ones, one row per completion."""
    columns = [_own_array(completions, column) for column in own_schema]
    columns += [_carried_array(completions, column) for column in carried_schema]
    return pa.table(columns, schema=pa.schema([*own_schema, *carried_schema]))


def _own_array(completions: Sequence[Completion], column: pa.Field) -> pa.Array:
    if attribute := _TIMES.get(column.name):
        times_s = (getattr(completion, attribute) for completion in completions)
        return pa.array([datetime.fromtimestamp(at_s, UTC) for at_s in times_s], column.type)
    return _array([getattr(completion, column.name) for completion in completions], column.type)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Build an array of records, of lists of records, of token ids, or of plain values."""
    if pa.types.is_list(kind):
        return _list_array(values, kind)
    if not pa.types.is_struct(kind):
        return pa.array(values, kind)
    children = [
        _array([None if value is None else getattr(value, f.name) for value in values], f.type)
        for f in kind
    ]
    is_null = pa.array([value is None for value in values], pa.bool_())
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=is_null)


def _list_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Build the inner values of all lists at once: packed ids as they lie in memory."""
    ends = accumulate((len(value or ()) for value in values), initial=0)
    starts_or_null: list[int | None] = list(ends)
    for number, value in enumerate(values):
        if value is None:
            starts_or_null[number] = None
    present = [value for value in values if value is not None]
    if kind.value_type == pa.int32() and all(isinstance(value, array) for value in present):
        packed = array("i")
        for value in present:
            packed.extend(value)
        buffers = [None, pa.py_buffer(packed)]
        inner = pa.Array.from_buffers(pa.int32(), len(packed), buffers)
    else:
        inner = _array([item for value in present for item in value], kind.value_type)
    return pa.ListArray.from_arrays(pa.array(starts_or_null, pa.int32()), inner, type=kind)


def _carried_array(completions: Sequence[Completion], column: pa.Field) -> pa.Array:
    values = [completion.carried.get(column.name) for completion in completions]
    if pa.types.is_string(column.type):
        values = [_carried_text(value) for value in values]
    try:
        return pa.array(values, type=column.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ResumeError(
            f"prompts.keep_columns: {column.name!r} has values that are not {column.type}, "
            f"the type of the column in this run's earlier parts: {error}"
        ) from None


def _carried_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
