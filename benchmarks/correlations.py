"""Which metric predicts damage: `kl-lens measure` and `kl-lens paper` on several models.

    python benchmarks/correlations.py [--models reference:mamba,stressed:reference:mamba,FOLDER,…]
                                      [--texts novels.txt] [--write docs/results/correlations.csv]

INT4 and INT8 per channel, weights rounded to nearest, calibrated on WikiText-2 train and on every other text given;
damage on WikiText-2 test. Kendall's τ with a 95 % interval, with and without the head.
"""

from __future__ import annotations

import tempfile

from common import ALL, machine, models, opened, shown
from kl_lens.judging.ranking import Correlation, Ranking
from kl_lens.study.study import Study
from result_files import Row, options, write

DAMAGE = {"perplexity": "cross-entropy", "divergence": "divergence"}


def row(name: str, correlation: Correlation, ranking: Ranking, test_windows: int) -> Row:
    # "in domain, 6 of 64 windows", or the name of another text instead of "in domain"
    text, _, windows = correlation.calibration.rpartition(", ")
    (sure,) = (
        r
        for r in ranking.reliabilities
        if (r.format, r.with_head) == (correlation.format, correlation.with_head)
    )
    has_spread = (
        correlation.damage == "perplexity"
    )  # reliability is that of the change in cross-entropy
    return {
        "model": shown(name),
        "bits": correlation.format.removeprefix("int"),
        "damage": DAMAGE[correlation.damage],
        "metric": correlation.metric,
        "calibration": "wikitext2:train" if text == "in domain" else text,
        "windows": windows.split()[0],
        "components": "with the head" if correlation.with_head else "without the head",
        "tau": f"{correlation.tau:.3f}",
        "low": f"{correlation.low:.2f}",
        "high": f"{correlation.high:.2f}",
        "spearman": "",
        "pearson": "",
        "damage_split_half": f"{sure.split_half_tau:.2f}" if has_spread else "",
        "damage_spread": f"{sure.spread:.1e}" if has_spread else "",
        "damage_error": f"{sure.median_error:.1e}" if has_spread else "",
        "test": f"wikitext2:test, {test_windows} windows",
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", default=ALL, help="names, or folders of models")
    parser.add_argument(
        "--windows", type=int, default=64, help="of 512 calibration tokens"
    )
    parser.add_argument("--test-windows", type=int, default=400)
    parser.add_argument(
        "--texts", nargs="*", default=[], help="calibrate on these texts too"
    )
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(machine())
    for name in models(arguments.models):
        with tempfile.TemporaryDirectory() as folder:
            study = Study(opened(name, arguments.device), folder=folder)
            study.measure(windows=arguments.windows, formats=("int4", "int8"))
            ranking = study.rank(
                evaluation_windows=arguments.test_windows,
                other_text=tuple(arguments.texts),
            )
        rows = [
            row(name, correlation, ranking, arguments.test_windows)
            for correlation in ranking.correlations
        ]
        for line in rows:
            print(", ".join(line.values()), flush=True)
        key = (
            "model",
            "bits",
            "damage",
            "metric",
            "calibration",
            "windows",
            "components",
        )
        write(arguments.write, rows, key)


if __name__ == "__main__":
    main()
