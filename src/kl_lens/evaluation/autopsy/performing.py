"""The chain of measurements: each step changes one thing, on the same windows of text."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from kl_lens.base.errors import KLLensError, UnsupportedError, one_line
from kl_lens.evaluation.autopsy.findings import Autopsy, Restored, Step, TensorReport
from kl_lens.evaluation.autopsy.verdict import Evidence, listed
from kl_lens.evaluation.autopsy.weights import alone, examine, together
from kl_lens.evaluation.judged import REMEMBERED, RUNTIME_ERRORS
from kl_lens.evaluation.scoring import WindowScore, mean_kl, score_logits
from kl_lens.evaluation.texts import EvaluationText, Window, text_window
from kl_lens.evaluation.torch_session import TorchSession
from kl_lens.measuring.sweep import Progress
from kl_lens.model import LoadedModel
from kl_lens.run.positions import by_position
from kl_lens.run.records import Estimate
from kl_lens.targets import Session, SessionSettings, Target
from kl_lens.targets.dissection import VOCABULARY, Disagreement, Dissection
from kl_lens.targets.session import Logits, TokenizingSession
from kl_lens.targets.tokenizer import find_tokenizer
from kl_lens.targets.varied_text import other_ids
from kl_lens.weights.recipes import Recipe

STEPPED = 64  # tokens that are also fed one by one
RESTORED_WINDOWS = 2  # enough to see which part carries most of the loss
RESTORED_ALONE = 6  # components of the worst kind that are restored one by one
NEGLIGIBLE = 1e-4  # nats per token: nothing to look for
MOST_GROUPS = 24  # of damaged tensors whose cost is measured
# What computes, for the forecast. Until it was seen it is taken to be like the last word of its name.
TORCH, RUNTIME, EXACT, LONG = "torch", "runtime", "exact runtime", "long "
_UNSEEN = 2.0  # times PyTorch's seconds for a token: a runtime that was not seen yet


def perform_autopsy(
    dissection: Dissection,
    target: Target,
    model: LoadedModel | None = None,
    text: EvaluationText | None = None,
    *,
    long: EvaluationText | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Autopsy:
    """Looks at a file, and compares it with the original if that is given.

    Args:
        long: longer windows of text, to see whether the loss grows along them.
        threads: of the runtime.
    """
    settings = SessionSettings(threads=threads)
    evidence = _Chain(dissection, target, model, text, long, settings, progress or Progress()).evidence()
    headline, findings = evidence.judged()
    return Autopsy(
        file=str(dissection.place), target=target.name, bytes=sum(path.stat().st_size for path in dissection.files),
        original=evidence.original, text="" if text is None else text.label, headline=headline, findings=findings,
        steps=tuple(evidence.steps[k] for k in sorted(evidence.steps)), restored=tuple(evidence.restored),
        tensors=tuple(evidence.weights.reports), rounding_kl=evidence.rounding, unchecked=tuple(evidence.unchecked),
    )  # fmt: skip


class _Pace:
    """Says how many seconds are left: the tokens to come, at the pace that was seen of what computes them."""

    def __init__(self, progress: Progress) -> None:
        self.to_come: Counter[str] = Counter()  # what computes → tokens
        self.title = ""
        self._progress, self._done, self._last = progress, 0.0, time.monotonic()
        self._seen: dict[str, float] = {}  # seconds for a token

    def begins(self, title: str) -> None:
        self.title = title
        self._progress.advanced(0.0, title)

    def computed(self, session: Session, ids: Sequence[int], what: str) -> Logits:
        begin = time.monotonic()
        logits = session.logits(ids)
        now = time.monotonic()
        self._seen[what] = (now - begin) / len(ids)
        self.to_come[what] = max(0, self.to_come[what] - len(ids))
        self._done += now - self._last
        self._progress.advanced(now - self._last, self.title)
        self._last = now
        left = sum(tokens * self._for_a_token(each) for each, tokens in self.to_come.items())
        self._progress.started(self._done + left, self._done)
        return logits

    def _for_a_token(self, what: str) -> float:
        seen = self._seen.get(what) or self._seen.get(what.split()[-1])
        return seen or _UNSEEN * self._seen.get(TORCH, 0.0)


class _Chain:
    def __init__(
        self, dissection: Dissection, target: Target, model: LoadedModel | None, text: EvaluationText | None,
        long: EvaluationText | None, settings: SessionSettings, progress: Progress,
    ) -> None:  # fmt: skip
        self.dissection, self.target, self.model, self.text = dissection, target, model, text
        self.long, self.settings, self.pace = long, settings, _Pace(progress)
        self.found = Evidence(target.title, target.exact_options, "" if model is None else model.name)
        self.recipes: dict[str, Recipe] = {}  # of components whose kernels' activations are known
        self._teacher: TorchSession | None = None
        self._beside: dict[str, TorchSession] = {}  # letter → the session that later steps are compared with

    def evidence(self) -> Evidence:
        self.pace.begins("reading its tensors")
        found, found.changed = self.found, self.dissection.changed()
        if self.model is None or self.text is None:
            found.weights.reports = [alone(tensor) for tensor in self.dissection.tensors]
            found.damage = [(group, None) for group in together(found.weights.reports)]
        else:
            self._compare(self.model, self.text)
        self._in_runtime()
        groups = together(found.weights.reports)
        if "b" in found.steps and (groups or (found.kl("b") or 0.0) > NEGLIGIBLE):
            self.pace.begins("restoring components")
            self._restore(groups)
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

    def _compare(self, model: LoadedModel, text: EvaluationText) -> None:
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
        formats = weights.formats.items()
        self.recipes = {name: Recipe(fmt) for name, fmt in formats if fmt not in ("fp32", "bf16")}
        rounds = dissection.usual_settings and self.target.models_activations(self.settings, self.recipes)
        self._expect(text, 2 + rounds)
        without = [*weights.left_out, *weights.uncompared]
        note = f"without {listed(without)}" if without else ""
        file = self._session(weights.held, remember=REMEMBERED)
        self._step("b", "the original with the file's weights", file, TORCH, note=note)
        if rounds:
            deployed = self._session(weights.held, self.recipes, remember=REMEMBERED)
            title = f"the same with {self.target.title}'s activations"
            self._step("c", title, deployed, TORCH, beside="b")

    def _expect(self, text: EvaluationText, passes: int) -> None:
        """What is to come, in tokens. `passes`: of PyTorch over the whole text."""
        whole, few = (sum(len(w.ids) for w in text.items[:count]) for count in (None, RESTORED_WINDOWS))
        reports = self.found.weights.reports
        groups, kinds = len(together(reports)), len({report.kind for report in reports})
        parts = 2 + min(groups, MOST_GROUPS) + kinds + RESTORED_ALONE
        self.pace.to_come.update({TORCH: passes * whole + parts * few, RUNTIME: whole, EXACT: whole})
        length = sum(len(window.ids) for window in self.long.items) if self.long else 0
        self.pace.to_come.update({LONG + TORCH: length, LONG + RUNTIME: length})

    def _restore(self, groups: Sequence[Sequence[TensorReport]]) -> None:
        """What each fault costs in a file that is otherwise sound, so that none hides behind another; then what kinds
        of component carry of the loss of sound weights, and the components of the worst kind."""
        found, weights = self.found, self.found.weights
        held = {report.name: weights.parameters.get(report.name, "") for report in weights.reports}
        odd = {held[report.name] for group in groups for report in group} & weights.rounded.keys()
        sound = weights.held | {name: weights.rounded[name] for name in odd}
        found.rounding = mean_kl(self._scores(self._session(weights.rounded), TORCH)[0])
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
        kinds = _by_kind([r for r in weights.reports if r.component and (r.error or 0.0) > 1e-6])
        found.restored = _carried(kinds, whole, without)
        worst = kinds[found.restored[0].what] if found.restored else []
        single = {r.component: [r] for r in sorted(worst, key=_excess)[-RESTORED_ALONE:] if worst[1:]}
        everything = [*found.restored, *_carried(single, whole, without)]
        found.restored = sorted(everything, key=lambda each: -each.kl)

    def _session(
        self,
        values: Mapping[str, torch.Tensor],
        recipes: Mapping[str, Recipe] | None = None,
        remember: int = 0,
    ) -> TorchSession:
        """The original with other values; with `recipes`, also with the activations of their kernels."""
        assert self.model is not None
        deployed = None if recipes is None else self.target
        return TorchSession(self.model, recipes, deployed=deployed, remember=remember, values=values)

    def _rounded_inputs(self) -> list[Restored]:
        """What each kind of component loses by its rounded inputs."""
        weights, recipes = self.found.weights, self.recipes

        def without(reports: Sequence[TensorReport]) -> float:
            names = {report.component for report in reports}
            return self._few(
                weights.held, {name: each for name, each in recipes.items() if name not in names}
            )

        kinds = _by_kind([report for report in weights.reports if report.component in recipes])
        return _carried(kinds, self._few(weights.held, recipes), without)

    # -- in the runtime --------------------------------------------------------------------------------------

    def _in_runtime(self) -> None:
        title = f"the file in {self.target.title}"
        beside = next((letter for letter in "cb" if letter in self._beside), "")
        with self._opened("d", title, self.settings) as session:
            if session is not None:
                self._runs(title, session, beside)
            self._compare_tokens(session)
            if session is not None and not self.found.failure("d"):
                self._by_position(session)
        if self._teacher is None or session is None or self.found.failure("d"):
            return
        if self.target.in_float32(self.settings) is not None and "b" in self._beside:
            beside = "b"  # its exact settings leave activations alone
        title += ", exact settings"
        with self._opened("e", title, replace(self.settings, exact=True, threads=1)) as session:
            if session is not None:
                self._step("e", title, session, EXACT, beside=beside)

    @contextmanager
    def _opened(self, letter: str, title: str, settings: SessionSettings) -> Iterator[Session | None]:
        """None if it cannot be opened; the step says why."""
        session = None
        with self._begun(letter, title):
            try:
                session = self.dissection.open(settings)
            except UnsupportedError as error:
                self.found.unchecked.append(f"it was not run: {one_line(error)}")
                self.found.steps[letter] = Step(letter, title, note=f"not checked: {one_line(error)}")
        with nullcontext() if session is None else closing(session):
            yield session

    def _runs(self, title: str, session: Session, beside: str) -> None:
        """All at once, beside the original or alone; then token by token."""
        ids = self.text.items[0].ids if self.text is not None else np.arange(STEPPED) % session.vocabulary
        window = text_window(tuple(int(token) for token in ids[:STEPPED]))
        if self._teacher is not None:
            self._step("d", title, session, RUNTIME, beside=beside)
        else:
            with self._begun("d", title):
                score_logits(session.logits(window.ids), window)  # raises if they are not finite
                self.found.steps["d"] = Step("d", title, note="its logits are finite")
        if self.found.failure("d") or not getattr(session, "stateful", True):
            return
        title = f"{STEPPED} tokens one by one"
        with self._begun("f", title):
            whole = session.logits(window.ids)
            session.reset()
            single = np.stack([session.step(token) for token in window.ids])
            apart = mean_kl([score_logits(single, window, whole)])
            self.found.steps["f"] = Step("f", title, apart=apart, beside="d")

    def _by_position(self, session: Session) -> None:
        if self.model is None or self.long is None:
            return
        windows, original = self.long.items, TorchSession(self.model)
        title = f"the file in {self.target.title}, {len(windows)} windows of {len(windows[0].ids):,} tokens"

        def score(window: Window) -> WindowScore:
            own = self.pace.computed(session, window.ids, LONG + RUNTIME)
            return score_logits(own, window, self.pace.computed(original, window.ids, LONG + TORCH))

        with self._begun("h", title):
            scores = [score(window) for window in windows]
            self.found.curve = curve = by_position([score.kl() for score in scores])
            self.found.steps["h"] = Step("h", title, mean_kl(scores), note=f"along the text: {curve.trend}")

    def _compare_tokens(self, session: Session | None) -> None:
        if self.model is None or self.text is None or (tokenizer := self.model.tokenizer) is None:
            return
        title, words = "the tokenizer's ids", ""
        try:
            if isinstance(session, TokenizingSession):  # the file's own way to ids
                session.require_vocabulary()
                own: Callable[[str], list[int]] = session.tokenize
            else:
                own = find_tokenizer(session, self.dissection.files[0]).encode
            strings = self.dissection.strings(tokenizer)
            pairs = ((own(text), tokenizer(text, add_special_tokens=False)["input_ids"]) for text in strings)
            if (pair := next((pair for pair in pairs if pair[0] != list(pair[1])), None)) is not None:
                words = other_ids(*pair, tokenizer)
                ids = self.text.items[0].ids
                self.found.tokens_cost = self._tokens_cost(own(tokenizer.decode(ids)), ids)
            note = "" if words else f"the same on {len(strings)} strings"
        except KLLensError as error:
            note = f"not compared: {one_line(error)}"
        self.found.steps["g"] = Step("g", title, failure=words, note=note)

    def _tokens_cost(self, *ids: Sequence[int]) -> float | None:
        """What the original loses on a window of text if it is fed the file's ids, nats per token."""
        assert self._teacher is not None
        try:
            losses = [score_logits(self._teacher.logits(i), text_window(tuple(i))).nll for i in ids]
        except KLLensError:  # ids that the model does not have
            return None
        return max(losses[0] - losses[1], 0.0) / len(ids[1])

    # -- scores ----------------------------------------------------------------------------------------------

    @contextmanager
    def _begun(self, letter: str, title: str) -> Iterator[None]:
        """A step; if it fails, it says why."""
        self.pace.begins(title)
        try:
            yield
        except RUNTIME_ERRORS as error:
            self.found.steps[letter] = Step(letter, title, failure=one_line(error))

    def _step(
        self, letter: str, title: str, session: Session, what: str, *, beside: str = "", note: str = ""
    ) -> None:
        with self._begun(letter, title):
            scores, apart = self._scores(session, what, self._beside.get(beside))
            if isinstance(session, TorchSession):
                self._beside[letter] = session
            both = mean_kl(scores), mean_kl(apart) if apart else None
            self.found.steps[letter] = Step(letter, title, *both, beside=beside, note=note)

    def _scores(
        self, session: Session, what: str, other: Session | None = None, windows: int | None = None
    ) -> tuple[list[WindowScore], list[WindowScore]]:
        """From the original, and from another step."""
        assert self.text is not None
        assert self._teacher is not None
        scores, apart = [], []
        for window in self.text.items[:windows]:
            logits = self.pace.computed(session, window.ids, what)
            scores.append(score_logits(logits, window, self._teacher.logits(window.ids)))
            if other is not None:
                apart.append(score_logits(logits, window, other.logits(window.ids)))
        return scores, apart

    def _few(self, values: Mapping[str, torch.Tensor], recipes: Mapping[str, Recipe] | None = None) -> float:
        try:
            session = self._session(values, recipes)
            return mean_kl(self._scores(session, TORCH, windows=RESTORED_WINDOWS)[0]).value
        except KLLensError:  # not finite
            return float("inf")


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
