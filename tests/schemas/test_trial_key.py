"""The key `engine.trial`: a word or a section, and for which engines it counts."""

import pytest

from schemas.config.run_file import RunFile


def engine_with(**engine: object) -> RunFile:
    values = {"kind": "sglang", "command": ["c"], **engine}
    return RunFile.model_validate(
        {"prompts": {"path": "p"}, "model": "m", "output": {"folder": "o"}, "engine": values}
    )


@pytest.mark.parametrize(
    ("engine", "plans", "reading_s"),
    [
        ({}, 1, None),
        ({"trial": "off"}, 1, None),
        ({"trial": False}, 1, None),
        ({"trial": None}, 1, None),
        ({"trial": "auto"}, 4, 1200.0),
        ({"trial": {"plans": 6}}, 6, 1200.0),
        ({"trial": {"minutes": 5}}, 4, 300.0),
        # Flags that are used as they are leave nothing to try; other kinds have no flags.
        ({"trial": "auto", "plan": "off"}, 1, None),
        ({"trial": "auto", "kind": "embedded", "command": []}, 1, None),
    ],
)
def test_trial_is_a_word_or_a_section(
    engine: dict[str, object], plans: int, reading_s: float | None
) -> None:
    config = engine_with(**engine)
    assert (config.engine.trial_plans, config.engine.longest_reading_s) == (plans, reading_s)
    again = RunFile.model_validate(config.model_dump())
    assert again.engine == config.engine


@pytest.mark.parametrize("value", [5, "sometimes", {"plans": 1}, {"planz": 4}, {"minutes": 0}])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="trial"):
        engine_with(trial=value)
