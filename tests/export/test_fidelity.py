"""The card says which form is exact, and what a text form loses with the run's own template."""

from dataclasses import replace

import pytest

from pipeline.export.fidelity import fidelity_lines
from schemas.chat_template import TemplateFacts
from schemas.export import ExportFormat, ExportOptions

KEEPS_ALL = TemplateFacts(
    source="a template", added_system="", keeps_earlier_reasoning=True, keeps_last_reasoning=True,
    cuts_answers=False,
)  # fmt: skip
TEXT_FORMATS: list[ExportFormat] = ["messages", "conversations", "speculators"]


def lines(
    template: TemplateFacts | None = KEEPS_ALL,
    options: ExportOptions | None = None,
    rows_cut_off: int = 0,
) -> list[str]:
    options = options or ExportOptions()
    return list(fidelity_lines(options, template, rows_cut_off=rows_cut_off))


def test_token_rows_are_exact_whatever_the_template_does() -> None:
    (line,) = lines(None, ExportOptions(format="tokens"), rows_cut_off=3)
    assert "exactly as the model saw it" in line


@pytest.mark.parametrize("format_", TEXT_FORMATS)
def test_text_forms_name_the_exact_one(format_: ExportFormat) -> None:
    head, *losses = lines(options=ExportOptions(format=format_))
    assert "`tokens` has exactly what the model saw" in head
    assert losses == []


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({"added_system": "You are Qwen."}, "the text has none: `You are Qwen.`"),
        ({"added_system": None}, "adds a system turn to a conversation without one is not known"),
        ({"keeps_earlier_reasoning": False}, "leaves out the reasoning before the last user turn"),
        ({"keeps_last_reasoning": False}, "renders no `reasoning_content`"),
        ({"keeps_last_reasoning": None}, "keeps `reasoning_content` is not known"),
    ],
)
def test_loss_is_the_templates(changes: dict[str, object], loss: str) -> None:
    _, *losses = lines(replace(KEEPS_ALL, **changes))  # type: ignore[arg-type]
    assert len(losses) == 1
    assert loss in losses[0]


def test_specforge_has_templates_of_its_own() -> None:
    _, loss = lines(options=ExportOptions(format="specforge"))
    assert "SpecForge's own chat template" in loss


def test_speculators_renders_each_turn_with_its_own_reasoning() -> None:
    drops = replace(KEEPS_ALL, keeps_earlier_reasoning=False)
    _, *losses = lines(drops, ExportOptions(format="speculators"))
    assert losses == []


def test_run_without_a_template_leaves_open_what_it_does() -> None:
    _, *losses = lines(None)
    assert len(losses) == 2
    assert all("not known" in loss for loss in losses)


def test_inline_reasoning_is_lost_where_the_template_cuts_answers() -> None:
    cuts = replace(KEEPS_ALL, cuts_answers=True, keeps_earlier_reasoning=False)
    for options in (ExportOptions(format="conversations"), ExportOptions(reasoning="inline")):
        _, loss = lines(cuts, options)
        assert "cuts earlier answers at its closing tag" in loss


def test_rows_at_the_limit_get_an_end_that_was_not_generated() -> None:
    _, loss = lines(rows_cut_off=1234)
    assert loss.startswith("- 1,234 generated rows ended at the limit")


def test_system_turn_of_a_template_is_no_markup() -> None:
    _, loss = lines(replace(KEEPS_ALL, added_system="a `b` \n\n# c " + "x" * 500))
    assert "\n" not in loss
    assert "`` a `b` # c x" in loss
    assert len(loss) < 500
