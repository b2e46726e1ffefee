"""Fills the tables of docs/results.md and README.md from the data files in docs/results.

python scripts/results.py            # writes the tables between <!-- NAME --> and <!-- /NAME -->
python scripts/results.py --check    # writes nothing; exit code 1 if a table differs from its file
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs/results.md", ROOT / "docs/why.md", ROOT / "README.md")
Row = dict[str, str]
Cells = list[list[str]]  # the heading first
GROUPS = {
    "reference models": lambda model: model.startswith("reference:"),
    "stressed": lambda model: model.startswith("stressed:"),
    "-wiki": lambda model: model.endswith("-wiki"),
}
ARM = "two Neoverse-N1 cores (aarch64)"
X86 = "two virtual cores of a Sapphire Rapids (x86-64)"
RUNTIMES = {"gguf": "llama.cpp", "openvino": "OpenVINO"}


@cache
def read(name: str) -> list[Row]:
    with (ROOT / "docs/results" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def chosen(name: str, **values: str) -> list[Row]:
    return [
        row
        for row in read(name)
        if all(row[key] == value for key, value in values.items())
    ]


def spread(values: Iterable[float]) -> str:
    """Median and range."""
    ordered = sorted(values)
    if not ordered:
        return "–"
    if len(ordered) == 1:
        return f"{ordered[0]:.2f}"
    return f"{median(ordered):.2f} ({ordered[0]:.2f}–{ordered[-1]:.2f})"


def rivals() -> Cells:
    """Three recipes that everybody knows, for the README."""
    table = [
        [
            "recipe (`reference:mamba`, 5.4 million parameters)",
            "its file",
            "its KL",
            "our KL, no larger",
        ]
    ]
    for target, rival, name in (
        ("gguf", "q4_k_m.imatrix", "llama.cpp Q4_K_M with an importance matrix"),
        ("gguf", "q5_k_m.imatrix", "llama.cpp Q5_K_M with an importance matrix"),
        ("openvino", "int4_sym-g128", "NNCF INT4_SYM, groups of 128, for OpenVINO"),
    ):
        (row,) = chosen("rivals.csv", target=target, model="reference:mamba", rival=rival)
        our_kl, rival_kl = (f"{float(row[key]):.4f}" for key in ("our_kl", "rival_kl"))
        table.append(
            [name, f"{float(row['rival_mb']):.2f} MB", rival_kl, f"**{our_kl}**"]
        )
    return table


def rivals_by_model() -> Cells:
    judged = {row["target"] for row in read("rivals.csv")}
    titles = RUNTIMES | {"mlx": "MLX", "compressed-tensors": "transformers"}
    runtimes = {name: title for name, title in titles.items() if name in judged}
    table = [["model", *runtimes.values(), "ours is lower in"]]
    for model in dict.fromkeys(row["model"] for row in read("rivals.csv")):
        rows = chosen("rivals.csv", model=model)
        cells = [
            spread(float(r["ratio"]) for r in rows if r["target"] == target)
            for target in runtimes
        ]
        lower = sum(row["verdict"] == "lower" for row in rows)
        table.append([model, *cells, f"{lower} of {len(rows)}"])
    return table


def rivals_by_type() -> Cells:
    table = [["llama.cpp's type", "plain", "with imatrix"]]
    types = dict.fromkeys(
        row["rival"].partition(".")[0] for row in chosen("rivals.csv", target="gguf")
    )
    for name in types:
        cells = [
            spread(
                float(row["ratio"])
                for row in chosen("rivals.csv", target="gguf", rival=rival)
            )
            for rival in (name, f"{name}.imatrix")
        ]
        table.append([name.upper(), *cells])
    return table


def below_four() -> Cells:
    kinds: dict[str, Callable[[str], bool]] = {
        "llama.cpp's mixtures": lambda rival: rival.endswith(".imatrix"),
        "pull request 15550": lambda rival: rival.startswith("pr15550"),
    }
    table = [["model", "bits per weight", *kinds, "ours is lower in"]]
    for model in dict.fromkeys(row["model"] for row in read("below_four.csv")):
        rows = chosen("below_four.csv", model=model)
        bits = sorted(float(row["rival_bits"]) for row in rows)
        cells = [
            spread(float(r["ratio"]) for r in rows if belongs(r["rival"]))
            for belongs in kinds.values()
        ]
        lower = sum(row["verdict"] == "lower" for row in rows)
        table.append(
            [model, f"{bits[0]:.1f}–{bits[-1]:.1f}", *cells, f"{lower} of {len(rows)}"]
        )
    return table


def methods() -> Cells:
    table = [["files", "KL of", "over that of", *GROUPS]]
    k_quants = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
    kinds: dict[str, Callable[[Row], bool]] = {
        "OpenVINO, 4 bits": lambda r: (
            r["part"] == "methods"
            and r["target"] == "openvino"
            and r["grid"] != "uint2-g64"
        ),
        "OpenVINO, uint2-g64": lambda r: r["grid"] == "uint2-g64",
        "OpenVINO, int4-g64, embedding and head INT8": lambda r: r["part"] == "nncf",
        "llama.cpp, K-quants": lambda r: r["part"] == "methods" and r["grid"] in k_quants,
        "llama.cpp, Q4_0, IQ4_NL, IQ4_XS": lambda r: (
            r["part"] == "methods" and r["grid"] in ("q4_0", "iq4_nl", "iq4_xs")
        ),
        "llama.cpp, IQ2 and IQ3": lambda r: (
            r["part"] == "methods" and r["grid"].startswith(("iq2", "iq3"))
        ),
    }
    for kind, belongs in kinds.items():
        rows = [row for row in read("quantizers.csv") if row["ratio"] and belongs(row)]
        for method, beside in dict.fromkeys(
            (row["method"], row["ratio_to"]) for row in rows
        ):
            alike = [
                row
                for row in rows
                if (row["method"], row["ratio_to"]) == (method, beside)
            ]
            cells = [
                spread(float(r["ratio"]) for r in alike if has(r["model"]))
                for has in GROUPS.values()
            ]
            table.append([kind, method, beside, *cells])
    tuning = chosen("tune.csv", rate="0.003")
    for grid in dict.fromkeys(row["grid"] for row in tuning):
        alike = [row for row in tuning if row["grid"] == grid]
        cells = [
            spread(float(r["ratio"]) for r in alike if has(r["model"]))
            for has in GROUPS.values()
        ]
        table.append([f"weights alone, {grid}", "tuned", "gptq", *cells])
    return table


def plans() -> Cells:
    table = [["plan", "its KL over that of the exact plan", "exact is lower or equal in"]]
    exact = {
        (row["model"], row["point"]): float(row["kl"])
        for row in chosen("plans.csv", method="exact")
    }
    for method in dict.fromkeys(row["method"] for row in read("plans.csv")):
        ratios = [
            float(r["kl"]) / exact[r["model"], r["point"]]
            for r in chosen("plans.csv", method=method)
        ]
        if method != "exact":
            table.append(
                [
                    method,
                    spread(ratios),
                    f"{sum(ratio >= 1 for ratio in ratios)} of {len(ratios)}",
                ]
            )
    return table


def correlations() -> Cells:
    table = [["damage on held-out text", "bits", "metric", *GROUPS]]
    metrics = {"kl_teacher_to_student": "KL", "sqnr_db": "SQNR"}
    for damage in ("cross-entropy", "divergence"):
        for bits in ("4", "8"):
            for metric, name in metrics.items():
                rows = chosen(
                    "correlations.csv",
                    damage=damage,
                    bits=bits,
                    metric=metric,
                    windows="64",
                    components="without the head",
                    calibration="wikitext2:train",
                )
                rows = [row for row in rows if row["model"] != "reference:hymba"]
                taus = [
                    [float(r["tau"]) for r in rows if has(r["model"])]
                    for has in GROUPS.values()
                ]
                table.append(
                    [damage, bits, name, *(f"{min(t):.2f} to {max(t):.2f}" for t in taus)]
                )
    return table


def positions() -> Cells:
    """The first and the last stretch of each plan, and the slope."""
    table = [
        [
            "model",
            "",
            "bits",
            "first 512 tokens",
            "last 512",
            "slope per 1,000 tokens",
            "trend",
        ]
    ]
    rows = read("positions.csv")
    for model, plan in dict.fromkeys((row["model"], row["plan"]) for row in rows):
        curve = chosen("positions.csv", model=model, plan=plan)
        first = curve[0]
        last = curve[-1]
        subject = "original, cross-entropy" if plan == "original" else f"{plan}, KL"
        ends = (
            f"{float(row['mean']):.3g} ± {float(row['error']):.1g}"
            for row in (first, last)
        )
        slope = f"{float(first['slope']):+.1g} ± {float(first['slope_error']):.1g}"
        table.append(
            [
                model,
                subject,
                f"{float(first['bits_per_weight']):.2f}",
                *ends,
                slope,
                first["trend"],
            ]
        )
    return table


def run() -> Cells:
    table = [["runtime", "file", "MB", "perplexity", "KL", "speed, × FP16"]]
    for row in read("run.csv"):
        cells = (
            row[name] for name in ("plan", "mb", "perplexity", "kl", "speed_to_fp16")
        )
        table.append([RUNTIMES[row["target"]], *cells])
    return table


def speed(
    name: str, benchmark: str, columns: dict[str, tuple[str, str]], **values: str
) -> Cells:
    """One row per model of a benchmark; heading → (variant, quantity) of the columns."""
    rows = chosen("speed.csv", benchmark=benchmark, **values)
    cells = {
        (row["model"], row["variant"], row["quantity"]): row["value"] for row in rows
    }
    models = dict.fromkeys(row["model"] for row in rows)
    return [
        [name, *columns],
        *(
            [m, *(cells.get((m, *column), "–") for column in columns.values())]
            for m in models
        ),
    ]


def sweep() -> Cells:
    return speed(
        "s per candidate, two ARM cores",
        "sweep",
        {
            "as published": ("as published", "s/candidate"),
            "plain engine": ("plain", "s/candidate"),
            "fast engine": ("fast", "s/candidate"),
            "published / fast": ("fast", "times as fast as published"),
        },
        machine=ARM,
    )


def gpu() -> Cells:
    columns = {name: (name, "s") for name in ("tf32x3", "tf32", "plain")}
    return speed(
        "s per sweep, one H200",
        "gpu sweep",
        {"candidates": ("", "candidates"), **columns},
        machine="H200",
    )


def whole() -> Cells:
    """Whole runs; one row per model, way and machine."""
    stages = (
        "gathering statistics",
        "measuring sensitivity",
        "planning",
        "writing files",
        "evaluating",
    )
    table = [
        [
            "model",
            "with",
            "seconds",
            *(name.split()[0] for name in stages),
            "host, GB",
            "machine",
            "commit",
        ]
    ]
    runs: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in chosen("speed.csv", benchmark="whole run"):
        runs.setdefault((row["model"], row["variant"], row["machine"]), {})[
            row["quantity"]
        ] = row
    for (model, variant, machine), numbers in runs.items():
        quantities = {quantity: row["value"] for quantity, row in numbers.items()}
        times = [quantities.get(f"{name}, s") for name in ("whole", *stages)]
        seconds = ["–" if time is None else f"{float(time):.0f}" for time in times]
        commit = numbers["whole, s"]["commit"]
        table.append(
            [
                model,
                variant,
                *seconds,
                quantities.get("host memory, GB", "–"),
                machine,
                commit,
            ]
        )
    return table


def staged() -> Cells:
    table = [
        [
            "model",
            "candidates",
            "measured",
            "time, × everything",
            "KL, × everything's best plan",
        ]
    ]
    for row in read("staged.csv"):
        names = ("model", "candidates", "measured", "time_ratio", "kl_ratio")
        table.append([row[name] for name in names])
    return table


def decode() -> Cells:
    return speed(
        "tokens/s, one core",
        "gguf",
        {
            f"{kind}, {library}": (f"{kind}, {library}", "decode tokens/s")
            for kind in ("Q8_0", "Q4_K")
            for library in ("wheel", "native")
        },
        threads="1",
        machine=X86,
    )


TABLES: dict[str, Callable[[], Cells]] = {
    "rivals": rivals,
    "rivals-by-model": rivals_by_model,
    "rivals-by-type": rivals_by_type,
    "below-four": below_four,
    "methods": methods,
    "plans": plans,
    "correlations": correlations,
    "positions": positions,
    "run": run,
    "sweep": sweep,
    "gpu": gpu,
    "whole": whole,
    "staged": staged,
    "decode": decode,
}


def markdown(table: Cells) -> str:
    heading, *rows = (f"|{'|'.join(cells)}|" for cells in table)
    return "\n".join([heading, "|---" * len(table[0]) + "|", *rows])


def filled(text: str) -> str:
    """The page with its tables as the data files have them."""
    for name, table in TABLES.items():
        begin = f"<!-- {name} -->\n"
        end = f"<!-- /{name} -->"
        head, marker, after = text.partition(begin)
        if marker:
            _, marker, tail = after.partition(end)
            if not marker:
                raise SystemExit(f"{begin.strip()} has no {end} behind it")
            text = f"{head}{begin}{markdown(table())}\n{end}{tail}"
    return text


def main(words: list[str]) -> int:
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if filled(text) == text:
            continue
        stale.append(page)
        if "--check" in words:
            print(
                f"{page.relative_to(ROOT)}: tables differ from docs/results: run python scripts/results.py"
            )
        else:
            page.write_text(filled(text), encoding="utf-8")
    return int("--check" in words and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
