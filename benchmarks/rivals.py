"""Our files against the quantization recipes that everybody knows, file against file.

    python benchmarks/rivals.py [--models reference:mamba,stressed:reference:mamba,FOLDER,…] [--targets gguf,openvino]
                                [--write docs/results/rivals.csv]
    python benchmarks/rivals.py --below-four --targets gguf [--write docs/results/below_four.csv]
    python benchmarks/rivals.py --narrow --targets gguf --models FOLDER [--write docs/results/narrow.csv]

For each model and target, the target's menu is measured on WikiText-2 train, with the target's own arithmetic. For
every stock recipe of the runtime (llama.cpp's quantization types, NNCF's modes) we make our exact plan that is no
larger *on disk*. Both are written by the same exporter and judged by the runtime on the same WikiText-2 test windows:
KL from the original, token perplexity, and the difference of the two KLs paired by window. AWQ with scale estimation is
run by NNCF itself, on the FP16 graph and on the text that our methods learnt from. `--below-four`: llama.cpp's mixtures
of 2 and 3 bits with an importance matrix, and the rule of its pull request 15550 (bits_rule.py) in their place, against
plans with IQ2 and IQ3. `--narrow`: a model with rows that 256 does not divide; our plans of 3 to 4 bits per weight
beside Q4_K_M and IQ4_NL with an importance matrix, which are larger there. `kl-lens evaluate` compares files that
another tool made.
A folder of models stands for all models in it. With `--write`, models that the file already has from this commit are
not judged again.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bits_rule import BitsRule
from common import ALL, machine, models, opened, shown
from kl_lens.base.errors import PlanError
from kl_lens.judging import prepare
from kl_lens.judging.choosing import paired_difference
from kl_lens.judging.scoring import score_text
from kl_lens.judging.texts import EvaluationText
from kl_lens.judging.torch_session import TorchSession
from kl_lens.model import LanguageTask, LoadedModel
from kl_lens.run.folder import Run
from kl_lens.run.readings import NLL, Reading, window_kl
from kl_lens.run.records import Plan
from kl_lens.study.calibrate import CalibrateSettings
from kl_lens.study.measure import MeasureSettings
from kl_lens.study.plan import Choosing, plan_within
from kl_lens.study.planner import TargetPlanner
from kl_lens.study.session import Session
from kl_lens.study.settings import Limits
from kl_lens.targets import SessionSettings, Target, get_target, menu_of
from nncf_methods import put_file
from result_files import Row, options, provenance, read, write

BITS = (2.25, 2.5, 3.0, 3.5, 4.0)  # per weight, for the rule of pull request 15550
NARROW = (3.0, 3.5, 4.0)  # bits per weight of our plans, where K-quants do not fit
SMALL = (
    4.5  # bits per weight; where few matrices fit, mixtures of 2 and 3 bits are larger
)


class Remembered:
    """The original; its logits of a window are computed once."""

    def __init__(self, session: TorchSession) -> None:
        self._session = session
        self._by_window = {}

    def logits(self, ids: Any) -> Any:
        key = tuple(ids)
        if key not in self._by_window:
            self._by_window[key] = self._session.logits(ids)
        return self._by_window[key]


@dataclass(frozen=True)
class Judged:
    """What the runtime says about one file."""

    bytes: int
    kl: np.ndarray  # of each window
    perplexity: float

    @property
    def mean(self) -> float:
        return float(self.kl.mean())

    @property
    def error(self) -> float:
        return float(self.kl.std(ddof=1) / len(self.kl) ** 0.5)


def judge(
    target: Target, folder: Path, size: int, text: EvaluationText, teacher: Remembered
) -> Judged:
    session = target.open(folder, SessionSettings())
    try:
        scores: list[Reading] = score_text(session, text, teacher)  # type: ignore[arg-type]
    finally:
        session.close()
    kl = window_kl(scores)
    entropy = sum(score.sums[NLL] for score in scores) / sum(
        score.targets for score in scores
    )
    return Judged(size, kl, float(np.exp(entropy)))


def compare(
    name: str, target: Target, arguments: argparse.Namespace, folder: Path
) -> list[Row]:
    model = opened(name)
    session = Session(given=model)
    small = arguments.below_four or arguments.narrow or target.name == "mlx"
    measured = MeasureSettings.of(
        model=name,
        run=str(folder),
        target=(target.name,),
        # Below four bits, and for MLX, the short menu; one of MLX's own mixtures has two bits.
        formats=menu_of(target, model.anatomy.shapes, full=not small, small=small),
        windows=arguments.windows,
    )
    if reason := target.unsupported(model.anatomy.model_type):
        print(f"{name}, {target.name}: {reason}", flush=True)
        return []
    statistics = session.do(CalibrateSettings.of(model=name, run=str(folder))).statistics
    session.do(measured)
    model = session.in_run(model, folder)
    tokenizer = model.require_tokenizer()
    text = prepare(
        "wikitext2:test",
        LanguageTask(tokenizer),
        window=512,
        limit=arguments.test_windows,
    )
    teacher = Remembered(TorchSession(model))
    rows = []
    with Run.open(folder) as run:
        table = run.table(target=target.name)
        planner = TargetPlanner(session, run, target.name)
        judgements: dict[str, Judged] = {}

        weights = sum(c.parameters for c in model.anatomy.candidates)
        overhead = target.file_bytes(model, Plan("fp16", {}, "fp16")) - 2 * weights

        def bits_of(size: int) -> float:
            """Of each weight that may be quantized: without header, norms and the like."""
            return 8 * (size - overhead) / weights

        def judged(plan: Plan) -> Judged:
            key = json.dumps(sorted(plan.assignment.items()))
            if key not in judgements:
                with tempfile.TemporaryDirectory() as temporary:
                    artifact = target.export(model, plan, Path(temporary))
                    judgements[key] = judge(
                        target, Path(temporary), artifact.realised_bytes, text, teacher
                    )
            return judgements[key]

        plans = [
            replace(rival, name=rival.name.removeprefix("stock."))
            for rival in planner.rivals(table, None, everything=True)
            if is_wanted(rival.name.removeprefix("stock."), arguments)
        ]
        if arguments.narrow:
            even = dict.fromkeys(
                (c.name for c in model.anatomy.candidates), "iq4_nl+imatrix"
            )
            plans.append(Plan("iq4_nl.imatrix", even, "uniform"))
        if arguments.below_four:
            rule = BitsRule(model, statistics)
            plans += [rule.plan(bits) for bits in BITS]
            plans = [
                plan for plan in plans if bits_of(target.file_bytes(model, plan)) < SMALL
            ]
        different = {
            json.dumps(sorted(plan.assignment.items())): plan for plan in reversed(plans)
        }
        rivals: dict[str, Callable[[], Judged]] = {
            plan.name: lambda plan=plan: judged(plan)
            for plan in reversed(different.values())
        }
        if target.name == "openvino":
            ids = session.drawn_again(statistics.identity["text"], model.task).ids
            rivals |= with_data(model, target, ids, text, teacher)
        sizes = [int(overhead + weights * bits / 8) for bits in NARROW]
        cases = [
            (rival, make_file, size)
            for rival, make_file in rivals.items()
            for size in (sizes if arguments.narrow else [None])
        ]
        for rival, make_file, size in cases:
            rival_file = make_file()
            try:
                limits = Limits(max_bytes=size or rival_file.bytes)
                within = TargetPlanner(session, run, target.name, limits=limits)
                our_file = judged(plan_within(within, table, Choosing(name="ours")))
            except PlanError as error:
                print(
                    f"{name}, {target.name}, {rival}: none of our plans is as small: {error}",
                    flush=True,
                )
                continue
            difference = paired_difference(our_file.kl, rival_file.kl)
            apart = (
                difference.value / difference.standard_error
                if difference.standard_error
                else 0.0
            )
            row = {
                "target": target.name,
                "model": shown(name),
                "rival": rival,
                **(
                    {"rival_bits": f"{bits_of(rival_file.bytes):.2f}"}
                    if arguments.below_four or arguments.narrow
                    else {}
                ),
                "rival_mb": f"{rival_file.bytes / 1e6:.3f}",
                "rival_kl": f"{rival_file.mean:.5f}",
                "rival_kl_se": f"{rival_file.error:.0e}",
                "rival_perplexity": f"{rival_file.perplexity:.3f}",
                **(
                    {"our_bits": f"{bits_of(our_file.bytes):.2f}"}
                    if arguments.narrow
                    else {}
                ),
                "our_mb": f"{our_file.bytes / 1e6:.3f}",
                "our_kl": f"{our_file.mean:.5f}",
                "our_kl_se": f"{our_file.error:.0e}",
                "our_perplexity": f"{our_file.perplexity:.3f}",
                "ratio": f"{our_file.mean / rival_file.mean:.2f}",
                "verdict": "lower" if apart < -2 else "higher" if apart > 2 else "level",
                "windows": str(arguments.windows),
                "test_windows": str(arguments.test_windows),
            }
            rows.append(row)
            print(", ".join(row.values()), flush=True)
    return rows


def is_wanted(rival: str, arguments: argparse.Namespace) -> bool:
    """Recipes of 2 and 3 bits, or the others; those of 2 and 3 bits only with an importance matrix."""
    if arguments.narrow:
        return rival == "q4_k_m.imatrix"
    below = re.match("i?q[23]", rival) is not None
    return below and rival.endswith(".imatrix") if arguments.below_four else not below


def with_data(
    model: LoadedModel,
    target: Target,
    ids: torch.Tensor,
    text: EvaluationText,
    teacher: Remembered,
) -> dict[str, Callable[[], Judged]]:
    """NNCF's recipes that learn from text, run by NNCF itself."""

    def make(grid: str, ratio: float) -> Judged:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "file"
            target.export(model, Plan("fp16", {}, "fp16"), folder)
            size = put_file(model, folder, grid, "nncf awq+scale", ids, ratio)
            return judge(target, folder, size, text, teacher)

    return {
        f"{mode}-g{group}{'' if ratio == 1 else f'-{ratio:.0%}'[:-1]}.awq": lambda g=f"{grid}-g{group}", r=ratio: (
            make(g, r)
        )
        for mode, grid in (("int4_sym", "int4"), ("int4_asym", "uint4"))
        for group in (128, 64)
        for ratio in (1.0, 0.8)
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", default=ALL, help="names, or folders of models")
    parser.add_argument("--targets", default="gguf,openvino")
    parser.add_argument(
        "--windows", type=int, default=8, help="of 512 calibration tokens"
    )
    parser.add_argument("--test-windows", type=int, default=8)
    parser.add_argument(
        "--below-four", action="store_true", help="GGUF at 2 to 4 bits per weight"
    )
    parser.add_argument(
        "--narrow", action="store_true", help="GGUF where 256 does not divide the rows"
    )
    arguments = parser.parse_args()
    print(machine())
    former = read(arguments.write)
    commit = provenance()["commit"]
    rows = [
        row for row in former if row["commit"] == commit and not commit.endswith("-dirty")
    ]
    judged = {(row["model"], row["target"]) for row in rows}
    for name in models(arguments.models):
        for target in arguments.targets.split(","):
            if (shown(name), target) in judged:
                continue
            with tempfile.TemporaryDirectory() as folder:
                new = compare(name, get_target(target), arguments, Path(folder) / "run")
            key = (
                "target",
                "model",
                "rival",
                *(["our_bits"] if arguments.narrow else []),
            )
            write(arguments.write, new, key)
            rows += new
    if rows:
        ratios = [float(row["ratio"]) for row in rows]
        higher = sum(row["verdict"] == "higher" for row in rows)
        print(
            f"{len(rows)} rows; our KL over the rival's: median {statistics.median(ratios):.2f}, "
            f"{min(ratios):.2f} to {max(ratios):.2f}; higher beyond the error in {higher}."
        )


if __name__ == "__main__":
    main()
