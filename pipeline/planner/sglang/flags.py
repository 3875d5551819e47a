"""SGLang's launch line, as people paste it, parsed into `LaunchFlags` and back.

Flags are kept under their newest spelling. A flag that no release in the table has is set aside
and reported, never dropped in silence. `argv` returns a line that parses to the same flags.

argparse itself does not fit: it drops the order of flags, and cannot tell the values of an unknown
flag from words that belong to none.
"""

import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import PlanError

_DATA = Path(__file__).with_name("data") / "sglang_flags.json"

# Older and shorter spellings → the newest, from SGLang's own parsers
_SPELLINGS = {
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
    "pp": "pp-size",
    "pipeline-parallel-size": "pp-size",
    "ep": "ep-size",
    "expert-parallel-size": "ep-size",
    "attention-data-parallel-size": "attn-dp-size",
    "attention-context-parallel-size": "attn-cp-size",
    "decode-context-parallel-size": "dcp-size",
    "model": "model-path",
    "speculative-algo": "speculative-algorithm",
    "speculative-draft-model": "speculative-draft-model-path",
    "mamba-scheduler-strategy": "mamba-radix-cache-strategy",
    "cuda-graph-max-bs": "cuda-graph-max-bs-decode",
    "cuda-graph-bs": "cuda-graph-bs-decode",
    "piecewise-cuda-graph-max-tokens": "cuda-graph-max-bs-prefill",
    "piecewise-cuda-graph-tokens": "cuda-graph-bs-prefill",
    "nsa-prefill-backend": "dsa-prefill-backend",
    "nsa-decode-backend": "dsa-decode-backend",
    "enable-hicache": "enable-hierarchical-cache",
    "enable-nsa-prefill-context-parallel": "enable-dsa-prefill-context-parallel",
    "moe-a2a": "moe-a2a-backend",
}

# Old name → (new name, first release with it, first release without the old name), of the argument
# parsers of 0.5.10.post1, 0.5.12.post1, 0.5.14, 0.5.17, 0.5.19, 0.5.21 and 0.5.23
_RENAMED = {
    "mamba-scheduler-strategy": ("mamba-radix-cache-strategy", "0.5.14", "0.5.21"),
    "cuda-graph-max-bs": ("cuda-graph-max-bs-decode", "0.5.14", "0.5.21"),
    "cuda-graph-bs": ("cuda-graph-bs-decode", "0.5.14", "0.5.21"),
    "piecewise-cuda-graph-max-tokens": ("cuda-graph-max-bs-prefill", "0.5.14", "0.5.21"),
    "piecewise-cuda-graph-tokens": ("cuda-graph-bs-prefill", "0.5.14", "0.5.21"),
    "nsa-prefill-backend": ("dsa-prefill-backend", "0.5.14", "0.5.21"),
    "nsa-decode-backend": ("dsa-decode-backend", "0.5.14", "0.5.21"),
}

