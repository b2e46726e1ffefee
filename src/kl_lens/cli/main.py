"""`kl-lens VERB …`: words become the verb's settings, its function is called, its result is shown."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import itertools
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from kl_lens.base.environment import (
    quiet_libraries,
    require_thread_counts,
    set_defaults,
)

set_defaults()

from kl_lens.base.errors import (  # noqa: E402
    KLLensError,
    one_line,
    printable,
    system_error,
    system_reason,
)
from kl_lens.base.system import is_broken_pipe  # noqa: E402
from kl_lens.cli.flags import add_arguments, settings_from  # noqa: E402
from kl_lens.cli.terminal import Terminal, console, literal, print_json, wrapped  # noqa: E402
from kl_lens.study.events import Several, exit_code  # noqa: E402
from kl_lens.study.settings import as_yaml  # noqa: E402
from kl_lens.study.study import Study, settings_of, use_llama_cpp  # noqa: E402

UNEXPECTED = 70  # exit code; EX_SOFTWARE of sysexits.h

# In the order of the pipeline. The settings are in `kl_lens.study`; with the help here, `kl-lens --help` loads no
# library.
VERBS = {
    "run": "make smaller files of a model: measure, plan, export, test and report",
    "inspect": "show a model's blocks, components and sizes",
    "calibrate": "gather statistics of every component's inputs, for GPTQ and importance matrices",
    "measure": "quantize one component at a time and measure the KL of the output",
    "table": "show what each component loses in each recipe",
    "merge": "join the measurements of several processes",
    "plan": "choose a format for every component, for a size or a loss",
    "export": "write a plan as OpenVINO IR or GGUF, with exactly the weights that were measured",
    "evaluate": "measure perplexity, KL from the original and task accuracy of plans and files",
    "compare": "show files of one model side by side, whoever made them",
    "benchmark": "measure speed and memory of exported files",
    "autopsy": "say what is wrong with a GGUF, OpenVINO or MLX file, whoever made it",
    "generate": "generate text with an exported file",
    "report": "write a run as one HTML page",
    "publish": "share a file with its proof: a model card, its chart, its recipe, on the Hugging Face hub",
    "paper": "rank the paper's metrics by how well they predict the loss on other text",
    "doctor": "check what is installed, and say how to fix what is missing",
}

# Where show_VERB(result) is and, where --json prints something else than the result's own fields, json_VERB(result).
SCREENS = {
    "kl_lens.cli.run": ("run",),
    "kl_lens.cli.making": (
        "inspect",
        "calibrate",
        "measure",
        "table",
        "merge",
        "plan",
        "export",
    ),
    "kl_lens.cli.judging": ("evaluate", "compare", "benchmark", "autopsy", "paper"),
    "kl_lens.cli.terminal": ("generate", "report", "publish", "doctor"),
}
LIGHT = {"generate", "publish", "doctor", "table", "merge"}  # load no torch
# The flags that `kl-lens VERB --help` shows; `--help-all` shows all. Verbs that are not here have few.
USUAL = {
    "run": "--target --max-bytes --budget --max-loss --max-drop --memory --context --run --text --windows --device "
    "--tune --table --without --estimate",
    "calibrate": "--run --text --windows --window-length --again --device",
    "measure": "--run --target --formats --text --windows --components --states --device --workers --shard",
    "paper": "--run --evaluation-text --evaluation-windows --other-text --model --device",
    "plan": "--run --target --max-bytes --max-bpw --max-loss --max-drop --rivals --verify --frontier --uniform --name",
    "export": "--run --plan --format --out --weights --static-tokens --device",
    "evaluate": "--run --plan --target --perplexity --divergence --windows --window-length --tasks --task-drop "
    "--threads",
    "autopsy": "--model --run --text --windows --window-length --threads",
    "benchmark": "--run --plan --target --threads --gpu-layers --load --prompt-lengths --repeats --quick",
}


class _Parser(argparse.ArgumentParser):
    """Takes flags only as they are spelled: an abbreviation would change its meaning with the next flag."""

    def __init__(self, **named: Any) -> None:
        super().__init__(allow_abbrev=False, **named)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Of the program, or of a verb; first it says which flag does not exist, before argparse asks for what is
        missing."""
        ends = ("--", *(VERBS if self._subparsers else ()))
        for word in itertools.takewhile(lambda word: word not in ends, args):
            flag = word.partition("=")[0]
            flags = list(self._option_string_actions)
            if not flag.startswith("--") or " " in word or flag in flags:
                continue
            close = [name for name in flags if name.startswith(flag)][:4]
            if flag in ("--debug", "--llama-cpp"):
                instead = f" behind a command; put it in front: kl-lens {flag} …"
            elif close := close or difflib.get_close_matches(flag, flags, 1):
                instead = f"; did you mean {' or '.join(close)}?"
            else:
                instead = f"; see {self.prog} --help{'-all' * ('--help-all' in flags)}"
            self.error(f"there is no {flag}{instead}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _versions() -> str:
    """Of KL Lens and of the packages that it uses."""
    from kl_lens.run.folder import provenance

    facts = provenance()
    lines = "".join(f"{name} {number}\n" for name, number in facts["versions"].items())
    return f"{lines}{facts['system']} {facts['machine']}\n"


def build_parser(
    verbs: Collection[str] = tuple(VERBS), *, everything: bool = True
) -> _Parser:
    """The whole command line; only the arguments of `verbs` are filled in, for each loads its libraries.

    `everything`: the help names every flag, not only the usual ones.
    """
    parser = _Parser(
        prog="kl-lens",
        description="Makes language models smaller: finds out which weights can drop to 4 or 8 bits, writes GGUF, "
        "OpenVINO, MLX and vLLM files, and measures what they lose. Start with: kl-lens run MODEL --target gguf",
        epilog="Documentation: https://kl-lens.github.io/kl-lens",
    )
    parser.add_argument(
        "--version",
        action="store_true",
        help="show the versions of KL Lens and the runtimes",
    )
    parser.add_argument(
        "--debug", action="store_true", help="show tracebacks and library messages"
    )
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="PATH",
        help="the llama.cpp to use: a libllama file, or a folder with one (default: $LLAMA_CPP_LIB, or what is "
        "installed)",
    )
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB")
    for verb, help_text in VERBS.items():
        description = help_text[0].upper() + help_text[1:] + "."
        subparser = subparsers.add_parser(verb, help=help_text, description=description)
        if verb in verbs:
            _add_arguments(subparser, verb, everything)
    return parser


