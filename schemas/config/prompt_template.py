"""Template of a prompt: text with the names of columns in braces, and doubled braces as such."""

from string import Formatter


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """Split a template into texts, each with the column behind it; None behind the last one.

    Raises ValueError for a brace that is not closed, and for what is no column's name.
    """
    parts: list[tuple[str, str | None]] = []
    for text, column, form, conversion in Formatter().parse(template):
        if column is not None and (not column or form or conversion):
            raise ValueError(
                "braces are for one column's name each; write {{ and }} for braces in the text"
            )
        parts.append((text, column))
    return parts


def template_columns(template: str) -> list[str]:
    """List the columns of a template, each once."""
    return list(dict.fromkeys(column for _, column in template_parts(template) if column))
