"""Sentences of the card: what a format keeps of what the model saw, and what a text form loses."""

from collections.abc import Iterator

from pipeline.export.markup import code
from schemas.chat_template import TemplateFacts
from schemas.export import ExportOptions

# assumed: enough of a template's system turn to recognise it
_MAX_QUOTED = 200


def fidelity_lines(
    options: ExportOptions, template: TemplateFacts | None, *, rows_cut_off: int
) -> Iterator[str]:
    """Yield sentences for the card, each a paragraph or an item of a list.

    `rows_cut_off` counts the generated rows that ended at the limit of tokens.
    """
    if options.format == "tokens":
        yield (
            "A row is a turn, exactly as the model saw it: `input_ids` are the prompt and the "
            "completion as the engine had them, and `loss_mask` is 1 on the generated ones."
        )
        return
    if options.format == "rows":
        yield (
            "The columns are those of the run. `turns` has the token ids as the engine had them; "
            "`messages` are text."
        )
        return
    losses = [f"- {loss}" for loss in _losses(options, template, rows_cut_off)]
    yield (
        "The messages are text, which a trainer renders with its chat template again. The format "
        f"`tokens` has exactly what the model saw.{' What this text can lose:' if losses else ''}"
    )
    yield from losses


def _losses(
    options: ExportOptions, template: TemplateFacts | None, rows_cut_off: int
) -> Iterator[str]:
    if options.format == "specforge":
        # SpecForge 0.2.0 renders with chat templates of its own, by `data.chat_template`.
        yield (
            "SpecForge's own chat template may add another system turn than the model's to a "
            "conversation without one."
        )
    else:
        yield from _system_losses(template)
    if options.reasoning == "drop":
        yield "The reasoning is left out, as `--reasoning drop` says."
    elif options.reasoning == "inline" or options.format == "conversations":
        yield from _inline_losses(template)
    else:
        yield from _reasoning_losses(options, template)
    if rows_cut_off:
        yield (
            f"{rows_cut_off:,} generated rows ended at the limit of tokens. A trainer puts an end "
            "token behind them that the model did not generate."
        )


def _system_losses(template: TemplateFacts | None) -> Iterator[str]:
    if template is None or template.added_system is None:
        yield (
            "Whether the model's chat template adds a system turn to a conversation without one "
            "is not known. The text has none."
        )
    elif template.added_system:
        yield (
            "The model's chat template adds a system turn to a conversation without one, and the "
            f"text has none: {_quoted(template.added_system)}. A trainer must render with the "
            "same template to have it."
        )


def _reasoning_losses(options: ExportOptions, template: TemplateFacts | None) -> Iterator[str]:
    if template is None or template.keeps_last_reasoning is None:
        yield "Whether the chat template keeps `reasoning_content` is not known."
    elif not template.keeps_last_reasoning:
        yield (
            "The model's chat template renders no `reasoning_content`, so a trainer that uses it "
            "sees no reasoning; `--reasoning inline` puts it into the text."
        )
    elif template.keeps_earlier_reasoning is False and options.format != "speculators":
        yield (
            "The model's chat template leaves out the reasoning before the last user turn. A "
            "trainer that renders a whole conversation with it sees no reasoning in its earlier "
            "answers, and should learn the last turn only."
        )


def _inline_losses(template: TemplateFacts | None) -> Iterator[str]:
    if template is None or template.cuts_answers is None:
        yield "Whether the chat template cuts answers at a closing tag of thinking is not known."
    elif template.cuts_answers:
        yield (
            "The reasoning is part of the text. The model's chat template cuts earlier answers at "
            "its closing tag, so a trainer that uses it sees no reasoning in them, and should "
            "learn the last turn only."
        )


def _quoted(text: str) -> str:
    words = " ".join(text.split())
    return code(words if len(words) <= _MAX_QUOTED else f"{words[: _MAX_QUOTED - 1]}…")
