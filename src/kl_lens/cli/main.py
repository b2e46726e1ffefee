"""`kl-lens VERB …`: finds the verb, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

# Worker threads that spin while they wait take the cores from whoever else needs them, and then wait for each other:
# on a busy machine two spinning threads are slower than one. Must be said before torch loads its OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from kl_lens.errors import KLLensError
from kl_lens.version import __version__

# In the order of the pipeline. A new verb is one new file and one word here. Each file has HELP,
# add_arguments(parser) and execute(arguments) -> exit code.
VERBS = (
    "run",
    "inspect",
    "measure",
    "rank",
    "plan",
    "export",
    "evaluate",
    "benchmark",
    "generate",
    "report",
    "import-legacy",
)


def build_parser(verbs: Sequence[str] = VERBS) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kl-lens",
        description="Measure, plan, export and prove mixed-precision quantization of state-space and hybrid "
        "language models.",
    )
    parser.add_argument("--version", action="version", version=f"kl-lens {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and library messages")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in verbs:
        module = importlib.import_module(f"kl_lens.cli.{verb.replace('-', '_')}")
        subparser = subparsers.add_parser(
            verb,
            help=module.HELP,
            description=module.HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(execute=module.execute)
    return parser


def _quiet_libraries() -> None:
    """transformers' progress bars and advice are about its own speed; ours comes from elsewhere."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers.utils import logging as library

    library.set_verbosity_error()
    library.disable_progress_bar()
    logging.getLogger("nncf").setLevel(logging.ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        if not arguments.debug:
            _quiet_libraries()
        return int(arguments.execute(arguments) or 0)
    except KLLensError as error:
        if arguments.debug:
            raise
        print(f"kl-lens {arguments.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"\nkl-lens {arguments.verb}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `kl-lens … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
