"""Rows of parquet and Arrow files and of tables, decoded in batches of bounded size.

A small file may contain one long text that thousands of rows refer to. Texts are therefore read
as references, each row's size is added up, and only then are rows decoded.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.dataset.sources.files import InputFile
from pipeline.dataset.sources.library_errors import one_line_error
from pipeline.dataset.sources.rows import (
    BATCH_BYTES,
    MAX_ROW_BYTES,
    Row,
    RowFile,
    check_names_differ,
    too_large,
)
from schemas.units import MIB

READ_BATCH_ROWS = 512
_READ_BUFFER_BYTES = MIB
# assumed: a value in a list or struct costs Python this much beside its bytes
_BYTES_PER_VALUE = 64
# Other columns of a row that is too large are read up to this size, for its id.
_SMALL_BYTES = 64 * 1024

# Size up to which a column chunk is read as references to its distinct texts.
_MOST_DISTINCT_BYTES = 32 * MIB
# Thrift's compact protocol: the next field, of type i32.
_INT32_FIELD = 0x15

_ARROW_FILE_MARK = b"ARROW1"


def parquet_file(file: InputFile) -> RowFile:
    with file.opened() as opened:
        schema = _without_views(pq.read_schema(opened))
    check_names_differ(schema.names, file.where)
    rows = partial(_parquet_rows, file, schema)
    return RowFile(where=file.where, columns=tuple(schema.names), arrow_schema=schema, rows=rows)


def arrow_file(file: InputFile) -> RowFile:
    with file.opened() as opened:
        schema = _without_views(_arrow_reader(opened).schema)
    check_names_differ(schema.names, file.where)
    rows = partial(_arrow_rows, file, schema)
    return RowFile(where=file.where, columns=tuple(schema.names), arrow_schema=schema, rows=rows)


def table_rows(table: Any, types: Any, where: str) -> Iterator[Row]:  # noqa: ANN401 - pyarrow ships no types
    """Yield the rows of a table, cast to `types`; a row that is too large becomes a bad one."""
    for batch in table.to_batches():
        yield from _batch_rows(batch, types, where)


# -- files


def _parquet_rows(
    file: InputFile,
    schema: Any,  # noqa: ANN401
    names: list[str],
    types: object | None,
) -> Iterator[Row]:
    """Yield rows by row group.

    `datasets` is not used here, because it decodes whole row groups: one of 200,000 prompts of 2 KB
    needs 1.4 GB with it, and 0.13 GB here (measured: datasets 5.2).
    """
    with file.opened() as opened:
        metadata = pq.read_metadata(opened)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            leaves = _leaves(group, names)
            row_bytes = sum(leaf.total_uncompressed_size for leaf in leaves) // max(
                group.num_rows, 1
            )
            if row_bytes > MAX_ROW_BYTES:
                where = f"{file.where} row group {number}"
                for _ in range(group.num_rows):
                    yield too_large(where, row_bytes, f"{file.name} {number}", {})
                continue
            referring = [leaf for leaf in leaves if _is_referring(leaf)]
            options = {
                "metadata": metadata,
                "pre_buffer": False,
                "buffer_size": _READ_BUFFER_BYTES,
                "read_dictionary": [leaf.path_in_schema for leaf in referring],
            }
            decoded = [leaf for leaf in leaves if not _is_referring(leaf)]
            largest = max((_dictionary_bytes(opened, leaf) for leaf in decoded), default=0)
            num_rows = BATCH_BYTES // max(row_bytes, largest, 1)
            # The file stays open: closing the reader would close it.
            parquet = pq.ParquetFile(opened, **options)
            for batch in parquet.iter_batches(
                max(1, min(READ_BATCH_ROWS, num_rows)), row_groups=[number], columns=names
            ):
                yield from _batch_rows(batch.select(names), types or schema, file.where)


def _leaves(group: Any, names: list[str]) -> list[Any]:  # noqa: ANN401
    """Return the column chunks of a row group that belong to the named columns."""
    chunks = (group.column(number) for number in range(group.num_columns))
    return [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in names]


def _is_referring(chunk: Any) -> bool:  # noqa: ANN401
    """Tell whether a chunk's texts are read as references to distinct texts.

    The distinct texts of the whole chunk are in memory then.
    """
    is_text = chunk.physical_type == "BYTE_ARRAY" and chunk.has_dictionary_page
    return bool(is_text and chunk.total_uncompressed_size <= _MOST_DISTINCT_BYTES)


def _dictionary_bytes(opened: Any, chunk: Any) -> int:  # noqa: ANN401
    """Return the size of a chunk's dictionary, an upper bound on each value in it."""
    if not chunk.has_dictionary_page:
        return 0
    opened.seek(chunk.dictionary_page_offset)
    # parquet.thrift, PageHeader: an enum and two 32-bit sizes, in Thrift's compact protocol. Each
    # is the byte 0x15 and a zigzag integer of up to five bytes.
    header = iter(opened.read(18))
    _, uncompressed_bytes = _field(header), _field(header)
    return uncompressed_bytes


def _field(header: Iterator[int]) -> int:
    mark, number, shift = next(header), 0, 0
    if mark != _INT32_FIELD:
        raise pa.ArrowInvalid("not a parquet page")
    for byte in header:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return number >> 1


