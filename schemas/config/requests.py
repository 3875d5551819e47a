"""The sections `prompts` and `sampling`: what is read and how each request samples."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from schemas.config.prompt_template import template_parts
from schemas.config.section import PathText, Section

PromptShape = Literal["messages", "conversations", "prompt"]
# Integer widths of the output's `sampling` column.
MAX_INT32, _MAX_INT64 = 2**31 - 1, 2**63 - 1
# assumed: about the longest context that servers offer for completions without a limit
MOST_UNLIMITED_TOKENS = 131_072

_TokenId = Annotated[str, Field(pattern=r"^\d+$")]
MAX_TEMPERATURE = 2
RowSetting = Literal["thinking", "max_tokens", "temperature", "chat_template_kwargs"]


class PromptsConfig(Section):
    """Location and columns of the prompts."""

    path: PathText
    """A file, a folder of files, a saved data set, or a hub name.

    Files are parquet, Arrow, JSON (`.json`, `.jsonl`, `.ndjson`: one object per line, or one array)
    and CSV (`.csv`, `.tsv`); JSON and CSV may be compressed (`.gz`, `.bz2`, `.zst`, `.xz`). A file
    or folder may be in an object store: `s3://bucket/prompts.parquet`.
    """
    name: str | None = None
    """Configuration of a hub data set."""
    split: str | None = None
    """Split of a data set. Null: `train`, or the only one.

    In a folder the names of files say the split, as `datasets` has it; others are `train`.
    """
    column: str | None = None
    """Column to read. Null: the first of `messages`, `conversations`, `conversation` and `prompt`.

    A list of turns may also be JSON text, or a struct of lists.
    """
    shape: PromptShape | None = None
    """Format of `column`. Null: by the column's name, else by its values."""
    template: str | None = None
    """Text of a user turn over columns, in place of `column`: "{instruction}\\n\\n{input}".

    A null or empty column gives an empty text; if it is at an end, so is the blank space next to
    it. Numbers are written out. `{{` and `}}` are braces.
    """
    system_prompt: str | None = None
    """System turn for conversations that have none."""
    system_column: str | Literal[False] | None = None
    """Column with each row's system prompt. Null: `system_prompt` or `system` if present.

    False: none, whatever the columns are called.
    """
    tools_column: str | Literal[False] | None = None
    """Column with each row's tools: a list, or its JSON text. Null: `tools` if present.

    False: none, whatever the columns are called.
    """
    history: Literal["regenerated", "original"] | None = None
    """Answers that later turns see: the generated ones, or the source's own. Null: `original` for
    rows with results of tools, which belong to the source's calls; `regenerated` for others."""
    system_turns: Literal["fit_template", "as_given"] = "fit_template"
    """fit_template: join or map system and developer turns that the model's chat template refuses
    or drops; where the template is not at hand, to one system turn, the first. as_given: send them
    as they are."""
    id_column: str | None = None
    """Column with unique row ids. Null: a hash of each row's content is its id."""
    keep_columns: list[str] = []
    """Columns that are carried to the output under their own names."""
    row_settings: dict[RowSetting, str] | None = None
    """Columns with settings of single rows: `{max_tokens: budget, thinking: think}`.

    A null in a row leaves the setting to the run file. Null: the column `chat_template_kwargs` if
    present; `{}`: none.
    """
    limit: Annotated[int, Field(ge=1, le=_MAX_INT64)] | None = None
    """Number of rows to read, from the first. Null: all."""

    @property
    def fits_system_turns(self) -> bool:
        return self.system_turns == "fit_template"

    @model_validator(mode="after")
    def _check_columns_differ(self) -> Self:
        repeated = [name for name in self.keep_columns if self.keep_columns.count(name) > 1]
        if repeated:
            raise ValueError(
                f"keep_columns: {repeated[0]!r} is listed twice; list each column once"
            )
        return self

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if self.template is None:
            return self
        if self.column is not None or self.shape is not None:
            raise ValueError("template: it stands in place of column and shape; remove them")
        try:
            parts = template_parts(self.template)
        except ValueError as error:
            raise ValueError(f"template: found {self.template!r}; {error}") from None
        if not any(column for _, column in parts):
            raise ValueError(f"template: found {self.template!r}, which names no column")
        return self


class SamplingConfig(Section):
    """Sampling parameters of every request; null leaves a value to the server."""

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = 0.6
    """Randomness; 0 always takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 0.95
    """Sample from the likeliest tokens that have this probability together."""
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = 20
    """Sample from this many of the likeliest tokens; -1 or 0: from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Leave out tokens less likely than this share of the likeliest one."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logit of each token that is in the completion."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted once for each time that the token is in the completion."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    """Divides positive logits of tokens that have been used; 1: none."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = 4096
    """Token budget of one completion. Null: what the server's context leaves."""
    seed: Annotated[int, Field(ge=0, le=_MAX_INT64)] | None = 7
    """Base of each request's own seed; null sends no seed."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """Texts that end a completion; one text or a list."""
    logit_bias: (
        Annotated[
            dict[_TokenId, Annotated[float, Field(ge=-100, le=100)]],
            Field(min_length=1),
        ]
        | None
    ) = None
    """Token id: what is added to its logit."""
    base: Literal["model"] | None = None
    """`model`: keys that are not given come from the model's generation_config.json, and are left
    to the server where that has none. `sampling: model` is short for it. Null: the defaults here.
    """

    @field_validator("stop", mode="before")
    @classmethod
    def _list_of_one(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _ids_as_text(cls, value: object) -> object:
        """Accept ids as numbers, as YAML reads them; JSON has only keys of text."""
        if not isinstance(value, dict):
            return value
        return {str(key) if type(key) is int else key: bias for key, bias in value.items()}

    @property
    def limit_tokens(self) -> int:
        """Token budget to plan for, also where the server decides."""
        return MOST_UNLIMITED_TOKENS if self.max_tokens is None else self.max_tokens


def check_request_fields(fields: Mapping[str, object]) -> None:
    """Raise ValueError for fields of the request's body that the run sets itself."""
    for name in fields:
        if name in _OWN_FIELDS:
            raise ValueError(f"{name}: the run sets this field; use {_OWN_FIELDS[name]}")


_SAMPLING_KEYS = [name for name in SamplingConfig.model_fields if name != "base"]
# Field of a request's body: the key that sets it.
_OWN_FIELDS = {
    **{name: f"sampling.{name}" for name in _SAMPLING_KEYS},
    "max_completion_tokens": "sampling.max_tokens",
    "model": "engine.served_model_name",
    "messages": "the columns of prompts",
    "input_ids": "the columns of prompts",
    "tools": "prompts.tools_column",
    "functions": "prompts.tools_column",
    "chat_template_kwargs": "chat_template_kwargs of the run file",
    "return_token_ids": "engine.return_token_ids",
    "return_prompt_token_ids": "engine.return_token_ids",
    "n": "samples_per_prompt",
    "stream": "none, because answers are read whole",
    "stream_options": "none, because answers are read whole",
}
