"""The JSON Schema of the run file, with which editors complete and check it."""

import json

from schemas.config.run_file import RunFile

SCHEMA_FILE = "regenerate.schema.json"
"""Name of the schema, next to the run file that refers to it."""


def schema_text() -> str:
    """Return the schema as text, with the keys' docstrings as their descriptions."""
    return json.dumps(RunFile.model_json_schema(), indent=1, ensure_ascii=False) + "\n"
