"""The sections `prompts` and `sampling`: what is read and how each request samples."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.config.section import Section

PromptShape = Literal["messages", "conversations", "prompt"]
# Integer widths of the output's `sampling` column.
MAX_INT32, _MAX_INT64 = 2**31 - 1, 2**63 - 1


class PromptsConfig(Section):
    """Location and columns of the prompts."""

    path: str
    """A parquet or JSON-lines file, a folder of them, a saved data set, or a hub name.

    A file or folder may be in an object store: `s3://bucket/prompts.parquet`.
    """
    name: str | None = None
    """Configuration of a hub data set."""
    split: str = "train"
    column: str | None = None
    """Column to read. Null: the first of `messages`, `conversations` and `prompt` that exists."""
    shape: PromptShape | None = None
    """Format of `column`. Null: by the column's name, else by its values."""
    system_prompt: str | None = None
    """System turn for conversations that have none."""
    system_column: str | None = None
    """Column with each row's system prompt. Null: `system_prompt` or `system` if present."""
    id_column: str | None = None
    """Column with unique row ids. Null: a hash of each row's content is its id."""
    keep_columns: list[str] = []
    limit: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_columns_differ(self) -> Self:
        repeated = [name for name in self.keep_columns if self.keep_columns.count(name) > 1]
        if repeated:
            raise ValueError(
                f"keep_columns: {repeated[0]!r} is listed twice; list each column once"
            )
        return self


class SamplingConfig(Section):
    """Sampling parameters of every request; null leaves the engine's default."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.6
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = 20
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] = 4096
    seed: Annotated[int, Field(ge=0, le=_MAX_INT64)] | None = 7
    """Base of each request's own seed; null sends no seed."""
