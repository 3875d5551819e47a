"""The door for what others wrote."""

from pathlib import Path

import pytest

from pipeline.untrusted.parsing import UnreadableError, bytes_of, guarded, json_object


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON: Expecting property name"),
        ("[1]", "not a JSON object"),
        ("null", "not a JSON object"),
        ('{"a": ' + "1" * 100_000 + "}", "not usable as JSON: Exceeds the limit"),
        ('{"a":' * 100_000, "not usable as JSON: nested too deep"),
        (b"\xff\xff\xff", "not usable as JSON: .*codec can't decode"),
    ],
)
def test_what_is_no_object_is_one_short_line(text: str | bytes, said: str) -> None:
    with pytest.raises(UnreadableError, match=said) as error:
        json_object(text)
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


def test_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert bytes_of(path, most=5) == b"12345"
    with pytest.raises(UnreadableError, match="larger than 4 bytes"):
        bytes_of(path, most=4)


class PanicException(BaseException):
    """Named as that of libraries in Rust."""


@pytest.mark.parametrize("error", [PanicException("index out of\nbounds"), RuntimeError("broken")])
def test_panic_and_error_of_a_parser_are_unreadable_data(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(UnreadableError) as raised:
        guarded(fail)
    assert str(raised.value) == str(error).splitlines()[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_end_of_the_process_is_no_parsers_error(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        guarded(fail)
