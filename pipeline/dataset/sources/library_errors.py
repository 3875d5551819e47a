"""Errors of the libraries that read the input, as one line for the user."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from lzma import LZMAError

import pyarrow as pa

from pipeline.errors import ConfigError


@contextmanager
def one_line_error(what: str) -> Iterator[None]:
    """Turn an error of a library into a ConfigError with the first line of its text.

    The exceptions of `datasets` differ by release and fault; a failed cast is a TypeError.
    """
    try:
        yield
    except (
        *(OSError, EOFError, LZMAError, ValueError, TypeError, KeyError, pa.ArrowException),
        *_errors_of_datasets(),
    ) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"prompts.path: {what}: {reason}") from None


def _errors_of_datasets() -> tuple[type[Exception], ...]:
    # A library that is not imported has raised nothing.
    library = sys.modules.get("datasets")
    return () if library is None else (library.exceptions.DatasetsError,)
