"""The files that submit a run, rendered from one submission."""

from functools import cache
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.errors import PlanError
from pipeline.recipes.deploy.submission import Submission
from pipeline.recipes.schema import SCHEMA_FILE, schema_text

# The release that the recipes are tested with; constraints.txt pins it.
RAY_VERSION = "2.60.0"
RUN_FILE = "run.yaml"
_SCRIPTS = (".sh", ".sbatch")
RENDERED = ("rayjob.yaml", "slurm.sbatch", "skypilot.yaml", "ray.sh")


def submission_files(submission: Submission) -> dict[str, str]:
    """Return the files by name: all that is needed, in one folder."""
    return {
        RUN_FILE: submission.run_file,
        SCHEMA_FILE: schema_text(),
        **{name: rendered(name, submission) for name in RENDERED},
    }


def rendered(name: str, submission: Submission) -> str:
    """Render one file."""
    template = _environment().get_template(f"{name}.j2")
    return template.render(job=submission, ray_version=RAY_VERSION, version=version("regenerate"))


def write_submission(
    submission: Submission, folder: Path, node_script: Path, *, replaces: bool
) -> None:
    """Write the files, and the script that starts Ray on a node.

    Raises PlanError for a file that cannot be written, or that was edited and is not replaced.
    """
    files = {**submission_files(submission), node_script.name: node_script.read_text()}
    edited = [name for name, text in files.items() if _differs(folder / name, text)]
    if edited and not replaces:
        raise PlanError(
            f"--write: {folder / edited[0]} exists with other text; choose another folder, or "
            "replace the files: --force"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            if name.endswith(_SCRIPTS):
                (folder / name).chmod(0o755)
    except OSError as error:
        raise PlanError(f"--write: cannot write {error.filename}: {error.strerror}") from error


def _differs(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace") != text


@cache
def _environment() -> Environment:
    return Environment(  # noqa: S701 - no HTML
        loader=PackageLoader("pipeline.recipes.deploy", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
