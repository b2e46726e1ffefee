"""What things are called where people read: Q4_K_M, not stock.q4_k_m; llama.cpp, not gguf."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kl_lens.run.folder import RECOMMENDED
from kl_lens.run.records import ARTIFACT, ORIGINAL, Plan, Subject
from kl_lens.targets import TARGETS, get_target


@dataclass(frozen=True)
class Unit:
    """What a run counts: tokens of text, or images of which each has a class."""

    one: str = "token"
    text: str = "text"
    guess: str = "next token"
    perplexity: str = "token perplexity"


UNITS = {"image": Unit("image", "images", "class", "perplexity over classes")}  # by task; others: Unit()


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
    of_run = rf"{RECOMMENDED}(?:-(?:{'|'.join(TARGETS)}))?(-(?:kl|drop)?\d[\w.-]*?)?(\.own)?"
    if found := re.fullmatch(of_run, name):
        return ("our own plan" if found[2] else RECOMMENDED) + (found[1] or "").replace("-", " ", 1)
    return name


def short_title(plan: Plan) -> str:
    """For figures: the paper's points by their number alone."""
    digits = re.search(r"(\d+)$", plan.name) if plan.family == "paper" else None
    return f"p{digits[1]}" if digits else plan_title(plan.name)


def subject_title(subject: Subject) -> str:
    """`original`, `Q4_K_M, llama.cpp`, `Q4_K_M, PyTorch as llama.cpp`, a path; what sets it apart in brackets."""
    if subject.what == ORIGINAL or "path" in subject.settings:
        return subject.label
    where = runtime_title(subject.target if subject.what == ARTIFACT else None)
    if subject.what != ARTIFACT and subject.target:
        where += f" as {runtime_title(subject.target)}"
        where += " deployed" if "activations" in subject.settings else ""
    _, bracket, apart = subject.label.partition(" (")
    return f"{plan_title(subject.plan or '')}, {where}{bracket}{apart}"


def readable(text: str) -> str:
    """A stored sentence with the plans in it by their titles."""
    return re.sub(r"\b(?:stock\.|uniform_|recommended-)[\w.+-]*\w", lambda found: plan_title(found[0]), text)
