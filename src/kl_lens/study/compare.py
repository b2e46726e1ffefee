"""`compare`: files of one model side by side, whoever made them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kl_lens.base.errors import KLLensError
from kl_lens.base.files import write_text
from kl_lens.judging.choosing import verdicts
from kl_lens.judging.duel import Entrant
from kl_lens.reporting.charts import sized_chart
from kl_lens.study import settings as of
from kl_lens.study.evaluate import DEFAULT_TEXT, EvaluateSettings, evaluate
from kl_lens.study.session import Session
from kl_lens.study.settings import Settings, option, with_options

WINDOW = 512


@with_options
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
        if self.chart is not None and self.chart.suffix != ".svg":
            raise KLLensError(f"--chart {self.chart}: expected a name that ends in .svg")


@dataclass(frozen=True)
class CompareResult:
    duel: list[Entrant]  # by size
    failures: dict[str, str]
    chart: Path | None

    @property
    def comparisons(self) -> list[str]:
        """A sentence for each file that another one beats."""
        return [*verdicts(self.duel)]


def compare(settings: CompareSettings, session: Session) -> CompareResult:
    result = evaluate(
        EvaluateSettings(
            model=settings.model,
            artifact=settings.files,
            perplexity=settings.text,
            divergence="",
            window_length=settings.window_length,
            windows=settings.windows,
        ),
        session,
    )
    chart = settings.chart if result.duel else None
    if chart is not None:
        drawn = sized_chart(result.duel)._repr_svg_()
        write_text(chart, f"{of.CHART_MARK}\n{drawn}")
    return CompareResult(result.duel, result.failures, chart)
