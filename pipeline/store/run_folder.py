"""Names of the files and sub-folders in a run's output folder."""

# Published parts, and nothing else: readers glob this folder.
DATA = "data"
# Whole parts on their way to `data/`.
STAGING = "staging"
# Files that recovery found in `data/` or `staging/` and that are not parts of this run.
QUARANTINE = "quarantine"
# The frozen prompts, a sub-folder per input.
PROMPTS = "prompts"
# The engines' logs.
LOGS = "logs"
# Rows that a planned stop interrupted, with what was generated of them, a file per worker.
PARTIALS = "partials"
# What engines reported of their memory, one JSON per launch.
CALIBRATIONS = "calibrations"

RUN_FILE = "run.json"
MANIFEST_FILE = "manifest.jsonl"
# The run file of the last session, for reports.
RUN_FILE_COPY = "run-file.json"
LOCK_FILE = "driver.json"
LIVE_FILE = "live.json"
READINGS_FILE = "live-readings.jsonl"
EVENTS_FILE = "events.jsonl"
DEATHS_FILE = "engine-deaths.jsonl"
# Rates of the launch plans that engines have tried, by card.
TRIALS_FILE = "trials.json"
REPORT_FILE = "report.html"

FOLDERS = frozenset({DATA, STAGING, QUARANTINE, PROMPTS, LOGS, PARTIALS, CALIBRATIONS})
FILES = frozenset(
    {
        RUN_FILE,
        MANIFEST_FILE,
        RUN_FILE_COPY,
        LOCK_FILE,
        LIVE_FILE,
        READINGS_FILE,
        EVENTS_FILE,
        DEATHS_FILE,
        TRIALS_FILE,
        REPORT_FILE,
    }
)