def _add_arguments(parser: argparse.ArgumentParser, verb: str, everything: bool) -> None:
    parser.add_argument("--help-all", action="help", help="show every flag")
    usual = USUAL[verb].split() if verb in USUAL and not everything else None
    left_out = add_arguments(parser, settings_of(verb), usual)
    if left_out:
        parser.epilog = f"kl-lens {verb} --help-all shows {left_out} more flags."
    if verb != "run":
        help_text = "print JSON instead of a table"
        parser.add_argument("--json", action="store_true", help=help_text)
        return
    texts = {
        "--config": "settings as YAML, named like the flags; flags win",
        "--write-config": "print the settings as YAML and stop",
    }
    shown = {flag: argparse.SUPPRESS if left_out else texts[flag] for flag in texts}
    parser.add_argument("--config", metavar="FILE", help=shown["--config"])
    flag = "--write-config"
    parser.add_argument(flag, action="store_true", help=shown[flag])


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of one command, loading only what its verb needs."""
    parser = build_parser(_verb(words), everything="--help-all" in words)
    arguments = parser.parse_args(words)
    if not (arguments.verb or arguments.version):
        if words:
            parser.error("the following arguments are required: VERB")
        parser.print_help()
        parser.exit()
    return arguments


def _verb(words: Sequence[str]) -> list[str]:
    return [word for word in words if word in VERBS][:1]


def execute(arguments: argparse.Namespace) -> int:
    if arguments.version:
        sys.stdout.write(_versions())
        return 0
    if arguments.llama_cpp:
        use_llama_cpp(arguments.llama_cpp)
    settings = settings_from(arguments)
    if getattr(arguments, "write_config", False):
        settings.check()
        sys.stdout.write(as_yaml(settings))
        return 0
    wants_json = getattr(arguments, "json", False)
    terminal = Terminal(settings.verb, writes=not wants_json)
    if settings.verb == "run":
        from kl_lens.cli.run import Screen

        terminal = Screen(settings.verb, show)
    result = Study(events=terminal).do(settings)
    show(terminal, result, wants_json)
    return exit_code(result)


def show(terminal: Terminal, result: object, wants_json: bool = False) -> None:
    """Prints a verb's result, and what failed."""
    home = importlib.import_module(
        next(name for name, verbs in SCREENS.items() if terminal.verb in verbs)
    )
    results = result.results if isinstance(result, Several) else {"": result}
    if wants_json:
        as_json = getattr(home, f"json_{terminal.verb}", lambda part: part)
        data = {target: as_json(part) for target, part in results.items()}
        print_json(data.get("", data))
    for part in results.values():
        for shown in () if wants_json else getattr(home, f"show_{terminal.verb}")(part):
            if isinstance(shown, str):
                console().print(literal(shown, wraps=True), soft_wrap=True)
            else:
                console().print(shown)
        for subject, reason in getattr(part, "failures", {}).items():
            whole = reason if reason.startswith(subject) else f"{subject}: {reason}"
            terminal.tell(whole)


