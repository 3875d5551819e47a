"""The run file's `quality` section: what is looked for in a row, and what follows."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from schemas.section import Section

FlagPolicy = Literal["keep", "drop", "retry"]


class FlagConfig(Section):
    """One flag: whether it is looked for, what becomes of its rows, and how many are too many."""

    enabled: bool = True
    policy: FlagPolicy = "drop"
    """Keep the row; drop it from the export; or ask again first, and drop it if that fails."""
    max_share: Annotated[float, Field(ge=0, lt=1)] | None = 0.05
    """Share of rows above which the canary stops the run and an engine is drained. Null: any."""


class RareFlagConfig(FlagConfig):
    max_share: Annotated[float, Field(ge=0, lt=1)] | None = 0.02


class EmptyReasoningConfig(FlagConfig):
    policy: FlagPolicy = "keep"
    max_share: Annotated[float, Field(ge=0, lt=1)] | None = 0.2
    """Families that choose for themselves leave some questions without thinking."""


class RefusalConfig(FlagConfig):
    enabled: bool = False
    policy: FlagPolicy = "keep"
    max_share: Annotated[float, Field(ge=0, lt=1)] | None = None


class LoopingConfig(FlagConfig):
    tail_characters: Annotated[int, Field(ge=50)] = 300
    """A text that ends in one stretch repeated over so many characters loops."""
    window_words: Annotated[int, Field(ge=50)] = 200
    min_distinct_share: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Six-word sequences of a window that are unlike each other; fewer are a loop."""
    max_repeated_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Sentences that stood there before; more are a loop."""


class LeakedThinkingConfig(FlagConfig):
    min_cues: Annotated[int, Field(ge=1)] = 2
    """Different turns of phrase of thinking aloud that make an answer suspect."""


class WrongLanguageConfig(FlagConfig):
    enabled: bool = False
    """Needs the optional package py3langid."""
    min_characters: Annotated[int, Field(ge=20)] = 80
    """Of prose; a language is not told from less."""
    min_probability: Annotated[float, Field(gt=0, le=1)] = 0.95


class CopiedPromptConfig(RareFlagConfig):
    min_words: Annotated[int, Field(ge=1)] = 5
    min_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Of the answer's four-word sequences that are the prompt's, and the other way round."""


class TooShortConfig(FlagConfig):
    min_characters: Annotated[int, Field(ge=0)] = 1
    min_characters_of_long: Annotated[int, Field(ge=0)] = 40
    """Of an answer to a prompt that asks for an essay, a story or an explanation."""


class QualityConfig(Section):
    """What is wrong with a row, what becomes of it, and when a run or an engine is stopped.

    The shares are assumed: what a healthy run of a thinking model stays below.
    """

    canary_rows: Annotated[int, Field(ge=0)] = 500
    """Rows, drawn at random, that run and are judged before all others; 0: none."""
    window_rows: Annotated[int, Field(ge=0)] = 200
    """Last rows of each engine that are held to the same limits; 0: none."""
    min_length_ratio: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Mean completion tokens over `lengths.output_tokens_mean`, where the run file gives that."""
    max_length_ratio: Annotated[float, Field(ge=1)] = 2.5
    max_error_share: Annotated[float, Field(ge=0, lt=1)] | None = 0.2
    """Share of error rows that is too many for the canary."""
    max_attempts: Annotated[int, Field(ge=1, le=20)] = 3
    """Tries of one turn whose flags ask for another."""
    budget_factor: Annotated[float, Field(ge=1, le=16)] = 2.0
    """Each further try of a turn that was cut may be so much longer."""
    temperatures: Annotated[list[Annotated[float, Field(ge=0, le=2)]], Field(min_length=1)] = [
        0.8,
        1.0,
    ]
    """Of the second, third, ... try of a turn that loops or was drawn greedily."""
    empty_answer: RareFlagConfig = RareFlagConfig()
    empty_reasoning: EmptyReasoningConfig = EmptyReasoningConfig()
    cut_in_thinking: FlagConfig = FlagConfig()
    cut_in_answer: FlagConfig = FlagConfig()
    looping: LoopingConfig = LoopingConfig()
    leftover_tags: RareFlagConfig = RareFlagConfig()
    thinking_leaked_into_answer: LeakedThinkingConfig = LeakedThinkingConfig()
    refusal: RefusalConfig = RefusalConfig()
    wrong_language: WrongLanguageConfig = WrongLanguageConfig()
    copied_prompt: CopiedPromptConfig = CopiedPromptConfig()
    too_short: TooShortConfig = TooShortConfig()
    not_utf8_clean: RareFlagConfig = RareFlagConfig()

    def flags(self) -> Iterator[FlagConfig]:
        """The sections of all flags."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return (value for value in values if isinstance(value, FlagConfig))

    def flag(self, name: str) -> FlagConfig:
        found = getattr(self, name)
        assert isinstance(found, FlagConfig)
        return found
