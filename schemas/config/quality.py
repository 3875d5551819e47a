"""The `quality` section of the run file: flags, their policies and limits."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from schemas.config.section import Section

FlagPolicy = Literal["keep", "drop", "retry"]


class FlagConfig(Section):
    """Settings of one flag: its check, the policy for its rows, and its limit."""

    enabled: bool = True
    """Check rows for this flag."""
    policy: FlagPolicy = "drop"
    """Keep the row; drop it from the export; or retry first, and drop it if that fails."""
    max_share: Annotated[float, Field(ge=0, lt=1)] | None = 0.05
    """Share of rows above which the canary stops the run and an engine drained. Null: no limit."""


class RareFlagConfig(FlagConfig):
    max_share: Annotated[float, Field(ge=0, lt=1)] | None = 0.02
    """Limit of the share, as for the other flags."""


class EmptyReasoningConfig(FlagConfig):
    policy: FlagPolicy = "keep"
    """Policy, as for the other flags."""
    max_share: Annotated[float, Field(ge=0, lt=1)] | None = 0.2
    """Higher than elsewhere: models that choose for themselves answer some questions at once."""


class RefusalConfig(FlagConfig):
    enabled: bool = False
    """Check rows for refusals. Disabled by default: they may be what the target answers."""
    policy: FlagPolicy = "keep"
    """Policy, as for the other flags."""
    max_share: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Limit of the share, as for the other flags."""


class LoopingConfig(FlagConfig):
    tail_characters: Annotated[int, Field(ge=50)] = 300
    """A text loops if it ends in one repeated stretch at least this long."""
    window_words: Annotated[int, Field(ge=50)] = 200
    """Length of the windows in which distinct six-word sequences are counted."""
    min_distinct_share: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Share of distinct six-word sequences in a window below which the text loops."""
    max_repeated_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of repeated sentences above which the text loops."""


class LeakedThinkingConfig(FlagConfig):
    min_cues: Annotated[int, Field(ge=1)] = 2
    """Number of different phrases of thinking aloud from which an answer is flagged."""


class WrongLanguageConfig(FlagConfig):
    enabled: bool = False
    """Disabled by default: it needs the optional package py3langid."""
    min_characters: Annotated[int, Field(ge=20)] = 80
    """Minimum of prose: the language of a shorter text cannot be told."""
    min_probability: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Probability of another language from which an answer is flagged."""


class CopiedPromptConfig(RareFlagConfig):
    min_words: Annotated[int, Field(ge=1)] = 5
    """Shorter answers are not compared."""
    min_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the answer's four-word sequences that are in the prompt, and the reverse."""


class TooShortConfig(FlagConfig):
    min_characters: Annotated[int, Field(ge=0)] = 1
    """Minimum for every answer."""
    min_characters_of_long: Annotated[int, Field(ge=0)] = 40
    """Minimum for a prompt that requests an essay, a story or an explanation."""


class QualityConfig(Section):
    """Flags of rows, and the limits that stop a run or drain an engine.

    assumed: the shares are what a healthy run of a thinking model stays below.
    """

    canary_rows: Annotated[int, Field(ge=0)] = 500
    """Random rows that run and are judged before all others; 0: no canary."""
    window_rows: Annotated[int, Field(ge=0)] = 200
    """Last rows of each engine that are held to the same limits; 0: no check."""
    min_length_ratio: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Lower limit of mean completion tokens over `lengths.output_tokens_mean`, if that is given."""
    max_length_ratio: Annotated[float, Field(ge=1)] = 2.5
    """Upper limit of the same ratio."""
    max_error_share: Annotated[float, Field(ge=0, lt=1)] | None = 0.2
    """Share of error rows above which the canary stops the run."""
    max_attempts: Annotated[int, Field(ge=1, le=20)] = 3
    """Attempts at one turn whose flags have the policy `retry`."""
    budget_factor: Annotated[float, Field(ge=1, le=16)] = 2.0
    """Factor by which each retry of a cut turn raises the token limit."""
    temperatures: Annotated[list[Annotated[float, Field(ge=0, le=2)]], Field(min_length=1)] = [
        0.8,
        1.0,
    ]
    """Temperature of the second, third, ... attempt at a turn that loops or was drawn greedily."""
    empty_answer: RareFlagConfig = RareFlagConfig()
    """Answer without text and without tool calls."""
    empty_reasoning: EmptyReasoningConfig = EmptyReasoningConfig()
    """Turn without reasoning although thinking was requested."""
    unasked_reasoning: FlagConfig = FlagConfig()
    """Reasoning of a turn that was requested without thinking."""
    cut_in_thinking: FlagConfig = FlagConfig()
    """Turn that ended at the limit of tokens before its answer began."""
    cut_in_answer: FlagConfig = FlagConfig()
    """Turn that ended at the limit of tokens in its answer."""
    looping: LoopingConfig = LoopingConfig()
    """Reasoning or answer that repeats itself."""
    leftover_tags: RareFlagConfig = RareFlagConfig()
    """Tags of thinking, tools or chat turns left in the text."""
    thinking_leaked_into_answer: LeakedThinkingConfig = LeakedThinkingConfig()
    """Answer that thinks aloud."""
    refusal: RefusalConfig = RefusalConfig()
    """Answer that refuses the request."""
    wrong_language: WrongLanguageConfig = WrongLanguageConfig()
    """Answer in another language than the prompt."""
    copied_prompt: CopiedPromptConfig = CopiedPromptConfig()
    """Answer that copies the prompt."""
    too_short: TooShortConfig = TooShortConfig()
    """Answer shorter than the prompt asks for."""
    not_utf8_clean: RareFlagConfig = RareFlagConfig()
    """Replacement or control characters in the text."""

    def flags(self) -> Iterator[FlagConfig]:
        """Yield the section of each flag."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return (value for value in values if isinstance(value, FlagConfig))

    def flag(self, name: str) -> FlagConfig:
        section = getattr(self, name)
        assert isinstance(section, FlagConfig)
        return section
