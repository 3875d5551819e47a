"""Flags of a planned launch as a run file's `engine.flags`."""

from collections.abc import Iterator

from pipeline.planner.sglang.flags import LaunchFlags, spelled_for
from pipeline.planner.sglang.releases import Release

# Keys of the run file stand for these.
_OWN_KEYS = ("max-running-requests", "model-path")
_CONTEXT = "context-length"


def engine_flags(
    flags: LaunchFlags, release: Release, *, keeps_context: bool = False
) -> Iterator[str]:
    """Yield the words of a launch, as a release spells them, but for those that a run sets itself.

    A run takes the context from its longest prompt, unless the user gave it.
    """
    for name, words in flags.values:
        is_default = name == "tp-size" and words == ("1",)
        is_set = name in _OWN_KEYS or (name == _CONTEXT and not keeps_context)
        if is_set or is_default:
            continue
        (flag,) = spelled_for([f"--{name}"], release)
        if len(words) == 1:
            yield f"{flag}={words[0]}"
        else:
            yield from (flag, *words)
    for unknown in flags.set_aside:
        yield from unknown.split(" ")
