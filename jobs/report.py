"""Write the report of a run as an HTML page, from its output folder alone.

usage: python -m jobs.report FOLDER [--html FILE] [--json]
"""

import argparse
import json
import sys
import time
from pathlib import Path

from jobs.terminal import RUN_FOLDER, about_a_run, tell
from pipeline.errors import ConfigError
from pipeline.report.page import report_page
from pipeline.report.report import report_json, run_report
from pipeline.store.folder import Folder
from pipeline.store.run_folder import REPORT_FILE


def main(argv: list[str] | None = None) -> int:
    """Exit with 0, or with 2 if the folder has no run or a file cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.report",
        description="Write the report of a run, from its output folder alone.",
    )
    parser.add_argument("folder", help=RUN_FOLDER)
    parser.add_argument("--html", type=Path, metavar="FILE", help="default: FOLDER/report.html")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    arguments = parser.parse_args(argv)
    return about_a_run(arguments.folder, lambda folder: _show(folder, arguments))


def _show(folder: Folder, arguments: argparse.Namespace) -> int:
    report = run_report(folder, now_s=time.time())
    if arguments.json:
        tell(json.dumps(report_json(report), indent=1))
        return 0
    page = report_page(report)
    target = arguments.html or folder.place(REPORT_FILE)
    try:
        if arguments.html is None:
            folder.write_whole(REPORT_FILE, page.encode())
        else:
            arguments.html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: cannot write {target}: {error.strerror}") from None
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
