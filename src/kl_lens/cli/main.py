"""`kl-lens VERB …`: finds the verb, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kl_lens.environment import set_defaults

set_defaults()

from kl_lens.errors import KLLensError  # noqa: E402
from kl_lens.version import __version__  # noqa: E402

# In the order of the pipeline. A new verb is one new file and one line here; the file has add_arguments(parser) and
# execute(arguments) -> exit code. The help stands here so that `kl-lens --help` need not load every library.
VERBS = {
    "run": "everything in order, on the embedded model or on yours, with a report at the end",
    "inspect": "look inside a model: blocks, components, bytes, what is left alone and why",
    "measure": "quantize one component at a time and measure what the output distribution loses",
    "rank": "measure real damage on held-out text and say which metric predicts it",
    "plan": "choose a format for every component: the paper's points, exact budgets, measured refinement",
    "export": "write a plan as OpenVINO IR or GGUF, with the very integers that were measured",
    "evaluate": "prove it: perplexity, divergence from the original and tasks, of plans and of exported files",
    "benchmark": "time exported models as they are used, and by the published protocol",
    "generate": "generate text with an exported model",
    "report": "write the run as one HTML file, or several runs side by side",
    "import-legacy": "read published sensitivity files into a run",
}


def build_parser(
    verbs: Collection[str] = tuple(VERBS),
    defaults: Callable[[argparse.ArgumentParser], dict[str, Any]] = lambda parser: {},
) -> argparse.ArgumentParser:
    """The whole command line; only the arguments of `verbs` are filled in, for each loads its libraries.

    `defaults` gives settings of a verb that take the place of its own defaults.
    """
    parser = argparse.ArgumentParser(
        prog="kl-lens",
        description="Measure, plan, export and prove mixed-precision quantization of state-space and hybrid "
        "language models.",
    )
    parser.add_argument("--version", action="version", version=f"kl-lens {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and library messages")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, help_text in VERBS.items():
        subparser = subparsers.add_parser(
            verb,
            help=help_text,
            description=help_text[0].upper() + help_text[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if verb in verbs:
            module = importlib.import_module(f"kl_lens.cli.{verb.replace('-', '_')}")
            module.add_arguments(subparser)
            subparser.set_defaults(execute=module.execute, **defaults(subparser))
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of one command, loading only what its verb needs."""
    verb = [word for word in words if word in VERBS][:1]
    parser = build_parser(verb)
    arguments = parser.parse_args(words)
    if getattr(arguments, "config", None):
        from kl_lens.cli.config import read_defaults

        parser = build_parser(verb, lambda of_verb: read_defaults(of_verb, arguments.config))
        arguments = parser.parse_args(words)
    return arguments


def _quiet_libraries() -> None:
    """transformers' progress bars and advice are about its own speed; ours comes from elsewhere."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # For when it loads later, if at all: `generate` runs on small devices and does without it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:
        from transformers.utils import logging as library

        library.set_verbosity_error()
        library.disable_progress_bar()
    logging.getLogger("nncf").setLevel(logging.ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    program = "kl-lens"
    try:
        arguments = parse(words)
        program = f"kl-lens {arguments.verb}"
        if not arguments.debug:
            _quiet_libraries()
        return int(arguments.execute(arguments) or 0)
    except KLLensError as error:
        if "--debug" in words:
            raise
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"\n{program}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `kl-lens … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