def _say_loading(words: Sequence[str]) -> None:
    """The first line, because importing takes seconds."""
    loads = set(_verb(words)) - LIGHT and "torch" not in sys.modules
    if loads and not {"-h", "--help", "--help-all"} & set(words):
        print(
            f"kl-lens {_verb(words)[0]}: loading PyTorch …", file=sys.stderr, flush=True
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code. An error is one line on standard error; a traceback comes with --debug only."""
    words = sys.argv[1:] if argv is None else argv
    program = " ".join(["kl-lens", *_verb(words)])
    try:
        _open_streams()
        require_thread_counts()
        if "--debug" not in words:
            quiet_libraries()
        _say_loading(words)
        code = execute(parse(words))
        sys.stdout.flush()  # here, where a full disk can still be reported
        return code
    except (SystemExit, GeneratorExit) as end:  # argparse has said what is wrong
        if is_broken_pipe(end.__context__):  # met by rich
            return 141
        raise
    except KeyboardInterrupt as stop:
        message = str(stop) or "stopped; run the same command to continue"
        print(f"\n{program}: {printable(message)}", file=sys.stderr)
        return 130
    except BaseException as error:  # a panic in a Rust library is not an Exception
        if is_broken_pipe(error):  # `kl-lens … | head`
            _drop_output()
            return 141
        if isinstance(error, OSError) and error.filename is None:
            _drop_output()  # it may be what is full, and would be tried again at the end
        code, line = explained(error, words)
        if "--debug" in words and code != UNEXPECTED:
            raise
        if "--debug" in words:
            traceback.print_exception(error)
        print(wrapped(f"{program}: {printable(line)}", sys.stderr), file=sys.stderr)
        return code


def explained(error: BaseException, words: Sequence[str]) -> tuple[int, str]:
    """The exit code of `kl-lens WORDS`, and the one line about it."""
    if isinstance(error, KLLensError):
        return error.exit_code, " ".join(str(error).split("\n"))
    failure = system_error(error)
    if failure is not None and (line := system_reason(failure)):
        return KLLensError.exit_code, line
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which may not be loaded
        return KLLensError.exit_code, (
            f"GPU memory is full ({one_line(error).partition('. GPU')[0]}); what was measured is kept. Run the same "
            "command with --weights disk, or measure with a smaller --working-memory"
        )
    kind = type(error).__name__
    reason = one_line(error)
    line = f"unexpected error: {kind}" + ("" if reason == kind else f": {reason}")
    with suppress(Exception):
        report = Path(tempfile.mkdtemp(prefix="kl-lens-")) / "unexpected.txt"
        report.write_text(
            _report(error, words), encoding="utf-8", errors="backslashreplace"
        )
        return UNEXPECTED, f"{line}; please report it with {report}"
    return (
        UNEXPECTED,
        f"{line}; please report it (the traceback could not be written: --debug shows it)",
    )


def _report(error: BaseException, words: Sequence[str]) -> str:
    trace = "".join(traceback.format_exception(error))
    return f"$ kl-lens {shlex.join(words)}\n\n{trace}\n{_versions()}"


def _open_streams() -> None:
    """Raises if standard output is closed. A closed stream becomes /dev/null first: the next file that is opened would
    get its number, and libraries would write into that."""
    closed = sys.stdout is None
    for number, (name, mode) in enumerate(
        (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
    ):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # Windows' cp1252 has no Δ
            stream.reconfigure(errors="replace")
    if closed:
        raise KLLensError(
            "standard output is closed; use >/dev/null to discard the result"
        )


def _drop_output() -> None:
    with suppress(OSError, ValueError):  # a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
