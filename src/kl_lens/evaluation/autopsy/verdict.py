"""From measurements to words: what is wrong with a file, where, what it costs and what to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kl_lens.evaluation.autopsy.findings import (
    ACTIVATIONS,
    FILE,
    METADATA,
    PROMPT,
    RUNTIME,
    SETTINGS,
    TOKENIZER,
    TYPE,
    WEIGHTS,
    Finding,
    Restored,
    Step,
    TensorReport,
)
from kl_lens.positions import GROWS, PositionCurve
from kl_lens.records import Estimate
from kl_lens.targets.dissection import Disagreement

# In nats per token, and as shares of the KL that a step starts from. Rounding stays far below them, a lost state, a
# wrong setting or a wrong kernel far above.
_ROUNDING, _ROUNDING_SHARE, _DRIFT = 5e-4, 0.1, 3.0
_ACTIVATIONS, _ACTIVATIONS_TIMES = (
    0.02,
    4.0,
)  # 8-bit activations often cost one to three times what weights do
_DEFAULTS, _DEFAULTS_SHARE = 0.01, 0.5
_CARRIES = 0.5  # of the loss, in tensors of a coarser type than most
_COARSER = 0.75  # of the bits of most weights
_VISIBLE = 5e-3  # a loss that is worth another type
_UNUSUAL_SHARE = 0.2  # of the loss, in tensors that should be floating point
_MOST_TENSORS = 0.6  # differing: not a damaged file, but another model's
_WORSE, _WORSE_BY = 3.0, 0.02  # how much more than plain rounding weights may lose
_TWICE = 0.25  # relative error up to which that is rounding or fine-tuning

CONVERT = "convert the model again, with a current converter"


@dataclass
class Evidence:
    """Everything that an autopsy has measured."""

    runtime: str  # its name for people
    exact_options: str  # how a user of this runtime gets exact arithmetic
    reports: Sequence[TensorReport] = ()
    missing: Sequence[str] = ()
    left_out: Sequence[str] = ()  # tensors that could not be put into the original
    steps: dict[str, Step] = field(default_factory=dict)
    restored: Sequence[Restored] = ()
    inputs: Sequence[Restored] = ()  # the same for rounded activations
    disagreements: Sequence[Disagreement] = ()
    rounding: Estimate | None = None
    notes: Sequence[str] = ()
    curve: PositionCurve | None = None  # of the file's loss along long windows

    def kl(self, letter: str) -> float | None:
        step = self.steps.get(letter)
        return None if step is None or step.kl is None else step.kl.value

    def failure(self, letter: str) -> str:
        return self.steps[letter].failure if letter in self.steps else ""

    def is_apart(self, letter: str) -> bool:
        """Whether a step differs from the one beside it by more than rounding."""
        step = self.steps.get(letter)
        if step is None or step.apart is None:
            return False
        # Two computations that round activations at different ties drift apart as far as rounding itself moves them.
        rounded = self.steps["c"].apart if "c" in self.steps else None
        noise = _DRIFT * rounded.value if rounded is not None else 0.0
        return step.apart.value > _ROUNDING + _ROUNDING_SHARE * (self.kl(step.beside) or 0.0) + noise

    @property
    def loses_more_than_rounding(self) -> bool:
        """Whether the weights lose far more than the original's, rounded to nearest in the same types."""
        plain = 0.0 if self.rounding is None else self.rounding.value
        return (self.kl("b") or 0.0) > _WORSE * plain + _WORSE_BY

    @property
    def rounds_too_much(self) -> bool:
        """Whether rounded activations cost far more than rounded weights."""
        before, after = self.kl("b"), self.kl("c")
        if before is None or after is None:
            return before is not None and bool(self.failure("c"))
        return after - before > _ACTIVATIONS + _ACTIVATIONS_TIMES * before


def judged(evidence: Evidence) -> tuple[str, tuple[Finding, ...]]:
    """The headline and all findings, faults first."""
    findings = [*_weights(evidence), *_types(evidence), *_activations(evidence), *_metadata(evidence)]
    findings += _runtime(evidence, {finding.step for finding in findings if finding.is_fault})
    findings += [Finding(FILE, "", note, is_fault=False) for note in evidence.notes]
    if (curve := evidence.curve) is not None and curve.trend == GROWS:
        words = f"Its loss grows along the text by {shown(curve.slope)} nats per 1,000 tokens"
        advice = (
            "compare plans with kl-lens evaluate --positions; more bits for state-space components may help"
        )
        findings.append(Finding(PROMPT, "", words, advice, is_fault=False))
    findings.sort(key=lambda finding: not finding.is_fault)
    faults = [finding for finding in findings if finding.is_fault]
    if faults:
        more = f" ({len(faults) - 1} more below)" if len(faults) > 1 else ""
        return f"{faults[0].words}{more}", tuple(findings)
    return _nothing_wrong(evidence), tuple(findings)


