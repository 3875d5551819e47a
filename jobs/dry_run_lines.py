"""The dry run's findings as text: counts, what the model will see, and warnings last."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from schemas.config.run_file import RunFile

if TYPE_CHECKING:
    from pipeline.chat_template.preview import ShownPrompt
    from pipeline.run.dry_run import DryRun
    from schemas.chat_template import TemplateFacts

_BELOW = " " * 11
# Lines of a prompt that are printed at its head and at its end; --json has the whole.
_HEAD_LINES, _END_LINES = 16, 8
_LINE_CHARACTERS = 200
_MOST_COLUMNS = 12


def dry_run_lines(config: RunFile, counts: "DryRun", engines: Iterable[str] = ()) -> Iterator[str]:
    """Yield the lines of a dry run; `engines` are those of its engines."""
    yield f"prompts    {config.prompts.path}: column {counts.column!r}, read as {counts.shape}"
    yield from (f"not read   {line}" for line in counts.left_out)
    if counts.unread_columns:
        yield f"not read   {_unread(counts.unread_columns)}"
    if counts.system_column is not None:
        yield f"system     {_system_column(config, counts.system_column)}"
    if counts.row_settings:
        columns = ", ".join(f"{name} from {of!r}" for name, of in counts.row_settings.items())
        yield f"settings   of single rows: {columns}; prompts.row_settings: {{}} leaves them out"
    yield f"rows       {counts.rows_total:,} to generate, {counts.rows_done:,} of them done"
    yield f"turns      {counts.turns:,} assistant turns"
    yield f"tokens     {counts.prompt_tokens:,} in prompts ({counts.token_method})"
    yield from _tools_lines(config, counts)
    yield from engines
    yield f"template   {_template(counts)}"
    yield f"thinking   {_thinking(config, counts.template)}"
    if counts.prompts_refitted:
        yield f"turns sent {_refitted(config, counts)}"
    for prompt in counts.shown:
        yield from _prompt_lines(prompt, "" if counts.is_exact else "about ")
    if counts.prompts_without_room:
        yield (
            f"no room    {counts.prompts_without_room:,} prompts and sampling.max_tokens are more "
            f"than the context of {counts.context_tokens:,}: an engine refuses them"
        )
    for kind, (count, example) in counts.problems.items():
        yield f"bad rows   {count:,} {kind}: they end as error rows, e.g. {example}"
    for warning in counts.warnings:
        yield f"warning    {warning}"


def _unread(columns: Sequence[str]) -> str:
    named = ", ".join(repr(name) for name in columns[:_MOST_COLUMNS])
    more = f" and {len(columns) - _MOST_COLUMNS:,} more" if len(columns) > _MOST_COLUMNS else ""
    noun = "column" if len(columns) == 1 else "columns"
    return (
        f"{noun} {named}{more}: prompts.id_column takes ids from one, and prompts.keep_columns "
        f"carries columns to the output"
    )


def _tools_lines(config: RunFile, counts: "DryRun") -> Iterator[str]:
    if counts.tools_column or counts.prompts_with_tools:
        column = f" of column {counts.tools_column!r}" if counts.tools_column else ""
        number = counts.prompts_with_tools
        yield f"tools      {number:,} prompts with tools{column}, or with calls of them"
    if counts.prompts_with_original_history:
        why = "" if config.prompts.history else ", because they have results of tools"
        yield (
            f"history    {counts.prompts_with_original_history:,} prompts: later turns see the "
            f"source's own answers{why} (prompts.history)"
        )


def _system_column(config: RunFile, column: str) -> str:
    if config.prompts.system_column is not None:
        return f"column {column!r} is the system turn of conversations that have none"
    return (
        f"column {column!r}, recognised by its name, is the system turn of conversations that have "
        f"none; prompts.system_column: false leaves it out"
    )


def _template(counts: "DryRun") -> str:
    if not counts.why_no_template:
        return counts.template.source
    return f"not at hand: {counts.why_no_template}; assumed: {counts.template.source}"


def _thinking(config: RunFile, facts: "TemplateFacts") -> str:
    state = "on" if config.thinking else "off"
    if facts.thinks is False:
        return f"{state}; the template has no thinking"
    if facts.switch is None:
        return f"{state}; the template has no switch for it"
    if facts.switch.words is not None:
        return f"{state}, by the words {facts.switch.words[0 if config.thinking else 1]!r}"
    kwargs = {**facts.thinking_kwargs(thinking=config.thinking), **config.chat_template_kwargs}
    return f"{state}, by chat_template_kwargs {json.dumps(kwargs, ensure_ascii=False)}"


def _refitted(config: RunFile, counts: "DryRun") -> str:
    facts = counts.template
    what = f"{counts.prompts_refitted:,} prompts: "
    if facts.switch is not None and facts.switch.words is not None:
        what += "the words for thinking are in their system turn; "
    if not config.prompts.fits_system_turns:
        return what.removesuffix("; ")
    if facts.digest is None:
        what += "system and developer turns become one system turn, the first, or join a user turn"
    else:
        fates = {
            "system": facts.system,
            "developer": facts.developer,
            "a second system turn": facts.second_system,
            "a later system turn": facts.late_system,
        }
        ones = [f"{name}: {fate}" for name, fate in fates.items() if fate != "kept"]
        what += f"system turns are joined or mapped, by the template ({', '.join(ones)})"
    return f"{what}; prompts.system_turns: as_given sends them as they are"


def _prompt_lines(prompt: "ShownPrompt", about: str) -> Iterator[str]:
    name = f"prompt     {prompt.kind}, row {prompt.row_id}"
    if prompt.text is None:
        why = f"refused by the template: {prompt.fault}" if prompt.fault else "not rendered here"
        yield f"{name}: {why}"
        return
    yield f"{name}: {about}{prompt.num_tokens:,} tokens"
    lines = [_cut(line) for line in prompt.text.splitlines()]
    hidden = len(lines) - _HEAD_LINES - _END_LINES
    if hidden > 1:
        lines[_HEAD_LINES:-_END_LINES] = [f"[{hidden:,} lines]"]
    yield from (f"{_BELOW}| {line}" for line in lines)
    where = "inside its thinking" if prompt.opens_thinking else "its turn"
    yield f"{_BELOW}^ the model begins here, {where}"


def _cut(line: str) -> str:
    # Printed on one line each, whatever separators of lines and terminals are in it.
    shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in line)
    return shown if len(shown) <= _LINE_CHARACTERS else f"{shown[: _LINE_CHARACTERS - 3]}..."
