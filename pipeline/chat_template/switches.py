"""Find the argument, or the words in the system turn, that switch thinking in a chat template.

Pure: given what each probe renders. An argument is a switch when the template knows its values for
on and off and renders them differently; one whose value is only printed sets an effort.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from pipeline.chat_template.rendering import TemplateFault
from schemas.chat_template import ThinkingSwitch

# Words that templates or models look for in the system turn: on, off.
WORD_PAIRS = (("/think", "/no_think"), ("detailed thinking on", "detailed thinking off"))

_ABOUT_THINKING = re.compile(r"think|reason", re.IGNORECASE)
# Names that are tried first, also where the template's variables cannot be listed.
_FIRST_NAMES = ("enable_thinking", "thinking", "thinking_mode", "reasoning_effort")
# assumed: templates have two or three of them
_MOST_NAMES = 12
_INVERTED = re.compile(r"(disable|no|skip|without|hide|suppress)_", re.IGNORECASE)
_COUNTS = re.compile(r"budget|tokens|length", re.IGNORECASE)
# Values for on and off, in the order of trial; None leaves the argument out.
_VALUE_PAIRS: tuple[tuple[object, object], ...] = (
    (True, False),
    ("enabled", "disabled"),
    ("on", "off"),
    ("thinking", "chat"),
    ("high", "none"),
    ("high", "no_think"),
    (None, 0),
)
_NONSENSE, _NUMBER = "zqnonsenseqz", 1024
_VALUES = (*dict.fromkeys(value for pair in _VALUE_PAIRS[1:] for value in pair), "low")

Probes = Mapping[str, str | TemplateFault]


def names_about_thinking(variables: Iterable[str], text: str) -> list[str]:
    """Return the names of a template's variables that may switch thinking, likely ones first."""
    named = [name for name in _FIRST_NAMES if re.search(rf"\b{name}\b", text)]
    others = sorted(name for name in variables if _ABOUT_THINKING.search(name))
    return list(dict.fromkeys([*named, *others]))[:_MOST_NAMES]


def argument_probes(names: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return the template arguments of each probe, by its key."""
    values = (True, False, *_VALUES, _NONSENSE, _NUMBER)
    return {
        _key(name, value): {} if value is None else {name: value}
        for name in names
        for value in values
    }


def _key(name: str, value: object) -> str:
    return f"{name}={value!r}"


def argument_switch(names: Sequence[str], probes: Probes) -> ThinkingSwitch | None:
    """Return the first argument that turns thinking on and off, with its values."""
    for name in names:
        for on, off in _value_pairs(name):
            if _is_switch(name, on, off, probes):
                if isinstance(on, bool) and _INVERTED.match(name):
                    on, off = off, on
                return ThinkingSwitch(on=_argument(name, on), off=_argument(name, off))
    return None


def _value_pairs(name: str) -> tuple[tuple[object, object], ...]:
    # False equals 0, but an argument that counts is given as a number.
    return _VALUE_PAIRS[-1:] if _COUNTS.search(name) else _VALUE_PAIRS


def _argument(name: str, value: object) -> dict[str, object]:
    return {} if value is None else {name: value}


def _is_switch(name: str, on: object, off: object, probes: Probes) -> bool:
    with_on, with_off = probes[_key(name, on)], probes[_key(name, off)]
    if isinstance(with_on, TemplateFault) or isinstance(with_off, TemplateFault):
        return False
    nonsense, number = probes[_key(name, _NONSENSE)], probes[_key(name, _NUMBER)]
    is_printed = isinstance(nonsense, str) and _NONSENSE in nonsense
    if isinstance(off, bool):
        if is_printed:
            with_on, with_off = _without(with_on, str(on)), _without(with_off, str(off))
        return with_on != with_off
    if isinstance(off, str):
        # The template has to know the word: others may be refused, and are not printed like it.
        return with_on != with_off and with_off != nonsense and not is_printed
    digits = re.compile(r"\d+")
    is_like_others = isinstance(number, str) and digits.sub("#", number) == digits.sub(
        "#", with_off
    )
    return with_on != with_off and not is_like_others and not is_printed


def word_switch(probes: Probes) -> ThinkingSwitch | None:
    """Return the words in the system turn that the template itself looks for."""
    for on, off in WORD_PAIRS:
        with_on, with_off = probes[on], probes[off]
        if isinstance(with_on, TemplateFault) or isinstance(with_off, TemplateFault):
            continue
        if _without(with_on, on) != _without(with_off, off):
            return ThinkingSwitch(words=(on, off))
    return None


def _without(text: str, words: str) -> str:
    return "".join(text.replace(words, "").split())


def efforts_of(
    names: Sequence[str], probes: Probes, switch: ThinkingSwitch | None
) -> tuple[str, ...]:
    """Return the arguments whose values alter the prompt without turning thinking off."""
    switched = set(switch.off) if switch is not None else set()
    return tuple(
        name
        for name in names
        if name not in switched and _differ(probes[_key(name, "low")], probes[_key(name, "high")])
    )


def _differ(one: str | TemplateFault, other: str | TemplateFault) -> bool:
    return isinstance(one, str) and isinstance(other, str) and one != other
