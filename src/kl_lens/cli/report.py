"""`kl-lens report --run DIR`: a run as one HTML file; `--compare RUN …` puts several on one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from kl_lens.cli import options
from kl_lens.reporting import write_comparison, write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="DIR", help="the run folder (default: runs/reference-mamba)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write (default: RUN/report.html, or RUN/comparison.html of the first run compared)",
    )
    parser.add_argument(
        "--compare", nargs="+", type=Path, metavar="RUN", help="other runs to put beside it, on one page"
    )
    options.add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    if arguments.compare:
        runs = [*([Path(arguments.run)] if arguments.run else []), *arguments.compare]
        path = write_comparison(runs, arguments.out)
    else:
        with options.open_run(arguments) as run:
            path = write_report(run, arguments.out)
    if arguments.json:
        options.print_json({"path": str(path), "bytes": path.stat().st_size})
    else:
        print(path)
    return 0