_INTS = frozenset(
    {
        "tp-size", "dp-size", "pp-size", "ep-size", "attn-dp-size", "attn-cp-size", "dcp-size",
        "chunked-prefill-size", "max-prefill-tokens", "context-length", "page-size",
        "max-running-requests", "max-total-tokens", "max-mamba-cache-size",
        "cuda-graph-max-bs-decode", "cuda-graph-max-bs-prefill",
        "speculative-num-steps", "speculative-eagle-topk",
        "speculative-num-draft-tokens", "speculative-dspark-block-size",
        "speculative-dflash-block-size", "mamba-track-interval", "moe-dense-tp-size",
        "ep-num-redundant-experts", "nnodes", "max-loras-per-batch", "max-lora-rank",
        "cpu-offload-gb",
    }
)  # fmt: skip
_FLOATS = frozenset(
    {
        "mem-fraction-static",
        "mamba-full-memory-ratio",
        "swa-full-tokens-ratio",
        "hicache-ratio",
        "hicache-size",
    }
)
_INT = re.compile(r"[+-]?\d+")
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
# argparse takes these for values although they begin with a dash.
_NEGATIVE_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
# $TP, ${TP}, ${TP:-4}
_VARIABLE = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)(?::?-(?P<default>[^}]*))?\})"
)
_ARRAY = re.compile(r"\b([A-Za-z_]\w*)=\(([^()]*)\)")
_ARRAY_VALUE = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_PROGRAM = re.compile(r"sglang\.launch_server|launch_server\.py|\bsglang\s+serve\b")
# Characters that separate commands and redirect them; what follows the program's own is not its.
_OPERATOR_CHARACTERS = ";&|<>"
# The 2 of `2> log`, which a splitter cannot tell from a value
_STREAM = re.compile(r"(\s)[12](?=>)")
_OPERATOR = re.compile(rf"[{_OPERATOR_CHARACTERS}]+")
_COMMAND_WORDS = frozenset({"env", "export", "python", "python3", "-m", "sglang", "serve", "exec"})
_Arity = Literal["none", "one", "many", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFlags:
    """A launch line: flags by their newest name, in the order given, values as text."""

    model_path: str
    values: tuple[tuple[str, tuple[str, ...]], ...]
    env: tuple[tuple[str, str], ...] = ()
    set_aside: tuple[str, ...] = ()
    """Unknown flags with the words that follow them."""
    stray: tuple[str, ...] = ()
    """Words that belong to no flag; a pasted command may have some."""
    _last: dict[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)
    """Values by flag; the last one wins, as in SGLang's parser."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_last", dict(self.values))

    def has(self, name: str) -> bool:
        """Return True where the flag is on the line."""
        return name in self._last

    def has_any(self, names: frozenset[str]) -> bool:
        """Return True where one of the flags is on the line."""
        return not names.isdisjoint(self._last)

    def text(self, name: str, default: str = "") -> str:
        """Return the flag's value."""
        words = self._last.get(name)
        return words[-1] if words else default

    def words(self, name: str) -> tuple[str, ...]:
        """Return all values of a flag that takes several."""
        return self._last.get(name, ())

    def number(self, name: str) -> int | None:
        """Return a whole number, or None where the flag is absent."""
        words = self._last.get(name)
        return None if words is None else int(words[-1])

    def fraction(self, name: str) -> float | None:
        """Return a number with decimals, or None where the flag is absent."""
        words = self._last.get(name)
        return None if words is None else float(words[-1])

    def variable(self, name: str, default: str = "") -> str:
        """Return the value of an environment assignment before the command."""
        return next((value for key, value in self.env if key == name), default)

    def switched_on(self, name: str, *, default: bool = False) -> bool:
        """Return the value of an environment switch, read as SGLang reads it."""
        value = self.variable(name)
        return value.lower() in ("1", "true", "yes", "y") if value else default

    def changed(self, changes: Mapping[str, str | None]) -> "LaunchFlags":
        """Return this line with flags set ("" for a switch) or, where None, removed."""
        unchanged = tuple(item for item in self.values if item[0] not in changes)
        changed = tuple(
            (key, (value,) if value else ()) for key, value in changes.items() if value is not None
        )
        return replace(self, values=unchanged + changed, stray=())

    def argv(self) -> tuple[str, ...]:
        """Return arguments for `python -m sglang.launch_server`, without the environment."""
        line = ["--model-path", self.model_path] if self.model_path else []
        for key, words in self.values:
            line += [f"--{key}", *words]
        return tuple(line)


# --- names by release -------------------------------------------------------------------------


def renaming_of(flag: str) -> str | None:
    """Return which release renamed a flag, given its old or new name; None for other flags."""
    for old, (new, since, gone) in _RENAMED.items():
        if flag == old:
            return f"--{old} is called --{new} since SGLang {since}; {gone} no longer knows it"
        if flag == new:
            return f"--{new} is known since SGLang {since}; before it is called --{old}"
    return None


def spelled_for(words: Sequence[str], release: tuple[int, int, int]) -> tuple[str, ...]:
    """Return arguments under the names that a release knows."""
    older = {
        f"--{new}": f"--{old}"
        for old, (new, since, _) in _RENAMED.items()
        if release < tuple(map(int, since.split(".")))
    }
    return tuple(older.get(word, word) for word in words)


# --- parsing ----------------------------------------------------------------------------------


def parse_launch_line(tokens: Sequence[str]) -> LaunchFlags:
    """Parse a pasted line. Raises PlanError for a known flag with a value it cannot have."""
    env, words = _environment(_from_the_program(_words(tokens)))
    words = [part for word in words for part in _expanded(word, dict(env))]
    values: list[tuple[str, tuple[str, ...]]] = []
    set_aside: list[str] = []
    stray: list[str] = []
    model = ""
    at = 0
    while at < len(words):
        word, before = words[at], words[:at]
        at += 1
        if not word.startswith("--") or word == "--":
            positional = _positional_model(word, before)
            stray += [] if positional else [word]
            model = model or positional
            continue
        name, equals, inline = word[2:].partition("=")
        key, arity = _known(name)
        given = (inline,) if equals else _following(words[at:], arity)
        at += 0 if equals else len(given)
        if arity == "unknown":
            set_aside.append(" ".join([f"--{name}", *given]))
        elif key == "model-path":
            model = given[-1] if given else ""
        else:
            values.append((key, _checked(key, given, arity)))
    return LaunchFlags(
        model_path=model,
        values=tuple(values),
        env=env,
        set_aside=tuple(set_aside),
        stray=tuple(stray),
    )


def _words(tokens: Sequence[str]) -> list[str]:
    """Split tokens that are a whole line, without continuation backslashes and comments."""
    words: list[str] = []
    for token in tokens:
        if re.search(r"\s", token.strip()) and _is_line(token):
            words += _split(token)
        else:
            words.append(token.strip())
    return [word for word in words if word not in ("", "\\")]


def _split(text: str) -> Iterator[str]:
    """Yield the words and operators of shell text; a command that is quoted is split as well."""
    line = text.replace("\\\n", " ").replace("\\\r\n", " ")
    line = _STREAM.sub(r"\1", _ARRAY.sub(_as_variable, line))
    line = _ARRAY_VALUE.sub(r"${\1}", line)
    splitter = shlex.shlex(line, posix=True, punctuation_chars=_OPERATOR_CHARACTERS)
    splitter.whitespace_split = True
    try:
        words = list(splitter)
    except ValueError as error:
        raise PlanError(f"the launch line cannot be read: {error}") from None
    for word in words:
        is_command = re.search(r"\s", word) and _PROGRAM.search(word) and word != text
        yield from _split(word) if is_command else [word]


def _as_variable(array: re.Match[str]) -> str:
    """Return `NAME=(a b)` as `NAME='a b'`."""
    words = " ".join(line.partition(" #")[0] for line in array[2].splitlines())
    return f"{array[1]}={shlex.quote(' '.join(words.split()))}"


def _is_line(token: str) -> bool:
    """Return True for a command quoted as one argument, rather than a JSON or text value."""
    return "--" in token and not re.match(r"\s*(--[\w-]+=)?[{\[]", token)


def _from_the_program(words: list[str]) -> list[str]:
    """Drop what a script or `docker run` has before SGLang's program, but for the environment."""
    program_at = next((at for at, word in enumerate(words) if _is_program(words, at, word)), 0)
    assignments: list[str] = []
    before = words[:program_at]
    for at, word in enumerate(before):
        _, given, inline = word.partition("--env=")
        is_after_option = at > 0 and before[at - 1] in ("-e", "--env")
        found = inline if given else word
        if _ASSIGNMENT.fullmatch(found) and (given or is_after_option or not word.startswith("-")):
            assignments.append(found)
    # The interpreter belongs to the program.
    program_at -= 2 if before[-1:] == ["-m"] else 0
    command = list(_to_its_end(words[max(program_at, 0) :]))
    return [*assignments, *command] if program_at > 0 else command


def _to_its_end(words: Sequence[str]) -> Iterator[str]:
    """Yield a command's own words, without those behind a pipe or a redirection."""
    yield from itertools.takewhile(lambda word: not _OPERATOR.fullmatch(word), words)


def _is_program(words: list[str], at: int, word: str) -> bool:
    if word == "sglang.launch_server" or word.endswith("launch_server.py"):
        return True
    return Path(word).name == "sglang" and words[at + 1 : at + 2] == ["serve"]


def _expanded(word: str, values: Mapping[str, str]) -> list[str]:
    """Put in the values of variables; one that is all flags becomes as many words."""
    value = _with_values(word, values)
    is_list = _VARIABLE.fullmatch(word) and value.lstrip().startswith("--")
    return list(_split(value)) if is_list and value != word else [value]


def _with_values(word: str, values: Mapping[str, str]) -> str:
    """Put in the values of variables that the line itself sets; others stay as they are."""

    def value(match: re.Match[str]) -> str:
        name, default = match["plain"] or match["braced"], match["default"]
        return values.get(name, match[0] if default is None else default)

    return _VARIABLE.sub(value, word)


def _environment(words: list[str]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Split the assignments before the first flag from the other words."""
    env: list[tuple[str, str]] = []
    rest: list[str] = []
    for position, word in enumerate(words):
        if word.startswith("-") and word != "-m":
            rest += words[position:]
            break
        assignment = _ASSIGNMENT.fullmatch(word)
        if assignment:
            env.append((assignment[1], _with_values(assignment[2], dict(env))))
        else:
            rest.append(word)
    return tuple(env), rest


def _positional_model(word: str, before: Iterable[str]) -> str:
    """Return the MODEL of `sglang serve MODEL`, or "" for any other word."""
    is_command = word in _COMMAND_WORDS or word.endswith(("python", "python3"))
    if is_command or word.startswith(("sglang.", "-")):
        return ""
    return word if "serve" in before else ""


def _known(name: str) -> tuple[str, _Arity]:
    """Return a flag's newest name and how many values it takes."""
    table = _arities()
    if name in table:
        return _SPELLINGS.get(name, name), table[name]
    # argparse accepts a prefix that fits one flag alone.
    longer = {_SPELLINGS.get(flag, flag) for flag in table if flag.startswith(name)}
    if len(name) < 4 or len(longer) != 1:
        return name, "unknown"
    key = longer.pop()
    return key, table[key]


@cache
def known_by_release() -> dict[tuple[int, int, int], frozenset[str]]:
    """Return the flags that the parser of each release has, of those read one by one."""
    names = _names()
    known = {*names["no_value"], *names["one_value"], *names["many_values"]}
    return {
        (int(parts[0]), int(parts[1]), int(parts[2])): frozenset(known.difference(absent))
        for release, absent in names["absent"].items()
        if (parts := release.split("."))
    }


def spellings_of(name: str) -> tuple[str, ...]:
    """Return all names of a flag: the newest, which is given, and those that it had."""
    return (name, *(older for older, newest in _SPELLINGS.items() if newest == name))


@cache
def _names() -> dict[str, Any]:
    names: dict[str, Any] = json.loads(_DATA.read_text())
    return names


@cache
def _arities() -> dict[str, _Arity]:
    names = _names()
    table: dict[str, _Arity] = dict.fromkeys(names["no_value"], "none")
    table.update(dict.fromkeys(names["one_value"], "one"))
    table.update(dict.fromkeys(names["many_values"], "many"))
    for short, full in _SPELLINGS.items():
        table.setdefault(short, table.get(full, "one"))
        table.setdefault(full, table[short])
    return table


def _following(words: Sequence[str], arity: _Arity) -> tuple[str, ...]:
    """Return the values at the start of `words` that a flag of this arity takes."""
    most = {"none": 0, "one": 1}.get(arity, len(words))
    return tuple(itertools.takewhile(_is_value, words[:most]))


def _is_value(word: str) -> bool:
    return not word.startswith("-") or _NEGATIVE_NUMBER.fullmatch(word) is not None


def _checked(key: str, words: tuple[str, ...], arity: _Arity) -> tuple[str, ...]:
    """Return the values of a flag. Raises PlanError, worded like argparse, for wrong ones."""
    # Some releases gave switches a deprecated form whose arity their parsers hide.
    is_switch = key.startswith(("enable-", "disable-"))
    if arity == "none" or (is_switch and not words):
        return ()
    if not words or (arity == "one" and words[-1] == ""):
        expected = "one argument" if arity == "one" else "at least one argument"
        raise PlanError(f"argument --{key}: expected {expected}")
    for kind, keys, pattern in (("int", _INTS, _INT), ("float", _FLOATS, _FLOAT)):
        wrong = [word for word in words if key in keys and not pattern.fullmatch(word)]
        if wrong:
            raise PlanError(f"argument --{key}: invalid {kind} value: {wrong[0]!r}")
    return words


# --- CUDA graphs ------------------------------------------------------------------------------
# The JSON of --cuda-graph-config precedes the flags of a phase, and these the switches for both.
# SGLang 0.5.23, arg_groups/cuda_graph_hook.py: parse_cuda_graph_config

Phase = Literal["decode", "prefill"]
_DISABLED = "disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseGraphs:
    """Graphs of a phase; what is empty or None is left to SGLang."""

    backend: str
    max_size: int | None
    """Largest batch of decoding, or most tokens of a prefill."""
    sizes: tuple[int, ...]

    @property
    def is_off(self) -> bool:
        return self.backend == _DISABLED


# A search asks this of thousands of lines, and few say anything.
_UNSAID = PhaseGraphs(backend="", max_size=None, sizes=())
_GRAPH_FLAGS = frozenset(
    {
        "cuda-graph-config", "disable-cuda-graph", "disable-decode-cuda-graph",
        "disable-prefill-cuda-graph", "cuda-graph-backend-decode", "cuda-graph-backend-prefill",
        "cuda-graph-bs-decode", "cuda-graph-bs-prefill", "cuda-graph-max-bs-decode",
        "cuda-graph-max-bs-prefill",
    }
)  # fmt: skip


def graphs_of(flags: LaunchFlags, phase: Phase) -> PhaseGraphs:
    """Return what the line says. Raises PlanError for JSON that cannot be read."""
    if not flags.has_any(_GRAPH_FLAGS):
        return _UNSAID
    given = _config(flags.text("cuda-graph-config")).get(phase)
    given = given if isinstance(given, Mapping) else {}
    backend = flags.text(f"cuda-graph-backend-{phase}")
    if not backend and any(
        flags.has(name) for name in ("disable-cuda-graph", f"disable-{phase}-cuda-graph")
    ):
        backend = _DISABLED
    listed = given.get("bs") or flags.words(f"cuda-graph-bs-{phase}")
    sizes = [int(size) for text in listed for size in re.findall(r"\d+", str(text))]
    max_size = given.get("max_bs", flags.number(f"cuda-graph-max-bs-{phase}"))
    return PhaseGraphs(
        backend=str(given.get("backend", backend)),
        max_size=max_size if isinstance(max_size, int) else None,
        sizes=tuple(sizes),
    )


@lru_cache(maxsize=64)
def _config(text: str) -> Mapping[str, object]:
    if not text:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise PlanError(
            f"argument --cuda-graph-config: expected a JSON object, found {text[:80]!r}"
        )
    return config
