"""The chain of measurements: each step changes one thing, on the same windows of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import KLLensError, UnsupportedError, one_line
from kl_lens.evaluation import statistics
from kl_lens.evaluation.autopsy.findings import Autopsy, Restored, Step, TensorReport
from kl_lens.evaluation.autopsy.verdict import Evidence, judged
from kl_lens.evaluation.autopsy.weights import Weights, alone, examine
from kl_lens.evaluation.judged import REMEMBERED, RUNTIME_ERRORS
from kl_lens.evaluation.scoring import WindowScore, score_logits
from kl_lens.evaluation.texts import EvaluationText, TextWindow
from kl_lens.evaluation.torch_session import TorchSession
from kl_lens.positions import by_position
from kl_lens.recipes import Recipe
from kl_lens.records import Estimate
from kl_lens.sensitivity.perturbation import Kernels
from kl_lens.targets import Session, SessionSettings, Target
from kl_lens.targets.dissection import Dissection

STEPPED = 64  # tokens that are also fed one by one
RESTORED_WINDOWS = 2  # enough to see which part carries most of the loss
RESTORED_ALONE = 6  # components of the worst kind that are restored one by one
IN_TORCH = 0.5  # of the time that a runtime takes for a token, roughly
NEGLIGIBLE = 1e-4  # nats per token: nothing to look for


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
        parameters = dict(model.model.named_parameters(remove_duplicate=False))
        self._weights = [(parameters[n], v.to(parameters[n])) for n, v in values.items() if n in parameters]
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
    settings = SessionSettings(threads=threads)
    evidence = _Chain(dissection, target, model, text, long, settings, advanced).evidence()
    headline, findings = judged(evidence)
    return Autopsy(
        file=str(dissection.place), target=target.name, bytes=sum(path.stat().st_size for path in dissection.files),
        original="" if model is None else model.name, text="" if text is None else text.label,
        headline=headline, findings=findings, steps=tuple(evidence.steps[k] for k in sorted(evidence.steps)),
        restored=tuple(evidence.restored), tensors=tuple(evidence.reports), rounding_kl=evidence.rounding,
    )  # fmt: skip


class _Chain:
    def __init__(
        self,
        dissection: Dissection,
        target: Target,
        model: LoadedModel | None,
        text: EvaluationText | None,
        long: EvaluationText | None,
        settings: SessionSettings,
        advanced: Callable[[float, str], None],
    ) -> None:
        self.dissection, self.target, self.model, self.text = dissection, target, model, text
        self.long, self.settings, self._progress, self._title = long, settings, advanced, ""
        self.found = Evidence(target.title, target.exact_options)
        self.weights = Weights()
        self._teacher: TorchSession | None = None
        self._beside: dict[str, TorchSession] = {}  # letter → the session that later steps are compared with

    def _advanced(self, title: str = "", work: float = 0.0) -> None:
        """A step with this title begins, or so much of it was done."""
        self._title = title or self._title
        self._progress(work, self._title)

    def evidence(self) -> Evidence:
        self._advanced("reading its tensors")
        if self.model is None or self.text is None:
            self.found.reports = [alone(tensor) for tensor in self.dissection.tensors]
        else:
            self._compare(self.model)
        self._in_runtime()
        if self.found.rounds_too_much:
            self.found.inputs = self._rounded_inputs()
        return self.found

    # -- in PyTorch ------------------------------------------------------------------------------------------

    def _compare(self, model: LoadedModel) -> None:
        found, target = self.found, self.target
        self._teacher = TorchSession(model, remember=REMEMBERED)
        found.steps["a"] = Step("a", "the original in float32", Estimate(0.0, 0.0))
        try:
            found.disagreements = self.dissection.disagreements(model)
            self.weights = examine(self.dissection.parts(model), model, self.dissection.tensors)
        except UnsupportedError as error:
            found.notes = [f"Its weights are not compared: {error}"]
            found.reports = [alone(tensor) for tensor in self.dissection.tensors]
            return
        weights = self.weights
        found.reports, found.missing, found.left_out = weights.reports, weights.missing, weights.left_out
        left = f"without {', '.join(weights.left_out[:3])}" if weights.left_out else ""
        self._step("b", "the original with the file's weights", self._session(remember=REMEMBERED), note=left)
        formats = self._formats()
        recipes = {name: Recipe(fmt) for name, fmt in formats.items()}
        if self.dissection.usual_settings and target.models_activations(self.settings, recipes):
            deployed = self._session(formats=formats, remember=REMEMBERED)
            self._step("c", f"the same with {target.title}'s activations", deployed, beside="b")
        if (found.kl("b") or 0.0) > NEGLIGIBLE:
            plain = FileInTorch(model, weights.rounded)
            found.rounding = _mean(self._scores(plain)[0])
            self._advanced("restoring components")
            found.restored = self._restored_weights(model)

    def _session(
        self, without: Collection[str] = (), formats: Mapping[str, str] | None = None, remember: int = 0
    ) -> FileInTorch:
        """The file's weights, except those of some parameters; with `formats`, rounded activations."""
        assert self.model is not None
        held = {name: value for name, value in self.weights.held.items() if name not in without}
        return FileInTorch(self.model, held, formats, None if formats is None else self.target, remember)

    def _formats(self) -> dict[str, str]:
        """The types whose kernels' activations are known."""
        return {name: fmt for name, fmt in self.weights.formats.items() if fmt not in ("fp32", "bf16")}

    def _restored_weights(self, model: LoadedModel) -> list[Restored]:
        """What each kind of component carries of the loss, then components of the worst kind and odd ones alone."""
        changed = [r for r in self.weights.reports if r.component and (r.error or 0.0) > 1e-6]
        kinds = {r.kind: [each for each in changed if each.kind == r.kind] for r in changed}
        whole = self._few(self._session())
        names: dict[int, set[str]] = {}
        for name, parameter in model.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), set()).add(name)

        def gained(what: str, reports: Sequence[TensorReport]) -> Restored:
            weights = [model.anatomy.component(r.component).weight for r in reports]
            own = {name for weight in weights for name in names[id(model.model.get_parameter(weight))]}
            gain, share = _gain(whole, self._few(self._session(without=own)))
            bits = 8 * sum(r.bytes for r in reports) / sum(8 * r.bytes / r.bits for r in reports)
            return Restored(what, _types(reports), gain, share, bits)

        found = {
            kind: gained(f"all {kind}" if len(group) > 1 else group[0].component, group)
            for kind, group in kinds.items()
        }
        worst = max(found, key=lambda kind: found[kind].kl, default=None)
        alone = sorted(kinds[worst], key=_excess, reverse=True)[:RESTORED_ALONE] if worst is not None else []
        odd = [r for r in changed if r.problem][: 2 * RESTORED_ALONE]
        single = {r.component: r for r in (*alone, *odd) if len(kinds[r.kind]) > 1}
        everything = [*found.values(), *(gained(name, [report]) for name, report in single.items())]
        return sorted(everything, key=lambda each: -each.kl)

    def _rounded_inputs(self) -> list[Restored]:
        """What each kind of component loses by its rounded inputs."""
        assert self.model is not None
        formats = self._formats()
        kinds = {name: self.model.anatomy.component(name).kind for name in formats}
        whole = self._few(self._session(formats=formats))
        gains = []
        for kind in dict.fromkeys(kinds.values()):
            rest = {name: fmt for name, fmt in formats.items() if kinds[name] != kind}
            gain, share = _gain(whole, self._few(self._session(formats=rest)))
            types = _types([r for r in self.weights.reports if r.kind == kind])
            gains.append(Restored(f"all {kind}", types, gain, share))
        return sorted(gains, key=lambda each: -each.kl)

    # -- in the runtime --------------------------------------------------------------------------------------

    def _in_runtime(self) -> None:
        title = f"the file in {self.target.title}"
        beside = next((letter for letter in "cb" if letter in self._beside), "")
        if (session := self._opened("d", title, self.settings)) is None:
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
        self.found.steps["d"] = Step(
            "d", title, failure=failure, note="" if failure else "its logits are finite"
        )

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
            apart = _mean([score_logits(single, TextWindow(tuple(ids), 1, 0, ""), whole)])
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

    def _compare_tokens(self, session: Session) -> None:
        if self.model is None or self.model.tokenizer is None:
            return
        title = "the tokenizer's ids"
        try:
            text = self.dissection.other_tokens(session, self.model.tokenizer)
        except KLLensError as error:
            self.found.steps["g"] = Step("g", title, note=f"not compared: {one_line(error)}")
            return
        words = "" if text is None else f"differ on {text[:60]!r}"
        self.found.steps["g"] = Step(
            "g", title, failure=words, note="" if words else "the same on 300 strings"
        )

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

    def _few(self, session: TorchSession) -> float:
        try:
            return _mean(self._scores(session, windows=RESTORED_WINDOWS)[0]).value
        except KLLensError:  # not finite
            return float("inf")


def expected_work(text: EvaluationText | None, long: EvaluationText | None) -> float:
    """In tokens that the runtime reads. The steps read the text about six times, and long windows once on each side."""
    short, longer = (sum(len(w.ids) for w in each.items) if each else 0 for each in (text, long))
    return 6 * short + (1 + IN_TORCH) * longer


def _mean(scores: Sequence[WindowScore]) -> Estimate:
    sums = np.array([float(score.kl().sum(dtype=float)) for score in scores])
    return statistics.ratio(sums, np.array([float(score.targets) for score in scores]))


def _gain(whole: float, rest: float) -> tuple[float, float]:
    """What was gained, and its share; where nothing was finite before, everything."""
    if not math.isfinite(whole):
        return (whole, 1.0) if math.isfinite(rest) else (0.0, 0.0)
    return whole - rest, (whole - rest) / whole if whole else 0.0


def _types(reports: Sequence[TensorReport]) -> str:
    return ", ".join(sorted({report.type for report in reports}))


def _excess(report: TensorReport) -> float:
    """Errors beyond rounding first, then large ones."""
    error = report.error or 0.0
    return error - (report.own_error or 0.0) + 1e-3 * error
