"""What things are called where people read (Q4_K_M, not stock.q4_k_m; llama.cpp, not gguf), and numbers as they are
written there."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kl_lens.base.units import human_bytes
from kl_lens.run.folder import RECOMMENDED
from kl_lens.run.records import ARTIFACT, ORIGINAL, Estimate, Plan, Subject
from kl_lens.targets import TARGETS, get_target


@dataclass(frozen=True)
class Unit:
    """What a run counts: tokens of text, or images of which each has a class."""

    one: str = "token"
    text: str = "text"
    guess: str = "next token"
    perplexity: str = "token perplexity"


# By task; others: Unit().
UNITS = {"image": Unit("image", "images", "class", "perplexity over classes")}


def runtime_title(target: str | None) -> str:
    """`llama.cpp`, `OpenVINO`; `PyTorch` for no target."""
    if target in TARGETS:
        return get_target(target).title
    return "PyTorch" if target in (None, "torch") else target


def plan_title(name: str) -> str:
    """`FP16`, `Q4_K_M`, `recommended`, `recommended 4MB`; names that users gave stay as they are."""
    for prefix in ("uniform_", "stock."):
        if name.startswith(prefix):
            return name.removeprefix(prefix).removesuffix(".imatrix").upper() + (
                " imatrix" if name.endswith(".imatrix") else ""
            )
    of_run = (
        rf"{RECOMMENDED}(?:-(?:{'|'.join(TARGETS)}))?(-(?:kl|drop)?\d[\w.-]*?)?(\.own)?"
    )
    if match := re.fullmatch(of_run, name):
        return ("our own plan" if match[2] else RECOMMENDED) + (match[1] or "").replace(
            "-", " ", 1
        )
    return name


def short_title(plan: Plan) -> str:
    """For figures: the paper's points by their number alone."""
    digits = re.search(r"(\d+)$", plan.name) if plan.family == "paper" else None
    return f"p{digits[1]}" if digits else plan_title(plan.name)


def subject_title(subject: Subject) -> str:
    """`original`, `Q4_K_M, llama.cpp`, `Q4_K_M, in PyTorch, as deployed in llama.cpp`, a path (and what is unusual)."""
    if subject.what == ORIGINAL or "path" in subject.settings:
        return subject.label
    runtime = runtime_title(subject.target)
    if subject.what != ARTIFACT and subject.target:
        runtime = f"in PyTorch, as {'deployed in ' * ('activations' in subject.settings)}{runtime}"
    _, bracket, apart = subject.label.partition(" (")
    return f"{plan_title(subject.plan or '')}, {runtime}{bracket}{apart}"


def readable(text: str) -> str:
    """A stored sentence with the plans in it by their titles."""
    return re.sub(
        r"\b(?:stock\.|uniform_|recommended-)[\w.+-]*\w",
        lambda match: plan_title(match[0]),
        text,
    )


# -- numbers -------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 3) -> str:
    """`0.0123`, `1.2e-7`, `–` for what is not known."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{digits}g}" if abs(value) < 10 ** (digits - 1) else f"{value:,.0f}"


def with_error(estimate: Estimate | None, digits: int = 3) -> str:
    """`0.0091 ± 0.0005`, `8.3e-4 ± 3e-5`: the standard error to one digit, the value to the same place."""
    if estimate is None:
        return "–"
    value = estimate.value
    error = estimate.standard_error
    if not (math.isfinite(value) and math.isfinite(error) and error > 0):
        return number(value, digits) + (
            f" ± {number(error, 1)}" if math.isfinite(error) else ""
        )
    decimals = -math.floor(math.log10(float(f"{error:.0e}")))  # of the error's digit
    if 0 <= decimals <= 5 and abs(value) >= 1e-3:
        return f"{value:,.{decimals}f} ± {error:.{decimals}f}"
    digits = max(1, decimals + 1 + math.floor(math.log10(abs(value)))) if value else 1
    return f"{number(value, digits)} ± {number(error, 1)}"


def fixed_with_error(estimate: Estimate | None, decimals: int = 2) -> str:
    """`21.67 ± 0.31`: for values whose scale is known, such as perplexities."""
    if estimate is None or math.isnan(estimate.value):
        return "–"
    if abs(estimate.value) >= 1e5:
        return with_error(estimate)
    text = f"{estimate.value:z.{decimals}f}"  # z: no -0.00
    error = estimate.standard_error
    return f"{text} ± {error:.{decimals}f}" if math.isfinite(error) else text


def percent(share: float, decimals: int = 0) -> str:
    return f"{100 * share:.{decimals}f} %"


def sum_of_parts(interaction: float) -> str:
    """What a predicted KL is: the sum of its parts, times the interaction of the run."""
    parts = "the sum of what each component loses alone"
    if interaction == 1.0:
        return parts
    share = f"{percent(abs(interaction - 1))} {'more' if interaction > 1 else 'less'}"
    return f"{parts}, multiplied by {interaction:.3g} because whole plans measured in this run lost {share}"


def count(number_: int, noun: str) -> str:
    return f"{number_} {noun}" if number_ == 1 else f"{number_} {noun}s"


def size(count: float | None) -> str:
    return "–" if count is None else human_bytes(count)
