"""From measurements to words: what is wrong with a file, where, what it costs and what to do."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from kl_lens.autopsy.weights import (
    HOLDS,
    INFINITE,
    OFF,
    SHAPE,
    Weights,
)
from kl_lens.run.autopsies import Finding, Restored, Step, TensorReport
from kl_lens.run.records import Estimate
from kl_lens.targets.dissection import TOKENIZER, VOCABULARY, Disagreement

# In nats per token, and as shares of the KL that a step starts from. Rounding stays far below them, a lost state, a
# wrong setting or a wrong kernel far above.
_ROUNDING = 5e-4
_ROUNDING_SHARE = 0.1
_DRIFT = 3.0
_ACTIVATIONS = 0.02
_ACTIVATIONS_TIMES = 4.0  # 8-bit ones often cost one to three times what weights do
_DEFAULTS = 0.01
_DEFAULTS_SHARE = 0.5
_CARRIES = 0.5  # of the loss, in tensors of a coarser type than most
_COARSER = 0.75  # of the bits of most weights
_VISIBLE = 5e-3  # a loss that is worth another type
_UNUSUAL_SHARE = 0.2  # of the loss, in tensors that should be floating point
_MOST_TENSORS = 0.6  # differing: not a damaged file, but another model's
_WORSE = 3.0
_WORSE_BY = 0.02  # how much more than plain rounding weights may lose
_TWICE = 0.25  # relative error up to which that is rounding or fine-tuning
_CANCELLED = 0.1  # of what one damaged tensor costs: together they cost nothing
_REST = (
    0.25  # of the loss: what the runtime adds to the weights' loss is worth a sentence
)

# The beginning of a cause → what to do.
_ADVICE = {
    "times": "look for a scale that the converter applies twice or not at all, or multiply the tensor back",
    "with the other sign": "look for a minus that the converter applies twice or not at all",
    "shifted": "subtract it again: some families store 1 + x in their norms, others x",
    "logarithm": "store what the runtime computes with: -exp(A_log), not A_log",
    "exponential": "take the exponential only once",
    "all": "nothing was written to it: look for its name in the converter's messages",
    "transposed": "transpose it back: the converter takes its axes in the other order",
    "rotary": "leave the converter's permutation of q and k out, or put it in: the runtime rotates other pairs",
    "taps": "turn the taps round: the converter takes the convolution for one that runs backwards",
    "signs": "copy these values from the original: single changed values are damage, not a conversion",
    "partly zero": "copy these rows from the original: the converter stopped before the end of the tensor",
    "partly": "compare the file's checksum with its source's, then copy or download it again",
    HOLDS: "exchange them: the converter's names for them are mixed up",
    INFINITE: "quantize it again in a type with a larger range, or keep it in F32",
    SHAPE: "check that config.json and the weights belong to one model",
    OFF: "compare the file's checksum with its source's; if it is the same, quantize these tensors again",
    "": "put them back in order: the converter arranges this layer as another family has it",
}


@dataclass
class Evidence:
    """Everything that an autopsy has measured."""

    runtime: str  # its name for people
    exact_options: str  # how a user of this runtime gets exact arithmetic
    original: str = ""
    weights: Weights = field(default_factory=Weights)
    # Tensors that share a mistake, and its cost.
    damage: Sequence[tuple[Sequence[TensorReport], float | None]] = ()
    damaged_by: float = 0.0  # what all of them cost together
    steps: dict[str, Step] = field(default_factory=dict)
    restored: Sequence[Restored] = ()
    inputs: Sequence[Restored] = ()  # the same for rounded activations
    disagreements: list[Disagreement] = field(default_factory=list)
    tokens_cost: float | None = None  # of other ids
    rounding: Estimate | None = None
    unchecked: list[str] = field(default_factory=list)
    changed: str = ""  # that it is no longer what KL Lens exported

    def kl(self, letter: str) -> float | None:
        step = self.steps.get(letter)
        return None if step is None or step.kl is None else step.kl.value

    def failure(self, letter: str) -> str:
        return self.steps[letter].failure if letter in self.steps else ""

    def apart(self, letter: str) -> float | None:
        """How far a step is from the one beside it, if that is more than rounding."""
        step = self.steps.get(letter)
        if step is None or step.apart is None:
            return None
        # Two computations that round activations at different ties drift apart as far as rounding itself moves them.
        rounded = self.steps["c"].apart if "c" in self.steps else None
        noise = _DRIFT * rounded.value if rounded is not None else 0.0
        limit = _ROUNDING + _ROUNDING_SHARE * (self.kl(step.beside) or 0.0) + noise
        return step.apart.value if step.apart.value > limit else None

    @property
    def decides(self) -> str:
        """The step that shows whether the runtime computes what the weights say; empty: none."""
        steps = self.steps
        decisive = (letter for letter in "ed" if letter in steps and steps[letter].apart)
        return next(decisive, "")

    @property
    def rounds_too_much(self) -> bool:
        """Whether rounded activations cost far more than rounded weights."""
        before = self.kl("b")
        after = self.kl("c")
        if before is None or after is None:
            return before is not None and bool(self.failure("c"))
        return after - before > _ACTIVATIONS + _ACTIVATIONS_TIMES * before

    def judged(self) -> tuple[str, tuple[Finding, ...]]:
        """The headline and all findings: faults first, the costliest first."""
        findings = [*self._damages(), *self._types(), *self._activations()]
        findings += self._settings()
        findings += self._runtime(
            {finding.step for finding in findings if finding.is_fault}
        )
        if (another := self._another_model()) is not None:
            besides = (finding for finding in findings if finding.step != "weights")
            findings = [
                another,
                *(replace(finding, is_fault=False) for finding in besides),
            ]
        findings += [Finding("file", "", text, is_fault=False) for text in self._notes()]
        findings.sort(key=_rank)
        faults = [finding for finding in findings if finding.is_fault]
        if not faults:
            return self._nothing_wrong(), tuple(findings)
        more = f" (and {len(faults) - 1} more: see the findings)" if faults[1:] else ""
        return faults[0].words + more, tuple(findings)

    def _notes(self) -> Iterator[str]:
        for reason in self.unchecked:
            yield f"Not checked: {reason}"
        if names := self.weights.uncompared:
            yield f"Not compared, because not found in the file: {listed(names)}"
        reports = self.weights.reports if "b" in self.steps else ()
        if names := [r.name for r in reports if r.error is None and not r.problem]:
            yield f"Not compared, because not of the original: {listed(names)}"
        if self.changed:
            yield f"It is no longer what KL Lens exported: {self.changed}"

    def _nothing_wrong(self) -> str:
        changed = " But it is no longer what KL Lens exported." if self.changed else ""
        if "a" not in self.steps:
            alone = "Nothing is wrong that the file alone could show. Give the original with --model to compare."
            return alone + changed
        kl = next(
            (step.kl for letter in "dcb" if (step := self.steps.get(letter)) and step.kl),
            None,
        )
        lost = "" if kl is None else f" (KL {shown(kl)} nats per token)"
        if self.unchecked:
            return f"Nothing wrong was found{lost}, but not everything was checked: {self.unchecked[0]}.{changed}"
        words = f"Nothing is wrong: it loses what {self._usual().type} loses{lost}."
        plain = self.rounding
        weights, whole, exact = (self.kl(letter) or 0.0 for letter in "bde")
        if plain is not None and max(plain.value, weights) > _ROUNDING:
            words += f" Its weights lose {short(weights)}; plain rounding to the same types loses "
            words += f"{shown(plain)}."
        if (remainder := whole - weights) > max(_REST * whole, _ROUNDING / 5):
            words += f" The rest, {short(remainder)}, is activations, which {self.runtime} computes in fewer bits"
            exactly = f": with exact settings it loses {short(exact)}."
            words += exactly if "e" in self.steps else "."
        return words + changed

    def _usual(self, besides: str = "") -> TensorReport:
        """A tensor of the type that most weights have, without one kind or component."""
        sizes = Counter[str]()
        examples = {"": TensorReport("", "rounding", 0, 0.0)}
        for report in self.weights.reports:
            is_other = besides not in (report.kind, report.component)
            if report.component and not report.float_only and is_other:
                sizes[report.type] += round(report.bytes / report.bits)
                examples[report.type] = report
        return examples[sizes.most_common(1)[0][0] if sizes else ""]

    # -- weights -------------------------------------------------------------------------------------------------

    def _another_model(self) -> Finding | None:
        compared = [r for r in self.weights.reports if r.component and not r.float_only]
        strange = [r for r in compared if r.cause in (OFF, SHAPE)]
        missing = self.weights.missing
        count = len(strange) + len(missing)
        total = len(compared) + len(missing)
        if total <= 3 or count <= _MOST_TENSORS * total:
            return None
        close = [r for r in strange if r.error is not None and r.error < _TWICE]
        cause = "Another model"
        advice = "give the checkpoint that the file was made from"
        if len(close) > len(strange) / 2:
            cause = "Another version of the model, or quantized twice"
            advice = "quantize the original's weights"
        example = [f"{report.name}: {report.problem}" for report in strange[:1]]
        example += [f"{name} is missing" for name in missing[:1]]
        words = f"{cause}: check --model. {count} of {total} tensors are not those of {self.original}: "
        return Finding("weights", "all tensors", words + example[0], advice)

    def _damages(self) -> Iterator[Finding]:
        if missing := self.weights.missing:
            words = f"Tensors of the original are missing: {listed(missing)}"
            advice = "use a newer converter"
            yield Finding("weights", missing[0], words, advice)
        costs = [cost for _, cost in self.damage if cost is not None]
        several = len(costs) == len(self.damage) > 1
        if several and self.damaged_by < _CANCELLED * max(costs):
            names = listed([report.name for group, _ in self.damage for report in group])
            words = f"{names} are not the original's, but make up for each other, as after rescaling"
            together = max(self.damaged_by, 0.0)
            yield Finding("weights", names, words, "", together, is_fault=False)
            return
        for group, cost in self.damage:
            worst = group[0]
            causes = (cause for cause in _ADVICE if worst.cause.startswith(cause))
            advice = _ADVICE[next(causes)]
            yield Finding("weights", worst.name, _damage(group), advice, cost)
        plain = self.rounding
        if self.damage or plain is None:
            return
        lost = self.kl("b") or 0.0
        if lost > _WORSE * plain.value + _WORSE_BY:
            words = f"The weights lose {short(lost)} nats, where plain rounding to their types loses {shown(plain)}"
            advice = "quantize the original again"
            yield Finding("weights", "all tensors", words, advice, lost - plain.value)

    def _types(self) -> Iterator[Finding]:
        """Sound values in a type that is too coarse for them."""
        shares = {part.what: part for part in self.restored}
        unusual = dict[str, list[TensorReport]]()
        for report in self.weights.reports:
            if report.float_only and not report.is_float and not report.problem:
                kind = report.kind or re.sub(r"\d+", "N", report.name)
                unusual.setdefault(kind, []).append(report)
        for kind, reports in unusual.items():
            part = shares.get(f"all {kind}") or shares.get(reports[0].component)
            names = [report.name for report in reports]
            words = f"{listed(names)} is {reports[0].type}: runtimes expect {kind} in floating point"
            fault = any(name in self.failure("d") for name in names)
            if part is not None:
                words += f"; it carries {part.share:.0%} of the weights' loss"
                fault = fault or part.share > _UNUSUAL_SHARE
            advice = f"keep {kind} in F32 or F16" if fault else ""
            cost = part.kl if part else None
            yield Finding("type", names[0], words, advice, cost, fault)
        if not self.restored or (self.kl("b") or 0.0) < _VISIBLE:
            return
        worst = self.restored[0]
        name = worst.what.removeprefix("all ")
        if worst.share >= _CARRIES and name not in unusual:
            usual = self._usual(name).bits
            words = f"{worst.share:.0%} of the loss of the weights is in {worst.what} ({worst.type}), at "
            words += f"{worst.bits:.1f} bits where most of the file has {usual:.1f}"
            coarse = worst.bits < _COARSER * usual
            advice = "store them in a larger type" if coarse else ""
            yield Finding("type", name, words, advice, worst.kl, coarse)

    # -- what computes with them ---------------------------------------------------------------------------------

    def _activations(self) -> Iterator[Finding]:
        if not self.rounds_too_much:
            return
        before = self.kl("b") or 0.0
        after = self.kl("c")
        added = None if after is None else after - before
        cost = "overflow"
        if added is not None:
            cost = f"add {short(added)} nats to {short(before)} of the weights"
        worst = "the matrices behind them"
        position = ""
        if self.inputs:
            worst = self.inputs[0].what
            position = f", most of it before {worst} ({self.inputs[0].type})"
        words = f"The activations do not survive rounding: {self.runtime}'s kernels {cost}{position}"
        advice = f"store {worst.removeprefix('all ')} in F16, whose kernels round less, or rescale outlier channels"
        yield Finding("activations", worst, words, advice, added)

    def _settings(self) -> Iterator[Finding]:
        """What changes the computation or the ids is blamed together: what each costs is not known. Then others."""
        apart = self.apart(self.decides)
        ids = self.failure("g")
        for kind, symptom, cost in (
            ("metadata", apart, apart),
            (VOCABULARY, ids, self.tokens_cost),
        ):
            wrong = [
                d
                for d in self.disagreements
                if d.about == kind and (d.matters or (d.matters is None and symptom))
            ]
            words = [disagreement.words for disagreement in wrong]
            advice = "; ".join(dict.fromkeys(d.advice for d in wrong))
            step = kind
            start = ""
            if kind == VOCABULARY:
                words += [ids] if ids else []
                step = "tokenizer"
                start = "its tokenizer is not the original's: "
            if words:
                text = _sentence(start + "; ".join(words))
                advice = advice or "copy the original's tokenizer"
                yield Finding(step, kind, text, advice, cost)
        for d in self.disagreements:
            if d.about == TOKENIZER or d.matters is False:
                text = _sentence(d.words)
                yield Finding(d.about, d.name, text, d.advice, is_fault=bool(d.matters))

    def _runtime(self, blamed: set[str]) -> Iterator[Finding]:
        """`blamed`: steps in which faults were found already, so that the runtime is not blamed for them."""
        runtime = self.runtime
        retry = f"try another version of {self.runtime}; if that changes nothing, "
        if refused := self.failure("d"):
            explained = bool(blamed - {"tokenizer"})
            words = f"{runtime} does not run it: {refused}"
            advice = "" if explained else retry + "convert the model with another tool"
            yield Finding("runtime", "", words, advice, is_fault=not explained)
            return
        apart = self.apart(self.decides)
        weights = self.weights
        whole = not weights.left_out and not weights.missing
        if apart is not None and "metadata" not in blamed and whole:
            words = f"{runtime} does not compute what the weights say: KL {short(apart)} from the same weights in "
            words += "PyTorch, more than rounding. "
            count = sum(report.error is not None for report in weights.reports)
            if weights.uncompared:
                names = listed(weights.uncompared)
                words += f"Not compared, and perhaps the cause: {names}"
            elif "weights" in blamed:
                words += "This is besides the weights"
            else:
                words += f"It is not the weights: all {count} tensors were compared"
            advice = retry + "the converter wrote another computation"
            yield Finding("runtime", "", words, advice, apart)
        before = max(self.kl("c") or 0.0, self.kl("e") or 0.0)
        added = (self.kl("d") or 0.0) - before
        if self.kl("e") is not None and added > _DEFAULTS + _DEFAULTS_SHARE * before:
            words = f"{runtime}'s default arithmetic adds {short(added)} nats; with exact settings it is gone"
            yield Finding("settings", "", words, self.exact_options, added)
        if (cost := self.apart("f")) is not None or self.failure("f"):
            words = (
                f"{runtime} gives other results token by token than for a whole prompt: "
            )
            words += self.failure("f") if cost is None else f"KL {short(cost)}"
            advice = retry + "its graph keeps the states wrongly"
            yield Finding("prompt", "", words, advice, cost)


def _rank(finding: Finding) -> tuple[bool, float]:
    """A file that cannot be computed with costs more than any number; other ids and settings may cost nothing."""
    unknown = 0.0 if finding.step in ("tokenizer", "metadata", "type") else math.inf
    return not finding.is_fault, -(unknown if finding.kl is None else finding.kl)


def _damage(group: Sequence[TensorReport]) -> str:
    worst = max(group, key=lambda r: r.error or 0.0)
    names = listed([report.name for report in group])
    if worst.cause == HOLDS:
        swapped = [r.partner for r in group] == [r.name for r in reversed(group)]
        return (
            f"{names} are swapped"
            if swapped
            else "; ".join(f"{r.name} {r.problem}" for r in group)
        )
    if worst.cause == OFF and len(group) > 2 and worst.block is not None:
        return f"Block {worst.block} is damaged: {names}: {worst.problem}"
    return f"{names} ({', '.join(sorted({r.type for r in group}))}): {worst.problem}"


def _sentence(text: str) -> str:
    """Words begin with a capital; names of keys stay as they are."""
    return text if re.match(r"\S*[._]", text) else text[0].upper() + text[1:]


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more."""
    if len(names) > 3:
        return f"{', '.join(names[:3])} and {len(names) - 3:,} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def shown(value: Estimate) -> str:
    has_error = value.standard_error == value.standard_error
    return short(value.value) + (f" ± {value.standard_error:.1g}" if has_error else "")


def short(value: float) -> str:
    return f"{value:.3g}"