def _arrow_reader(opened: Any) -> Any:  # noqa: ANN401
    """Open the file format, or the stream format that `datasets` writes."""
    mark = opened.read(len(_ARROW_FILE_MARK))
    opened.seek(0)
    return pa.ipc.open_file(opened) if mark == _ARROW_FILE_MARK else pa.ipc.open_stream(opened)


def _arrow_rows(
    file: InputFile,
    schema: Any,  # noqa: ANN401
    names: list[str],
    types: object | None,
) -> Iterator[Row]:
    with file.opened() as opened:
        for batch in _arrow_batches(_arrow_reader(opened)):
            for start in range(0, batch.num_rows, READ_BATCH_ROWS):
                some = batch.slice(start, READ_BATCH_ROWS).select(names)
                yield from _batch_rows(some, types or schema, file.where)


def _arrow_batches(reader: Any) -> Iterator[Any]:  # noqa: ANN401
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)


# -- types


def _without_views(schema: Any) -> Any:  # noqa: ANN401
    """Return the schema with plain texts for views, which few functions of pyarrow take."""
    return pa.schema([field.with_type(_plain(field.type)) for field in schema])


def _plain(kind: Any) -> Any:  # noqa: ANN401
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain(kind.value_type))
    return kind


# -- batches


def _batch_rows(batch: Any, types: Any, where: str) -> Iterator[Row]:  # noqa: ANN401
    sizes = _row_sizes(batch)
    start = num_bytes = 0
    for number, size in enumerate(sizes):
        if size > MAX_ROW_BYTES:
            yield from _decoded(batch.slice(start, number - start), types, where)
            yield _large_row(batch.slice(number, 1), size, types, where)
            start, num_bytes = number + 1, 0
        elif num_bytes + size > BATCH_BYTES:
            yield from _decoded(batch.slice(start, number - start), types, where)
            start, num_bytes = number, size
        else:
            num_bytes += size
    yield from _decoded(batch.slice(start), types, where)


def _decoded(batch: Any, types: Any, where: str) -> Iterator[dict[str, object]]:  # noqa: ANN401
    if not batch.num_rows:
        return
    wanted = pa.schema([types.field(name) for name in batch.schema.names])
    with one_line_error(f"the columns of {where} are not those of the other files"):
        batch = batch.cast(wanted)
    yield from batch.to_pylist()


def _large_row(row: Any, size: int, types: Any, where: str) -> Row:  # noqa: ANN401
    small = [
        name for name in row.schema.names if _sizes(row.column(name)).to_pylist()[0] < _SMALL_BYTES
    ]
    values = next(iter(_decoded(row.select(small), types, where)), {}) if small else {}
    return too_large(where, size, f"{size} {sorted(values.items())}", values)


def _row_sizes(batch: Any) -> list[int]:  # noqa: ANN401
    """Return the bytes that each row has when it is decoded."""
    sizes = pa.array([0] * batch.num_rows, pa.int64())
    for column in batch.columns:
        sizes = pc.add(sizes, _sizes(column))
    return sizes.to_pylist()  # type: ignore[no-any-return]


def _sizes(array: Any) -> Any:  # noqa: ANN401
    """Return the decoded bytes of each value of an array."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _counted(_sizes(array.dictionary).take(array.indices), len(array))
    if any(is_text(kind) for is_text in _TEXTS):
        return _counted(pc.binary_length(array), len(array))
    if any(is_view(kind) for is_view in _VIEWS):
        return _counted(_view_lengths(array), len(array))
    if any(is_list(kind) for is_list in _LISTS):
        return _list_sizes(array)
    if pa.types.is_struct(kind):
        sizes = _constant(0, len(array))
        for number in range(kind.num_fields):
            sizes = pc.add(sizes, _sizes(array.field(number)))
        return sizes
    return _constant(array.nbytes // max(len(array), 1), len(array))


_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary,
          pa.types.is_large_binary)  # fmt: skip
_VIEWS = (pa.types.is_string_view, pa.types.is_binary_view)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_map)


def _list_sizes(array: Any) -> Any:  # noqa: ANN401
    values = array.items if pa.types.is_map(array.type) else array.values
    sums = pc.cumulative_sum(_counted(_sizes(values), len(values)))
    sums = pa.concat_arrays([pa.array([0], pa.int64()), sums])
    ends, starts = sums.take(array.offsets[1:]), sums.take(array.offsets[:-1])
    return pc.subtract(ends, starts)


def _view_lengths(array: Any) -> Any:  # noqa: ANN401
    """Return the bytes of each text, which pyarrow computes for no view.

    A view has 16 bytes, and the first four are the length. Arrow columnar format, "Variable-size
    Binary View Layout".
    """
    end = 4 * (array.offset + len(array))
    words = pa.Array.from_buffers(pa.int32(), end, [None, array.buffers()[1]])
    return words.take(pa.array(range(4 * array.offset, end, 4), pa.int64()))


def _counted(sizes: Any, length: int) -> Any:  # noqa: ANN401
    """Add what each value costs beside its bytes; null has no bytes."""
    known = pc.fill_null(pc.cast(sizes, pa.int64()), 0)
    return pc.add(known, _constant(_BYTES_PER_VALUE, length))


def _constant(value: int, length: int) -> Any:  # noqa: ANN401
    return pa.repeat(pa.scalar(value, pa.int64()), length)
