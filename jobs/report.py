"""Write or serve the report of a run as an HTML page, from its output folder alone.

usage: python -m jobs.report FOLDER [--html FILE] [--json] | FOLDER --serve [--port N]
"""

import argparse
import json
import sys
import time
from pathlib import Path

from jobs.terminal import RUN_FOLDER, about_a_run, tell
from pipeline.console.commands import help_examples, program
from pipeline.console.console import open_console
from pipeline.errors import ConfigError
from pipeline.report.page import report_page
from pipeline.report.report import report_json, run_report
from pipeline.report.serve import LivePage, PageServer
from pipeline.store.folder import Folder
from pipeline.store.run_folder import REPORT_FILE

_INTERRUPTED = 130
_MAX_PORT = 65_535


def main(argv: list[str] | None = None) -> int:
    """Exit with 0, 2 if a file cannot be read or written, 130 if --serve is interrupted."""
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    if arguments.serve and (arguments.html or arguments.json):
        parser.error("--serve cannot be combined with --html or --json")
    if arguments.port is not None and not arguments.serve:
        parser.error("--port is used with --serve alone")
    show = _serve if arguments.serve else _show
    return about_a_run(arguments.folder, lambda folder: show(folder, arguments))


def argument_parser() -> argparse.ArgumentParser:
    """Return the command's own parser."""
    parser = argparse.ArgumentParser(
        prog=program("jobs.report"),
        description="Write or serve the report of a run, from its output folder alone.",
        epilog=help_examples(
            "jobs.report",
            "out/run",
            "out/run --html report.html",
            "out/run --serve --port 8080",
            "s3://bucket/run --json",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help=RUN_FOLDER)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="the page; default: FOLDER/report.html"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the page on loopback, fresh on each load, until Ctrl-C",
    )
    parser.add_argument(
        "--port", type=_port, metavar="N", help="with --serve: its port; default: a free one"
    )
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= _MAX_PORT:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a port from 1 to {_MAX_PORT}")
    return int(text)


def _serve(folder: Folder, arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C. A folder without a run is refused at the start."""
    page = LivePage(folder, time.time)
    try:
        page.render()
        with (
            open_console("report") as console,
            PageServer(page.render, port=arguments.port or 0, log=console.log) as server,
        ):
            tell(server.url)
            server.serve_forever()
    except KeyboardInterrupt:
        pass
    return _INTERRUPTED


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
    tell(str(target))
    return 0


if __name__ == "__main__":
    sys.exit(main())
