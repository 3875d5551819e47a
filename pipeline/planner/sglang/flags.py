"""SGLang's launch line, as people paste it, ↔ `LaunchFlags`.

Flags are kept under their newest spelling. A flag that no read release knows is set aside and
named, never dropped in silence. `argv` gives back a line that parses to the same flags.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeline.errors import PlanError

_DATA = Path(__file__).with_name("data") / "sglang_flags.json"

# Older and shorter spellings → the newest. Names are those of SGLang's own parsers.
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
    "nsa-prefill-backend": "dsa-prefill-backend",
    "nsa-decode-backend": "dsa-decode-backend",
    "enable-hicache": "enable-hierarchical-cache",
    "enable-nsa-prefill-context-parallel": "enable-dsa-prefill-context-parallel",
    "moe-a2a": "moe-a2a-backend",
    "prefix-affinity-fallback": "prefix-affinity-fallback",
}
_EXTRA_ONE_VALUE = frozenset({"moe-a2a", "prefix-affinity-fallback"})

# old name → (new name, first release read that has it, first release read without the old).
# From the argument parsers of 0.5.10.post1, 0.5.12.post1, 0.5.14, 0.5.17, 0.5.19, 0.5.21, 0.5.23.
_RENAMED = {
    "mamba-scheduler-strategy": ("mamba-radix-cache-strategy", "0.5.14", "0.5.21"),
    "cuda-graph-max-bs": ("cuda-graph-max-bs-decode", "0.5.14", "0.5.21"),
    "cuda-graph-bs": ("cuda-graph-bs-decode", "0.5.14", "0.5.21"),
    "nsa-prefill-backend": ("dsa-prefill-backend", "0.5.14", "0.5.21"),
    "nsa-decode-backend": ("dsa-decode-backend", "0.5.14", "0.5.21"),
}

_INTS = frozenset(
    {
        "tp-size", "dp-size", "pp-size", "ep-size", "attn-dp-size", "attn-cp-size", "dcp-size",
        "chunked-prefill-size", "max-prefill-tokens", "context-length", "page-size",
        "max-running-requests", "max-total-tokens", "max-mamba-cache-size",
        "cuda-graph-max-bs-decode", "speculative-num-steps", "speculative-eagle-topk",
        "speculative-num-draft-tokens", "speculative-dspark-block-size",
        "speculative-dflash-block-size", "mamba-track-interval", "moe-dense-tp-size",
        "ep-num-redundant-experts", "nnodes",
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
_COMMAND_WORDS = frozenset({"env", "export", "python", "python3", "-m", "sglang", "serve", "exec"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFlags:
    """A launch line: flags by their newest name, in the order given, values as text."""

    model_path: str
    values: tuple[tuple[str, tuple[str, ...]], ...]
    env: tuple[tuple[str, str], ...] = ()
    set_aside: tuple[str, ...] = ()
    stray: tuple[str, ...] = ()
    """Words of the line that belong to no flag; a pasted command has some."""

    def has(self, name: str) -> bool:
        """Whether the flag is on the line."""
        return any(key == name for key, _ in self.values)

    def text(self, name: str, default: str = "") -> str:
        """The flag's last value; SGLang's parser lets the last one win."""
        return next(
            (words[-1] for key, words in reversed(self.values) if key == name and words), default
        )  # one lookup

    def words(self, name: str) -> tuple[str, ...]:
        """All values of a flag that takes several."""
        return next((words for key, words in reversed(self.values) if key == name), ())

    def number(self, name: str) -> int | None:
        """A whole number, or None where the flag is absent."""
        return int(self.text(name)) if self.has(name) else None

    def fraction(self, name: str) -> float | None:
        """A number with decimals, or None where the flag is absent."""
        return float(self.text(name)) if self.has(name) else None

    def variable(self, name: str, default: str = "") -> str:
        """An environment assignment in front of the command."""
        return next((value for key, value in self.env if key == name), default)

    def switched_on(self, name: str, *, default: bool = False) -> bool:
        """An environment switch, read as SGLang reads it."""
        value = self.variable(name)
        return value.lower() in ("1", "true", "yes", "y") if value else default

    def changed(self, changes: Mapping[str, str | None]) -> "LaunchFlags":
        """The same line with flags set ('' for a switch) or, where None, taken away."""
        kept = [(key, words) for key, words in self.values if key not in changes]
        added: list[tuple[str, tuple[str, ...]]] = [
            (key, (value,) if value else ()) for key, value in changes.items() if value is not None
        ]
        return LaunchFlags(
            model_path=self.model_path,
            values=tuple(kept + added),
            env=self.env,
            set_aside=self.set_aside,
        )

    def argv(self) -> tuple[str, ...]:
        """Arguments for `python -m sglang.launch_server`, without the environment."""
        line = ["--model-path", self.model_path] if self.model_path else []
        for key, words in self.values:
            line += [f"--{key}", *words]
        return tuple(line)


def renaming_of(flag: str) -> str | None:
    """Which release renamed a flag, told from either side of the renaming; None for others."""
    for old, (new, since, gone) in _RENAMED.items():
        if flag == old:
            return f"--{old} is called --{new} since SGLang {since}; {gone} no longer knows it"
        if flag == new:
            return f"--{new} is known since SGLang {since}; before it is called --{old}"
    return None


def spelled_for(words: Sequence[str], release: tuple[int, int, int]) -> tuple[str, ...]:
    """Arguments in the spelling of a release that is older than the newest names."""
    older = {
        f"--{new}": f"--{old}"
        for old, (new, since, _) in _RENAMED.items()
        if release < tuple(map(int, since.split(".")))
    }
    return tuple(older.get(word, word) for word in words)


def parse_launch_line(tokens: Sequence[str]) -> LaunchFlags:
    """Flags from a pasted line; refuses a known flag with a value it cannot hold."""
    words = _words(tokens)
    env, words = _environment(words)
    values: list[tuple[str, tuple[str, ...]]] = []
    aside: list[str] = []
    stray: list[str] = []
    model = ""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--") or word == "--":
            positional = _positional_model(word, words[: index - 1])
            stray += [] if positional else [word]
            model = model or positional
            continue
        name, _, inline = word[2:].partition("=")
        key, arity = _known(name)
        following = [inline] if "=" in word else _following(words, index, arity)
        index += 0 if "=" in word else len(following)
        if arity == "unknown":
            aside.append(" ".join([f"--{name}", *following]))
        elif key == "model-path":
            model = following[-1] if following else ""
        else:
            values.append((key, _checked(key, tuple(following), arity)))
    return LaunchFlags(
        model_path=model,
        values=tuple(values),
        env=env,
        set_aside=tuple(aside),
        stray=tuple(stray),
    )


def _words(tokens: Sequence[str]) -> list[str]:
    """One token a word, without continuation backslashes or comments."""
    words: list[str] = []
    for token in tokens:
        if re.search(r"\s", token.strip()) and _is_line(token):
            line = token.replace("\\\n", " ").replace("\\\r\n", " ")
            try:
                words += shlex.split(line, comments=True)
            except ValueError as error:
                raise PlanError(f"the launch line cannot be read: {error}") from None
        else:
            words.append(token.strip())
    return [word for word in words if word not in ("", "\\", "&&", ";")]


def _is_line(token: str) -> bool:
    """A whole command quoted as one argument, rather than a JSON or text value."""
    return "--" in token and not re.match(r"\s*(--[\w-]+=)?[{\[]", token)


def _environment(words: list[str]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    env: list[tuple[str, str]] = []
    rest: list[str] = []
    for position, word in enumerate(words):
        if word.startswith("-") and word != "-m":
            rest += words[position:]
            break
        assignment = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", word, re.DOTALL)
        if assignment:
            env.append((assignment[1], assignment[2]))
        else:
            rest.append(word)
    return tuple(env), rest


def _positional_model(word: str, before: Iterable[str]) -> str:
    """`sglang serve MODEL`: the one word that is neither a command nor a flag."""
    if (
        word in _COMMAND_WORDS
        or word.startswith(("sglang.", "-"))
        or word.endswith(("python", "python3"))
    ):
        return ""
    return word if "serve" in before else ""


def _following(words: list[str], index: int, arity: str) -> list[str]:
    if arity == "none":
        return []
    found: list[str] = []
    for word in words[index:]:
        if word.startswith("--") or (word.startswith("-") and not _is_number(word)):
            break
        found.append(word)
        if arity in ("one", "optional"):
            break
    return found


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", word) is not None


def _checked(key: str, words: tuple[str, ...], arity: str) -> tuple[str, ...]:
    if arity == "none" or (arity == "optional" and not words):
        return ()
    if not words and key.startswith(("enable-", "disable-")):
        # some releases gave switches a deprecated form whose arity their parsers hide
        return ()
    if not words or (arity == "one" and words[-1] == ""):
        wanted = "one argument" if arity == "one" else "at least one argument"
        raise PlanError(f"argument --{key}: expected {wanted}")
    kind = "int" if key in _INTS else "float" if key in _FLOATS else "text"
    for word in words:
        if kind == "int" and re.fullmatch(r"[+-]?\d+", word) is None:
            raise PlanError(f"argument --{key}: invalid int value: {word!r}")
        if kind == "float" and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", word) is None:
            raise PlanError(f"argument --{key}: invalid float value: {word!r}")
    return words


def _known(name: str) -> tuple[str, str]:
    """The newest name of a flag and how many values it takes."""
    table = _arities()
    if name not in table:
        # argparse takes any prefix that fits one flag alone
        longer = {_SPELLINGS.get(flag, flag) for flag in table if flag.startswith(name)}
        if len(name) < 4 or len(longer) != 1:
            return name, "unknown"
        key = longer.pop()
        return key, table.get(key, "one")
    key = _SPELLINGS.get(name, name)
    return key, table[name]


@cache
def _arities() -> dict[str, str]:
    data = json.loads(_DATA.read_text())
    table = dict.fromkeys(data["no_value"], "none")
    table.update(dict.fromkeys(data["one_value"], "one"))
    table.update(dict.fromkeys(data["many_values"], "many"))
    table.update(dict.fromkeys(data["optional_value"], "optional"))
    table.update(dict.fromkeys(_EXTRA_ONE_VALUE, "one"))
    for short, full in _SPELLINGS.items():
        table.setdefault(short, table.get(full, "one"))
        table.setdefault(full, table[short])
    return table
