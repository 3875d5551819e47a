"""The report of a run as one HTML page, from its output folder alone.

usage: python -m jobs.report FOLDER [--html FILE] [--json]
"""

import argparse
import json
import sys
import time
from pathlib import Path

from jobs.telling import tell, unreadable
from pipeline.errors import ConfigError
from pipeline.observer import REPORT_FILE
from pipeline.report import report_json, run_report
from pipeline.report_page import report_page
from pipeline.store_folder import open_folder


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 when the folder holds no run, or a file cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.report", description="The report of a run, from its files alone."
    )
    parser.add_argument("folder", help="the run's output.folder: a path, or s3://bucket/path")
    parser.add_argument("--html", type=Path, metavar="FILE", help="default: FOLDER/report.html")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, no page")
    arguments = parser.parse_args(argv)
    try:
        folder = open_folder(arguments.folder)
        report = run_report(folder, now_s=time.time())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(unreadable(arguments.folder, error), file=sys.stderr)
        return 2
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
        print(f"--html: cannot write {target}: {error.strerror}", file=sys.stderr)
        return 2
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
