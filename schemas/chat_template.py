"""Facts of a model's chat template, found by rendering it or looked up by the model's name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

TurnFate = Literal["kept", "foreign", "dropped", "refused", "unknown"]
"""`kept`: the turn is in the prompt; `foreign`: it is, under a role that the template does not
know; `dropped`: it is not; `refused`: the template raises an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingTags:
    """The marks around thinking in a model's text."""

    opening: str
    closing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingSwitch:
    """Arguments of the template, or words, with which a request turns thinking on and off."""

    on: dict[str, object] = field(default_factory=dict)
    """`chat_template_kwargs` that turn thinking on."""
    off: dict[str, object] = field(default_factory=dict)
    words: tuple[str, str] | None = None
    """Words in the system turn that turn thinking on and off, where no argument does."""

    def kwargs(self, *, thinking: bool) -> dict[str, object]:
        return dict(self.on if thinking else self.off)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """Answers about a chat template: its thinking and its system turns; None is unknown."""

    source: str
    """Origin of the facts, for people."""
    digest: str | None = None
    """Hash of the template; None where the facts come from the model's name."""
    thinks: bool | None = None
    """The template has thinking: a switch, an opening, or a place for earlier reasoning."""
    switch: ThinkingSwitch | None = None
    """Switch of thinking; None where it cannot be switched."""
    opens_when_on: bool = False
    """The prompt ends inside the thinking, so the model's text begins there."""
    opens_when_off: bool = False
    tags: ThinkingTags | None = None
    efforts: tuple[str, ...] = ()
    """Arguments that set how long the model thinks, and do not turn it off."""
    keeps_earlier_reasoning: bool | None = None
    """The `reasoning_content` of a turn before the last user turn is in the prompt."""
    keeps_last_reasoning: bool | None = None
    """The `reasoning_content` of a last assistant turn is in the text."""
    cuts_answers: bool | None = None
    """An earlier answer that contains the closing tag loses what is before it."""
    added_system: str | None = None
    """Text that the template puts before a conversation without a system turn; empty: none."""
    system: TurnFate = "unknown"
    developer: TurnFate = "unknown"
    second_system: TurnFate = "unknown"
    late_system: TurnFate = "unknown"
    """A system turn after the first user turn."""

    def thinking_kwargs(self, *, thinking: bool) -> dict[str, object]:
        """Return the `chat_template_kwargs` that switch thinking; empty where none does."""
        return {} if self.switch is None else self.switch.kwargs(thinking=thinking)

    def opens_thinking(self, *, thinking: bool) -> bool:
        return self.opens_when_on if thinking else self.opens_when_off

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> "TemplateFacts":
        """Build the facts from their JSON. Raises TypeError, ValueError or KeyError."""
        fields = dict(values)
        switch, tags = fields.get("switch"), fields.get("tags")
        if isinstance(switch, dict):
            words = switch.get("words")
            fields["switch"] = ThinkingSwitch(
                on=switch["on"], off=switch["off"], words=(words[0], words[1]) if words else None
            )
        if isinstance(tags, dict):
            fields["tags"] = ThinkingTags(**tags)
        efforts = fields.get("efforts")
        fields["efforts"] = tuple(efforts) if isinstance(efforts, list | tuple) else ()
        return cls(**fields)  # type: ignore[arg-type]
