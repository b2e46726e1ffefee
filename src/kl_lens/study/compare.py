"""`compare`: files of one model side by side, whoever made them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kl_lens.base.errors import KLLensError
from kl_lens.judging.duel import Entrant
from kl_lens.study import settings as of
from kl_lens.study.evaluate import DEFAULT_TEXT, EvaluateSettings, evaluate
from kl_lens.study.session import Session
from kl_lens.study.settings import Settings, option

WINDOW = 512


@dataclass(frozen=True, kw_only=True)
class CompareSettings(Settings):
    files: tuple[Path, ...] = option(
        help="two files or folders or more: GGUF, OpenVINO, mlx-lm, compressed-tensors",
        positional=True,
        nargs="+",
        metavar="FILE",
    )
    model: of.Model = option(help="the original that they were made from")
    text: of.Text = option(DEFAULT_TEXT, "text that they are judged on")
    windows: of.Count = option(8, "number of windows")
    window_length: of.Tokens = option(WINDOW, "tokens per window")
    chart: of.Chart | None = option(
        None, "a picture: KL against size", metavar="FILE.svg"
    )

    def check(self) -> None:
        super().check()
        if len(self.files) < 2:
            raise KLLensError("compare needs two files or more; one: kl-lens evaluate")


@dataclass(frozen=True)
class CompareResult:
    duel: list[Entrant]  # by size
    comparisons: list[str]
    failures: dict[str, str]
    written: list[Path]


def compare(settings: CompareSettings, session: Session) -> CompareResult:
    result = evaluate(
        EvaluateSettings(
            model=settings.model,
            artifact=settings.files,
            perplexity=settings.text,
            divergence="",
            window=settings.window_length,
            limit=settings.windows,
            chart=settings.chart,
        ),
        session,
    )
    return CompareResult(result.duel, result.comparisons, result.failures, result.written)
