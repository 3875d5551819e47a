"""Find the chat template that a run's engines use: a file named in the flags, the model's own.

Order and fallbacks are those of transformers 5, tokenization_utils_base.py: `chat_template.jinja`
before the field of `tokenizer_config.json`; `additional_chat_templates/tool_use.jinja`, or the
entry `tool_use` of a list, for requests with tools. `chat_template.json` is a processor's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.chat_template.rendering import ChatTemplate
from pipeline.errors import ConfigError, PlanError
from pipeline.models.files import model_folder
from pipeline.models.gguf_template import gguf_chat_template
from pipeline.models.hub import hub_text
from pipeline.planner.sglang.flags import parse_launch_line
from pipeline.untrusted.parsing import UnreadableError, bytes_of, json_object

_JINJA, _CONFIG, _PROCESSOR = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"
_NAMED = "additional_chat_templates/{name}.jinja"
_DEFAULT, _TOOL_USE = "default", "tool_use"
# assumed: tokenizer_config.json with 100,000 added tokens has a quarter of it
_MOST_BYTES = 64 << 20

ReadText = Callable[[str], str | None]
"""Function from a file's name in the repository to its text; None for a file that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTemplate:
    """The reason why no chat template is at hand."""

    why: str


def file_template(path: Path) -> ChatTemplate:
    """Read the template of a file, as SGLang does for `--chat-template`. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.flags: cannot read --chat-template {path}: {error}") from None
    if path.suffix == ".json":
        text = _field(text, path.name) or text
    return ChatTemplate(text=text, source=str(path))


def gguf_template(path: Path) -> ChatTemplate | NoTemplate:
    """Read the template in a GGUF file's metadata."""
    found = gguf_chat_template(path)
    if found is None:
        return NoTemplate(why=f"{path.name} contains no chat template")
    return ChatTemplate(text=found[0], source=path.name, special_tokens=found[1])


def model_template(model: str, *, name: str | None = None) -> ChatTemplate | NoTemplate:
    """Find a model's template: in its folder, the hub's cache, or on the hub.

    `name` chooses one of several named templates.
    """
    folder = model_folder(model)
    if folder is not None:
        found = _template(lambda file: _text_in(folder, file), model, name)
        if found is not None:
            return found
        if folder == Path(model):
            return NoTemplate(why=f"{model} contains no chat template")
    if model.count("/") != 1 or Path(model).is_absolute():
        return NoTemplate(why=f"{model!r} is neither a folder nor a name on the hub")
    try:
        found = _template(lambda file: hub_text(model, file), model, name)
    except PlanError as error:
        return NoTemplate(why=str(error))
    return found or NoTemplate(why=f"the repository {model} has no chat template on the hub")


def _text_in(folder: Path, file: str) -> str | None:
    path = folder / file
    try:
        return bytes_of(path, most=_MOST_BYTES).decode() if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read {path}: {error}") from None


def _template(read: ReadText, model: str, name: str | None) -> ChatTemplate | None:
    config = _mapping(read(_CONFIG), _CONFIG)
    named, origin = _named_templates(config), _CONFIG
    jinja = read(_JINJA)
    if jinja is not None:
        named[_DEFAULT], origin = jinja, _JINJA
    elif not named:
        processor = _field(read(_PROCESSOR), _PROCESSOR)
        if processor is not None:
            named[_DEFAULT], origin = processor, _PROCESSOR
    if not named:
        return None
    for other in dict.fromkeys(filter(None, (_TOOL_USE, name))):
        extra = read(_NAMED.format(name=other)) if jinja is not None else None
        if extra is not None:
            named[other] = extra
    if name is not None and name not in named:
        raise ConfigError(
            f"engine.flags: --hf-chat-template-name {name!r} is none of {model}'s templates; "
            f"it has: {', '.join(named)}"
        )
    chosen = name or (_DEFAULT if _DEFAULT in named else next(iter(named)))
    return ChatTemplate(
        text=named[chosen],
        source=f"{origin} of {model}",
        special_tokens=_special_tokens(config, read),
        tool_text=None if name else named.get(_TOOL_USE),
    )


def _named_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of a tokenizer config, whose field is one text or a list of named ones.

    Old files map names to texts.
    """
    field = config.get("chat_template")
    if isinstance(field, str):
        return {_DEFAULT: field}
    if isinstance(field, list):
        pairs = [(one.get("name"), one.get("template")) for one in field if isinstance(one, dict)]
    elif isinstance(field, dict):
        pairs = list(field.items())
    else:
        return {}
    return {str(name): text for name, text in pairs if isinstance(text, str)}


def _special_tokens(config: Mapping[str, Any], read: ReadText) -> dict[str, str]:
    found = _tokens_in(config)
    if not {"bos_token", "eos_token"} <= found.keys():
        found = {**_tokens_in(_mapping(read("special_tokens_map.json"), "it")), **found}
    return found


def _tokens_in(fields: Mapping[str, Any]) -> dict[str, str]:
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in fields.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _field(text: str | None, file: str) -> str | None:
    field = _mapping(text, file).get("chat_template")
    return field if isinstance(field, str) else None


def _mapping(text: str | None, file: str) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        return json_object(text)
    except UnreadableError as error:
        raise ConfigError(f"model: {file} is {error}") from None


def launch_template(model: str, flags: Sequence[str]) -> ChatTemplate | NoTemplate:
    """Find the template that SGLang uses when it is launched with these flags.

    `--chat-template` is a file of jinja, else the name of a template that is built into SGLang.
    """
    given = parse_launch_line(flags)
    template = given.text("chat-template")
    if not template:
        return model_template(model, name=given.text("hf-chat-template-name") or None)
    if Path(template).is_file():
        return file_template(Path(template))
    return NoTemplate(why=f"--chat-template {template} is built into SGLang, or on another machine")
