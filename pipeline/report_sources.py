"""The files of a run's folder that a report reads beside the manifest and the parts.

Each may be missing, or written by another release: then the report says less.
"""

import json

from pydantic import ValidationError

from pipeline.live_log import READINGS_FILE
from pipeline.status import LIVE_FILE
from pipeline.storage import Folder
from schemas.config import RunFile
from schemas.estimate import Band, LiveReading

RUN_FILE_COPY = "run-file.json"
_SECONDS_A_DAY = 86_400


def write_run_file(folder: Folder, config: RunFile) -> None:
    """The run file as the session has it, for reports; it holds no secret."""
    folder.write_whole(RUN_FILE_COPY, config.model_dump_json(indent=1).encode())


def read_run_file_copy(folder: Folder) -> RunFile | None:
    if not folder.exists(RUN_FILE_COPY):
        return None
    try:
        return RunFile.model_validate_json(folder.read(RUN_FILE_COPY))
    except ValidationError:
        # Of a release with other keys.
        return None


def read_readings(folder: Folder) -> tuple[list[LiveReading], float]:
    """The engines' readings, and when their clock began; none where there is no such file."""
    found: list[LiveReading] = []
    began_at_s = 0.0
    for line in folder.read_lines(READINGS_FILE):
        try:
            values = json.loads(line)
            kind = values.pop("record")
            if kind == "run":
                began_at_s = float(values["began_at_s"])
            elif kind == "reading":
                found.append(LiveReading(**values))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found, began_at_s


def read_cards(folder: Folder) -> dict[str, str]:
    """The card of each worker that has told it."""
    for line in folder.read_lines(READINGS_FILE):
        try:
            values = json.loads(line)
            if values["record"] == "run":
                return {str(worker): str(card) for worker, card in values["cards"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return {}


def read_time_left(folder: Folder) -> Band | None:
    """The coordinator's own word in seconds, where it has one."""
    if not folder.exists(LIVE_FILE):
        return None
    try:
        days = json.loads(folder.read(LIVE_FILE))["days_left"]
        ends = (float(days[name]) * _SECONDS_A_DAY for name in ("p10", "p50", "p90"))
        p10, p50, p90 = ends
    except (ValueError, KeyError, TypeError):
        return None
    return Band(p10=p10, p50=p50, p90=p90)
