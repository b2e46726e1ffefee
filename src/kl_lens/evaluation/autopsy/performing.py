"""The chain of measurements: each step changes one thing, on the same windows of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kl_lens.base.errors import KLLensError, UnsupportedError, one_line
from kl_lens.evaluation.autopsy.findings import Autopsy, Restored, Step, TensorReport
from kl_lens.evaluation.autopsy.verdict import Evidence, listed
from kl_lens.evaluation.autopsy.weights import alone, examine, together
from kl_lens.evaluation.judged import REMEMBERED, RUNTIME_ERRORS
from kl_lens.evaluation.scoring import WindowScore, mean_kl as _mean, score_logits
from kl_lens.evaluation.texts import EvaluationText, text_window
from kl_lens.evaluation.torch_session import TorchSession
from kl_lens.measuring.perturbation import Kernels
from kl_lens.model import LoadedModel
from kl_lens.run.positions import by_position
from kl_lens.run.records import Estimate
from kl_lens.targets import Session, SessionSettings, Target
from kl_lens.targets.dissection import VOCABULARY, Disagreement, Dissection
from kl_lens.targets.session import TokenizingSession
from kl_lens.targets.tokenizer import find_tokenizer
from kl_lens.targets.varied_text import other_ids
from kl_lens.weights.recipes import Recipe

STEPPED = 64  # tokens that are also fed one by one
RESTORED_WINDOWS = 2  # enough to see which part carries most of the loss
RESTORED_ALONE = 6  # components of the worst kind that are restored one by one
IN_TORCH = 0.5  # of the time that a runtime takes for a token, roughly
NEGLIGIBLE = 1e-4  # nats per token: nothing to look for
MOST_GROUPS = 24  # of damaged tensors whose cost is measured


class FileInTorch(TorchSession):
    """The original with a file's weights and, with `deployed`, its runtime's activations."""

    def __init__(
        self,
        model: LoadedModel,
        values: Mapping[str, torch.Tensor],
        formats: Mapping[str, str] | None = None,
        deployed: Kernels | None = None,
        remember: int = 0,
    ) -> None:
        super().__init__(model, remember=remember)
        own: dict[str, Any] = dict(model.model.named_buffers())
        own |= dict(model.model.named_parameters(remove_duplicate=False))
        self._weights = [(own[n], v.to(own[n])) for n, v in values.items() if n in own]
        self._recipes = {name: Recipe(fmt) for name, fmt in (formats or {}).items()}
        self._deployed = deployed


def perform_autopsy(
    dissection: Dissection,
    target: Target,
    model: LoadedModel | None = None,
    text: EvaluationText | None = None,
    *,
    long: EvaluationText | None = None,
    threads: int | None = None,
    advanced: Callable[[float, str], None] = lambda work, title: None,
) -> Autopsy:
    """Looks at a file, and compares it with the original if that is given.

    Args:
        long: longer windows of text, to see whether the loss grows along them.
        threads: of the runtime.
        advanced: called with work that was done, of `expected_work`, and the title of the step.
    """
    chain = _Chain(dissection, target, model, text, long, SessionSettings(threads=threads), advanced)
    evidence = chain.evidence()
    headline, findings = evidence.judged()
    return Autopsy(
        file=str(dissection.place), target=target.name, bytes=sum(path.stat().st_size for path in dissection.files),
        original=evidence.original, text="" if text is None else text.label, headline=headline, findings=findings,
        steps=tuple(evidence.steps[k] for k in sorted(evidence.steps)), restored=tuple(evidence.restored),
        tensors=tuple(evidence.weights.reports), rounding_kl=evidence.rounding, unchecked=tuple(evidence.unchecked),
    )  # fmt: skip


class _Chain:
    def __init__(
        self, dissection: Dissection, target: Target, model: LoadedModel | None, text: EvaluationText | None,
        long: EvaluationText | None, settings: SessionSettings, advanced: Callable[[float, str], None],
    ) -> None:  # fmt: skip
        self.dissection, self.target, self.model, self.text = dissection, target, model, text
        self.long, self.settings, self._progress, self._title = long, settings, advanced, ""
        self.found = Evidence(target.title, target.exact_options, "" if model is None else model.name)
        self._teacher: TorchSession | None = None
        self._beside: dict[str, TorchSession] = {}  # letter → the session that later steps are compared with

    def _advanced(self, title: str = "", work: float = 0.0) -> None:
        """A step with this title begins, or so much of it was done."""
        self._title = title or self._title
        self._progress(work, self._title)

    def evidence(self) -> Evidence:
        self._advanced("reading its tensors")
        found, found.changed = self.found, self.dissection.changed()
        if self.model is None or self.text is None:
            found.weights.reports = [alone(tensor) for tensor in self.dissection.tensors]
            found.damage = [(group, None) for group in together(found.weights.reports)]
        else:
            self._compare(self.model)
        self._in_runtime()
        if found.rounds_too_much:
            found.inputs = self._rounded_inputs()
        weights, apart = found.weights, found.apart(found.decides)
        if weights.uncompared and not found.decides:
            names = listed(weights.uncompared)
            found.unchecked.append(f"the file holds nothing that could be compared with {names}")
        if weights.left_out and not found.damage and apart is not None:
            names = listed(weights.left_out)
            found.unchecked.append(f"its KL of {apart:.3g} from PyTorch, which has no place for {names}")
        return found

    # -- in PyTorch ------------------------------------------------------------------------------------------

    def _compare(self, model: LoadedModel) -> None:
        found, dissection = self.found, self.dissection
        self._teacher = TorchSession(model, remember=REMEMBERED)
        found.steps["a"] = Step("a", "the original in float32", Estimate(0.0, 0.0))
        try:
            found.disagreements += dissection.tokenizer(model)
        except KLLensError as error:
            words, advice = one_line(error), "copy the original's files"
            found.disagreements.append(Disagreement("tokenizer", words, advice, about=VOCABULARY))
        try:
            found.disagreements += dissection.settings(model)
            found.weights = weights = examine(dissection.parts(model), model, dissection.tensors)
        except UnsupportedError as error:
            found.unchecked.append(f"its weights were not compared: {one_line(error)}")
            found.weights.reports = [alone(tensor) for tensor in dissection.tensors]
            return
        without = [*weights.left_out, *weights.uncompared]
        note = f"without {listed(without)}" if without else ""
        file = self._session(weights.held, remember=REMEMBERED)
        self._step("b", "the original with the file's weights", file, note=note)
        formats = self._formats()
        recipes = {name: Recipe(fmt) for name, fmt in formats.items()}
        if dissection.usual_settings and self.target.models_activations(self.settings, recipes):
            deployed = self._session(weights.held, formats, remember=REMEMBERED)
            self._step("c", f"the same with {self.target.title}'s activations", deployed, beside="b")
        groups = together(weights.reports)
        if groups or (found.kl("b") or 0.0) > NEGLIGIBLE:
            self._advanced("restoring components")
            self._restore(groups)

    def _restore(self, groups: Sequence[Sequence[TensorReport]]) -> None:
        """What each fault costs in a file that is otherwise sound, so that none hides behind another; then what kinds
        of component carry of the loss of sound weights, and the components of the worst kind."""
        found, weights = self.found, self.found.weights
        held = {report.name: weights.parameters.get(report.name, "") for report in weights.reports}
        odd = {held[report.name] for group in groups for report in group} & weights.rounded.keys()
        sound = weights.held | {name: weights.rounded[name] for name in odd}
        found.rounding = _mean(self._scores(self._session(weights.rounded))[0])
        whole = self._few(sound)

        def cost(group: Sequence[TensorReport]) -> float | None:
            names = {held[report.name] for report in group}
            if not names <= weights.held.keys():
                return None
            value = self._few(sound | {name: weights.held[name] for name in names}) - whole
            return max(value, 0.0) if math.isfinite(value) else None

        def without(reports: Sequence[TensorReport]) -> float:
            names = {held[report.name] for report in reports}
            return self._few({name: value for name, value in sound.items() if name not in names})

        found.damage = [(group, cost(group) if i < MOST_GROUPS else None) for i, group in enumerate(groups)]
        found.damaged_by = self._few(weights.held) - whole
        changed = [r for r in weights.reports if r.component and (r.error or 0.0) > 1e-6]
        kinds = _by_kind(changed)
        found.restored = _carried(kinds, whole, without)
        worst = kinds[found.restored[0].what] if found.restored else []
        single = {r.component: [r] for r in sorted(worst, key=_excess)[-RESTORED_ALONE:] if worst[1:]}
        everything = [*found.restored, *_carried(single, whole, without)]
        found.restored = sorted(everything, key=lambda each: -each.kl)

    def _session(
        self, values: Mapping[str, torch.Tensor], formats: Mapping[str, str] | None = None, remember: int = 0
    ) -> FileInTorch:
        """The original with other values; with `formats`, rounded activations."""
        assert self.model is not None
        return FileInTorch(self.model, values, formats, None if formats is None else self.target, remember)

    def _formats(self) -> dict[str, str]:
        """The types whose kernels' activations are known."""
        return {name: fmt for name, fmt in self.found.weights.formats.items() if fmt not in ("fp32", "bf16")}

    def _rounded_inputs(self) -> list[Restored]:
        """What each kind of component loses by its rounded inputs."""
        weights, formats = self.found.weights, self._formats()

        def without(reports: Sequence[TensorReport]) -> float:
            names = {report.component for report in reports}
            return self._few(weights.held, {name: fmt for name, fmt in formats.items() if name not in names})

        kinds = _by_kind([report for report in weights.reports if report.component in formats])
        return _carried(kinds, self._few(weights.held, formats), without)

    # -- in the runtime --------------------------------------------------------------------------------------

    def _in_runtime(self) -> None:
        title = f"the file in {self.target.title}"
        beside = next((letter for letter in "cb" if letter in self._beside), "")
        if (session := self._opened("d", title, self.settings)) is None:
            self._compare_tokens(None)
            return
        try:
            if self._teacher is not None:
                self._step("d", title, session, beside=beside)
            else:
                self._finite(title, session)
            if not self.found.failure("d"):
                self._token_by_token(session)
            self._compare_tokens(session)
            if not self.found.failure("d"):
                self._by_position(session)
        finally:
            session.close()
        if self._teacher is None or self.found.failure("d"):
            return
        if self.target.in_float32(self.settings) is not None and "b" in self._beside:
            beside = "b"  # its exact settings leave activations alone
        title += ", exact settings"
        if (session := self._opened("e", title, replace(self.settings, exact=True, threads=1))) is not None:
            try:
                self._step("e", title, session, beside=beside)
            finally:
                session.close()

    def _opened(self, letter: str, title: str, settings: SessionSettings) -> Session | None:
        self._advanced(title)
        try:
            return self.dissection.open(settings)
        except UnsupportedError as error:
            self.found.unchecked.append(f"it was not run: {one_line(error)}")
            self.found.steps[letter] = Step(letter, title, note=f"not checked: {one_line(error)}")
            return None
        except RUNTIME_ERRORS as error:
            self.found.steps[letter] = Step(letter, title, failure=one_line(error))
            return None

    def _finite(self, title: str, session: Session) -> None:
        """Without an original: does it compute numbers at all?"""
        failure = ""
        try:
            if not np.isfinite(session.logits(self._ids(session))).all():
                failure = "its logits are not finite"
        except RUNTIME_ERRORS as error:
            failure = one_line(error)
        note = "" if failure else "its logits are finite"
        self.found.steps["d"] = Step("d", title, failure=failure, note=note)

    def _ids(self, session: Session) -> list[int]:
        if self.text is not None:
            return list(self.text.items[0].ids[:STEPPED])
        return [int(token) for token in np.random.default_rng(0).integers(0, session.vocabulary, STEPPED)]

    def _token_by_token(self, session: Session) -> None:
        if not getattr(session, "stateful", True):
            return
        title, ids = f"{STEPPED} tokens one by one", self._ids(session)
        self._advanced(title)
        try:
            whole = session.logits(ids)
            session.reset()
            single = np.stack([session.step(token) for token in ids])
            apart = _mean([score_logits(single, text_window(tuple(ids)), whole)])
            self.found.steps["f"] = Step("f", title, apart=apart, beside="d")
        except RUNTIME_ERRORS as error:
            self.found.steps["f"] = Step("f", title, failure=one_line(error))

    def _by_position(self, session: Session) -> None:
        if self.model is None or self.long is None:
            return
        length = len(self.long.items[0].ids)
        title = f"the file in {self.target.title}, {len(self.long.items)} windows of {length:,} tokens"
        self._advanced(title)
        original = TorchSession(self.model)
        try:
            scores = []
            for window in self.long.items:
                scores.append(score_logits(session.logits(window.ids), window, original.logits(window.ids)))
                self._advanced(work=(1 + IN_TORCH) * length)
        except RUNTIME_ERRORS as error:
            self.found.steps["h"] = Step("h", title, note=f"not measured: {one_line(error)}")
            return
        curve = by_position([score.kl() for score in scores])
        self.found.curve = curve
        self.found.steps["h"] = Step("h", title, _mean(scores), note=f"along the text: {curve.trend}")

    def _compare_tokens(self, session: Session | None) -> None:
        if self.model is None or self.text is None or (tokenizer := self.model.tokenizer) is None:
            return
        title, words = "the tokenizer's ids", ""
        try:
            own, strings = self._encoder(session), self.dissection.strings(tokenizer)
            pairs = ((own(text), tokenizer(text, add_special_tokens=False)["input_ids"]) for text in strings)
            if (pair := next((pair for pair in pairs if pair[0] != list(pair[1])), None)) is not None:
                words = other_ids(*pair, tokenizer)
                ids = self.text.items[0].ids
                self.found.tokens_cost = self._tokens_cost(own(tokenizer.decode(ids)), ids)
            note = "" if words else f"the same on {len(strings)} strings"
        except KLLensError as error:
            note = f"not compared: {one_line(error)}"
        self.found.steps["g"] = Step("g", title, failure=words, note=note)

    def _encoder(self, session: Session | None) -> Callable[[str], list[int]]:
        """The file's own way to ids."""
        if isinstance(session, TokenizingSession):
            session.require_vocabulary()
            return session.tokenize
        return find_tokenizer(session, self.dissection.files[0]).encode

    def _tokens_cost(self, *ids: Sequence[int]) -> float | None:
        """What the original loses on a window of text if it is fed the file's ids, nats per token."""
        assert self._teacher is not None
        try:
            losses = [score_logits(self._teacher.logits(i), text_window(tuple(i))).nll for i in ids]
        except KLLensError:  # ids that the model does not have
            return None
        return max(losses[0] - losses[1], 0.0) / len(ids[1])

    # -- scores ----------------------------------------------------------------------------------------------

    def _step(self, letter: str, title: str, session: Session, *, beside: str = "", note: str = "") -> None:
        self._advanced(title)
        try:
            scores, apart = self._scores(session, self._beside.get(beside))
        except RUNTIME_ERRORS as error:
            self.found.steps[letter] = Step(letter, title, failure=one_line(error), note=note)
            return
        if isinstance(session, TorchSession):
            self._beside[letter] = session
        both = _mean(scores), _mean(apart) if apart else None
        self.found.steps[letter] = Step(letter, title, *both, beside=beside, note=note)

    def _scores(
        self, session: Session, other: Session | None = None, windows: int | None = None
    ) -> tuple[list[WindowScore], list[WindowScore]]:
        """From the original, and from another step."""
        assert self.text is not None
        assert self._teacher is not None
        scores, apart = [], []
        for window in self.text.items[:windows]:
            logits = session.logits(window.ids)
            scores.append(score_logits(logits, window, self._teacher.logits(window.ids)))
            if other is not None:
                apart.append(score_logits(logits, window, other.logits(window.ids)))
            self._advanced(work=len(window.ids) * (IN_TORCH if isinstance(session, TorchSession) else 1.0))
        return scores, apart

    def _few(self, values: Mapping[str, torch.Tensor], formats: Mapping[str, str] | None = None) -> float:
        try:
            session = self._session(values, formats)
            return _mean(self._scores(session, windows=RESTORED_WINDOWS)[0]).value
        except KLLensError:  # not finite
            return float("inf")


