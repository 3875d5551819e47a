"""The facts of a run's chat template: found at its first session, and kept for the later ones.

What a template does decides what the model sees, so rows of two templates are not mixed unawares.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.chat_template.probes import template_facts
from pipeline.chat_template.rendering import ChatTemplate, TemplateFault
from pipeline.chat_template.source import NoTemplate
from pipeline.errors import ResumeError
from pipeline.models.thinking import facts_by_name
from schemas.chat_template import TemplateFacts
from schemas.config.run_file import RunFile
from schemas.manifest import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTemplate:
    """The template of a run's model where it is at hand, and the facts in any case."""

    facts: TemplateFacts
    template: ChatTemplate | None
    why_none: str = ""
    """Reason why the template is not at hand, or cannot be used."""


def find_facts(config: RunFile, found: ChatTemplate | NoTemplate) -> FoundTemplate:
    """Find the facts of the engines' template; without one they come from the model's name."""
    if isinstance(found, NoTemplate):
        return FoundTemplate(facts=facts_by_name(config.model), template=None, why_none=found.why)
    facts = template_facts(found, config.model)
    if isinstance(facts, TemplateFault):
        why = f"{found.source} does not render a question: {facts.cause}"
        return FoundTemplate(facts=facts_by_name(config.model), template=None, why_none=why)
    return FoundTemplate(facts=facts, template=found)


def facts_of_run(
    record: RunRecord | None, found: TemplateFacts, *, accept_drift: bool
) -> TemplateFacts:
    """Return the facts for this session: the recorded ones where the template is not at hand.

    Raises ResumeError when the template is another one than the published rows had.
    """
    kept = record.template if record is not None else None
    if kept is None or kept.digest is None or kept.digest == found.digest:
        return found
    if found.digest is None:
        return kept
    if not accept_drift:
        raise ResumeError(
            f"chat template: the run in this folder has that of {kept.source} ({kept.digest}), "
            f"the model now has that of {found.source} ({found.digest})\nthe data set would mix "
            "rows of both; use another output.folder, or --accept-drift to go on"
        )
    return found


def thinking_warnings(config: RunFile, facts: TemplateFacts) -> Iterator[str]:
    """Yield what `thinking` of the run file cannot do with this model, and what to do."""
    switch, model = facts.switch, config.model
    if not config.thinking and facts.thinks and switch is None:
        effort = f"; {facts.efforts[0]} sets how long it thinks" if facts.efforts else ""
        yield (
            f"thinking: false has no effect, because thinking of {model!r} cannot be switched off "
            f"({facts.source}): rows will have reasoning and the flag unasked_reasoning; set "
            f"thinking: true{effort}"
        )
    if config.thinking and facts.thinks is False:
        yield (
            f"thinking: true adds nothing to a prompt: the chat template of {model!r} "
            f"({facts.source}) knows no thinking; set thinking: false unless the model thinks "
            f"without being asked"
        )
    for name, value in (switch.kwargs(thinking=config.thinking) if switch else {}).items():
        given = config.chat_template_kwargs.get(name, value)
        if given != value:
            yield (
                f"chat_template_kwargs sets {name} to {given!r}, against thinking: "
                f"{str(config.thinking).lower()}; remove one of them"
            )
