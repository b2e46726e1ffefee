"""`kl-lens import-legacy`: measurements that others published, as a run that plans can be made from."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kl_lens.cli import options
from kl_lens.errors import RunError
from kl_lens.paper import read_legacy
from kl_lens.runs import Run
from kl_lens.sensitivity.sweep import model_identity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bits",
        nargs=2,
        action="append",
        required=True,
        metavar=("BITS", "FILE"),
        help="a file and its bit width; once per width",
    )
    options.add_model_options(parser)
    options.add_run(parser)


def execute(arguments: argparse.Namespace) -> int:
    model = options.load_model(arguments)
    measurements = []
    for bits, path in arguments.bits:
        if not bits.isdigit():
            raise RunError(f"--bits {bits}: expected a number, then a file")
        measurements += read_legacy(Path(path), int(bits), model.anatomy)
    with Run.create(options.run_folder(arguments, model.name)) as run:
        if run.roles():
            raise RunError(f"{run.folder} holds measurements of its own; import into another --run")
        run.identify(model_identity(model))
        run.store("imported", "measurements", [m.to_json() for m in measurements])
        run.note_command(sys.argv)
        print(f"imported {len(measurements)} published measurements of {model.name} into {run.folder}")
    return 0