def expected_work(text: EvaluationText | None, long: EvaluationText | None) -> float:
    """In tokens that the runtime reads. The steps read the text about six times, and long windows once on each side."""
    short, longer = (sum(len(w.ids) for w in each.items) if each else 0 for each in (text, long))
    return 6 * short + (1 + IN_TORCH) * longer


def _by_kind(reports: Sequence[TensorReport]) -> dict[str, list[TensorReport]]:
    kinds: dict[str, list[TensorReport]] = {}
    for report in reports:
        kinds.setdefault(report.kind, []).append(report)
    return {f"all {kind}" if group[1:] else group[0].component: group for kind, group in kinds.items()}


def _carried(
    groups: Mapping[str, Sequence[TensorReport]],
    whole: float,
    without: Callable[[Sequence[TensorReport]], float],
) -> list[Restored]:
    """What is gained if these are exact; where nothing was finite before, everything."""
    gains = []
    for what, reports in groups.items():
        rest, types = without(reports), ", ".join(sorted({report.type for report in reports}))
        gain = whole - rest if math.isfinite(rest) else 0.0
        bits = 8 * sum(r.bytes for r in reports) / sum(8 * r.bytes / r.bits for r in reports)
        share = gain / whole if math.isfinite(gain) and whole else float(gain > 0)
        gains.append(Restored(what, types, gain, share, bits))
    return sorted(gains, key=lambda each: -each.kl)


def _excess(report: TensorReport) -> float:
    """Errors beyond rounding first, then large ones."""
    error = report.error or 0.0
    return error - (report.own_error or 0.0) + 1e-3 * error