def _nothing_wrong(evidence: Evidence) -> str:
    if "a" not in evidence.steps:
        return "Nothing is wrong that the file alone could show. Give the original with --against to compare."
    matrices = [r for r in evidence.reports if not r.float_only and r.component]
    sizes = Counter[str]()
    for report in matrices:
        sizes[report.type] += report.bytes
    name = sizes.most_common(1)[0][0] if sizes else "rounding"
    kl = next((step.kl for letter in "dcb" if (step := evidence.steps.get(letter)) and step.kl), None)
    lost = "" if kl is None else f" (KL {shown(kl)} nats per token)"
    if "b" not in evidence.steps:
        return f"Nothing wrong was found, but its weights could not be compared{lost}."
    plain = ""
    if evidence.rounding is not None and evidence.rounding.value > _ROUNDING:
        plain = f" Plain rounding to the same types loses {shown(evidence.rounding)} in weights."
    return f"Nothing is wrong: it loses what {name} loses{lost}.{plain}"


# -- weights -----------------------------------------------------------------------------------------------------


def _weights(evidence: Evidence) -> Iterator[Finding]:
    if missing := evidence.missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
        yield Finding(WEIGHTS, missing[0], f"Tensors of the original are missing: {names}", CONVERT)
    compared = [r for r in evidence.reports if r.component and not r.float_only]
    odd = [r for r in evidence.reports if r.problem]
    if len(compared) > 3 and len([r for r in compared if r.problem]) > _MOST_TENSORS * len(compared):
        errors = sorted(r.error for r in odd if r.error is not None)
        close = bool(errors) and errors[len(errors) // 2] < _TWICE
        words = "was quantized twice, or made from another version of" if close else "was not made from"
        yield Finding(
            WEIGHTS, "all tensors", f"The file {words} this checkpoint: {len(odd)} tensors differ, for example "
            f"{odd[0].name}, which {odd[0].problem}", "check --against, or convert the checkpoint again",
            evidence.kl("b"),
        )  # fmt: skip
        return
    yield from _merged(odd, evidence)
    lost, plain = evidence.kl("b") or 0.0, evidence.rounding
    if not odd and plain is not None and evidence.loses_more_than_rounding:
        words = f"The weights lose {short(lost)} nats, where plain rounding to the same types loses {shown(plain)}"
        yield Finding(WEIGHTS, "all tensors", words, "quantize the original again", lost - plain.value)


def _merged(odd: Sequence[TensorReport], evidence: Evidence) -> Iterator[Finding]:
    """One finding for each tensor, for two that are swapped, or for a block in which most are odd."""
    gains = {each.what: each.kl for each in evidence.restored}
    blocks = Counter(r.block for r in odd if r.block is not None)
    for block, count in blocks.items():
        same = [r for r in odd if r.block == block]
        whole = [r for r in evidence.reports if r.block == block and not r.float_only]
        if count < 3 or len([r for r in same if not r.float_only]) < 0.7 * len(whole):
            continue
        odd = [r for r in odd if r.block != block]
        words = f"Block {block} is damaged: {count} of its tensors are not the original's, for example {same[0].name}, "
        kl = sum(gains.get(r.component, 0.0) for r in same) or None
        yield Finding(WEIGHTS, f"block {block}", words + f"which {same[0].problem}", CONVERT, kl)
    holders = {r.name: r.problem.removeprefix("holds the values of ") for r in odd}
    for report in odd:
        other = holders.get(report.name, "")
        gain = gains.get(report.component)
        if holders.get(other) == report.name:  # they hold each other's
            if report.name < other:
                words = f"{report.name} and {other} are swapped"
                yield Finding(WEIGHTS, report.name, words, CONVERT, gain)
            continue
        cancels = gain is not None and gain < -_ROUNDING and not evidence.loses_more_than_rounding
        words = f"{report.name} ({report.type}) {report.problem}"
        if cancels:  # restoring it alone makes the file worse: another tensor makes up for it
            words += "; another tensor makes up for it, as after rescaling"
        yield Finding(WEIGHTS, report.name, words, "" if cancels else CONVERT, gain, not cancels)


def _types(evidence: Evidence) -> Iterator[Finding]:
    """Sound values in a type that is too coarse for them."""
    refused = evidence.failure("d")
    shares = {each.what: each for each in evidence.restored}
    unusual = dict[str, list[TensorReport]]()
    for report in evidence.reports:
        if report.float_only and not report.is_float and not report.problem:
            unusual.setdefault(report.kind or re.sub(r"\d+", "N", report.name), []).append(report)
    for kind, reports in unusual.items():
        carried = shares.get(f"all {kind}") or shares.get(reports[0].component)
        words = f"{reports[0].name} is {reports[0].type}"
        words += f", and {len(reports) - 1} more" if reports[1:] else ""
        words += f": runtimes expect {kind or 'it'} in floating point"
        if carried is not None:
            words += f"; it carries {carried.share:.0%} of the weights' loss"
        carries = carried is not None and carried.share > _UNUSUAL_SHARE
        fault = carries or any(report.name in refused for report in reports)
        advice = f"keep {kind or 'it'} in F32 or F16" if fault else ""
        yield Finding(TYPE, reports[0].name, words, advice, carried.kl if carried else None, fault)
    worst = next((e for e in evidence.restored if e.what.startswith("all ") or e.share > _CARRIES), None)
    loss = evidence.kl("b") or 0.0
    if worst is None or loss < _VISIBLE or worst.share < _CARRIES:
        return
    if worst.what.removeprefix("all ") in unusual or any(report.problem for report in evidence.reports):
        return
    usual = _usual_bits(evidence, worst)
    coarse = usual > 0 and worst.bits < _COARSER * usual
    verb = "carry" if worst.what.startswith("all ") else "carries"
    words = f"{worst.what} ({worst.type}) {verb} {worst.share:.0%} of the loss of the weights"
    if coarse:
        words += f", at {worst.bits:.1f} bits where most of the file has {usual:.1f}"
    yield Finding(TYPE, worst.what, words, "store them in a larger type" if coarse else "", worst.kl, coarse)


def _usual_bits(evidence: Evidence, besides: Restored) -> float:
    """Bits per weight of most of the other matrices, by bytes at 16 bits."""
    own = besides.what.removeprefix("all ")
    rest = [
        r for r in evidence.reports if r.component and not r.float_only and own not in (r.kind, r.component)
    ]
    sizes = Counter[float]()
    for report in rest:
        sizes[round(report.bits, 1)] += round(report.bytes / report.bits)
    return sizes.most_common(1)[0][0] if sizes else 0.0


# -- what computes with them -------------------------------------------------------------------------------------


def _activations(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.rounds_too_much:
        return
    before, after = evidence.kl("b"), evidence.kl("c")
    added = None if after is None or before is None else after - before
    cost = "overflow" if added is None else f"add {short(added)} nats to {short(before or 0)} of the weights"
    worst = evidence.inputs[0] if evidence.inputs else None
    where = f" most of it before {worst.what} ({worst.type})" if worst else ""
    words = f"The activations do not survive rounding: {evidence.runtime}'s kernels {cost};{where}"
    kind = worst.what.removeprefix("all ") if worst else "the matrices behind them"
    advice = f"store {kind} in F16, whose kernels round less, or rescale the outlier channels"
    yield Finding(ACTIVATIONS, worst.what if worst else "", words.rstrip(";"), advice, added)


def _metadata(evidence: Evidence) -> Iterator[Finding]:
    step = evidence.steps.get("e") or evidence.steps.get("d")
    cost = step.apart.value if step is not None and step.apart is not None else None
    for each in evidence.disagreements:
        words = each.words[0].upper() + each.words[1:] if " " in each.name else each.words
        step_name = TOKENIZER if each.name.startswith("tokenizer") else METADATA
        yield Finding(
            step_name, each.name, words, CONVERT if each.matters else "",
            cost if each.matters and step_name == METADATA else None, each.matters,
        )  # fmt: skip


def _runtime(evidence: Evidence, blamed: set[str]) -> Iterator[Finding]:
    """`blamed`: steps in which faults were found already, so that the runtime is not blamed for them."""
    runtime = evidence.runtime
    if refused := evidence.failure("d"):
        explained = bool(blamed - {TOKENIZER})
        advice = "see above" if explained else f"another version of {runtime}, or {CONVERT}"
        yield Finding(RUNTIME, "", f"{runtime} does not run it: {refused}", advice, is_fault=not explained)
        return
    exact = evidence.steps.get("e")
    known = {f.letter for f in evidence.steps.values() if f.apart is not None}
    decides = "e" if "e" in known else "d"
    explained = METADATA in blamed or bool(evidence.left_out or evidence.missing)
    if evidence.is_apart(decides) and not explained:
        step = evidence.steps[decides]
        assert step.apart is not None
        yield Finding(
            RUNTIME, "", f"{runtime} does not compute what the weights say: KL {shown(step.apart)} from the same "
            f"weights in PyTorch, more than rounding. It is not the weights.",
            f"another version of {runtime}, or {CONVERT}", step.apart.value,
        )  # fmt: skip
    before = max(evidence.kl("c") or 0.0, evidence.kl("e") or 0.0)
    added = (evidence.kl("d") or 0.0) - before
    if exact is not None and exact.kl is not None and added > _DEFAULTS + _DEFAULTS_SHARE * before:
        yield Finding(
            SETTINGS, "", f"{runtime}'s default arithmetic adds {short(added)} nats; with exact settings it is gone",
            evidence.exact_options, added,
        )  # fmt: skip
    if evidence.is_apart("f") or evidence.failure("f"):
        step = evidence.steps["f"]
        cost = None if step.apart is None else step.apart.value
        words = f"{runtime} gives other results token by token than for a whole prompt"
        words += f": {step.failure}" if cost is None else f": KL {short(cost)}"
        yield Finding(PROMPT, "", words, f"another version of {runtime}, or {CONVERT}", cost)
    if differs := evidence.failure("g"):
        words = f"The file's tokenizer is not the original's: its ids {differs}"
        yield Finding(TOKENIZER, "tokenizer", words, "convert the model again with its own tokenizer files")


def shown(value: Estimate) -> str:
    known = value.standard_error == value.standard_error
    return short(value.value) + (f" ± {value.standard_error:.1g}" if known else "")


def short(value: float) -> str:
    return f"{value:.3g}"
