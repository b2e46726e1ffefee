"""The chain of measurements: each step changes one thing, on the same windows of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kl_lens.autopsy.verdict import Evidence, listed
from kl_lens.autopsy.weights import alone, examine, together
from kl_lens.base.errors import KLLensError, UnsupportedError, one_line
from kl_lens.base.progress import Progress
from kl_lens.base.system import DEFAULT_MEMORY
from kl_lens.judging.judged import RUNTIME_ERRORS
from kl_lens.judging.scoring import score_logits
from kl_lens.judging.texts import EvaluationText, text_window
from kl_lens.judging.torch_session import TorchSession
from kl_lens.model import LoadedModel
from kl_lens.run.autopsies import Autopsy, Restored, Step, TensorReport
from kl_lens.run.readings import NLL, Reading, mean_kl
from kl_lens.run.records import Estimate
from kl_lens.targets import Session, SessionSettings, Target
from kl_lens.targets.dissection import VOCABULARY, Disagreement, Dissection
from kl_lens.targets.session import TokenizingSession
from kl_lens.targets.tokenizer import find_tokenizer, other_ids
from kl_lens.weights.recipes import Recipe

STEPPED = 64  # tokens that are also fed one by one
RESTORED_WINDOWS = 2  # enough to see which part carries most of the loss
NEGLIGIBLE = 1e-4  # nats per token: nothing to look for
MOST_GROUPS = 24  # of damaged tensors whose cost is measured


def perform_autopsy(
    dissection: Dissection,
    target: Target,
    model: LoadedModel | None = None,
    text: EvaluationText | None = None,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Autopsy:
    """Looks at a file, and compares it with the original if that is given with a text. `threads`: of the runtime."""
    evidence = Evidence(
        target.title, target.exact_options, "" if model is None else model.name
    )
    evidence.changed = dissection.changed()
    settings = SessionSettings(threads=threads)
    title = f"the file in {target.title}"
    if model is not None and text is not None:
        _Comparison(
            model, text, dissection, target, settings, evidence, progress or Progress()
        ).perform(title)
    else:
        evidence.weights.reports = [alone(tensor) for tensor in dissection.tensors]
        evidence.damage = [(group, None) for group in together(evidence.weights.reports)]
        with _step(evidence, "d", title), closing(dissection.open(settings)) as session:
            window = text_window(
                tuple(token % session.vocabulary for token in range(STEPPED))
            )
            score_logits(
                session.logits(window.ids), window
            )  # raises if they are not finite
            evidence.steps["d"] = Step("d", title, note="its logits are finite")
            _one_by_one(evidence, session, window.ids)
    headline, findings = evidence.judged()
    return Autopsy(
        file=str(dissection.path),
        target=target.name,
        bytes=sum(path.stat().st_size for path in dissection.files),
        original=evidence.original,
        text="" if text is None else text.label,
        headline=headline,
        findings=findings,
        steps=tuple(evidence.steps[k] for k in sorted(evidence.steps)),
        restored=tuple(evidence.restored),
        tensors=tuple(evidence.weights.reports),
        rounding_kl=evidence.rounding,
        unchecked=tuple(evidence.unchecked),
    )


@contextmanager
def _step(evidence: Evidence, letter: str, title: str) -> Iterator[None]:
    """A step of the chain; if it fails, it says why."""
    try:
        yield
    except UnsupportedError as error:
        evidence.unchecked.append(f"it was not run: {one_line(error)}")
        evidence.steps[letter] = Step(
            letter, title, note=f"not checked: {one_line(error)}"
        )
    except RUNTIME_ERRORS as error:
        evidence.steps[letter] = Step(letter, title, failure=one_line(error))


def _one_by_one(evidence: Evidence, session: Session, ids: Sequence[int]) -> None:
    """A prompt at once beside the same tokens one by one."""
    title = f"{STEPPED} tokens one by one"
    window = text_window(tuple(map(int, ids[:STEPPED])))
    with _step(evidence, "f", title):
        whole = session.logits(window.ids)
        session.reset()
        single = np.stack([session.step(token) for token in window.ids])
        apart = mean_kl([score_logits(single, window, whole)])
        evidence.steps["f"] = Step("f", title, apart=apart, beside="d")


@dataclass
class _Comparison:
    """The file beside the original."""

    model: LoadedModel
    text: EvaluationText
    dissection: Dissection
    target: Target
    settings: SessionSettings
    evidence: Evidence
    progress: Progress

    def __post_init__(self) -> None:
        self.recipes: dict[
            str, Recipe
        ] = {}  # of components whose kernels' activations are known
        self._teacher = TorchSession(self.model, memory_budget=DEFAULT_MEMORY)
        self._beside: dict[
            str, TorchSession
        ] = {}  # letter → the session that later steps are compared with

    def perform(self, title: str) -> None:
        """`title`: of the file in its runtime."""
        evidence = self.evidence
        evidence.steps["a"] = Step("a", "the original in float32", Estimate(0.0, 0.0))
        self.progress.started(4.0 * len(self.text.items), 0.0)
        self.progress.advanced(0.0, "reading its tensors")
        self._in_pytorch()
        session = None
        with _step(evidence, "d", title):
            session = self.dissection.open(self.settings)
        with nullcontext() if session is None else closing(session):
            if session is not None:
                self._step("d", title, session, beside=self._latest())
                if not evidence.failure("d"):
                    _one_by_one(evidence, session, self.text.items[0].ids)
            self._compare_tokens(session)
        if session is not None and not evidence.failure("d"):
            # Where exact settings leave activations alone, they should give what the weights alone give.
            plain = (
                self.target.in_float32(self.settings) is not None and "b" in self._beside
            )
            title = f"{title}, exact settings"
            settings = replace(self.settings, exact=True, threads=1)
            with (
                _step(evidence, "e", title),
                closing(self.dissection.open(settings)) as exact,
            ):
                self._step("e", title, exact, beside="b" if plain else self._latest())
        groups = together(evidence.weights.reports)
        if "b" in evidence.steps and (groups or (evidence.kl("b") or 0.0) > NEGLIGIBLE):
            self._restore(groups)
        if evidence.rounds_too_much:
            evidence.inputs = self._rounded_inputs()
        weights = evidence.weights
        apart = evidence.apart(evidence.decides)
        if weights.uncompared and not evidence.decides:
            names = listed(weights.uncompared)
            evidence.unchecked.append(
                f"the file holds nothing that could be compared with {names}"
            )
        if weights.left_out and not evidence.damage and apart is not None:
            names = listed(weights.left_out)
            evidence.unchecked.append(
                f"its KL of {apart:.3g} from PyTorch, which has no place for {names}"
            )

    def _in_pytorch(self) -> None:
        """Settings, every tensor, and the original with the file's weights."""
        evidence = self.evidence
        dissection = self.dissection
        model = self.model
        try:
            evidence.disagreements += dissection.tokenizer(model)
        except KLLensError as error:
            words = one_line(error)
            advice = "copy the original's files"
            evidence.disagreements.append(
                Disagreement("tokenizer", words, advice, about=VOCABULARY)
            )
        try:
            evidence.disagreements += dissection.settings(model)
            evidence.weights = weights = examine(
                dissection.parts(model), model, dissection.tensors
            )
        except UnsupportedError as error:
            evidence.unchecked.append(f"its weights were not compared: {one_line(error)}")
            evidence.weights.reports = [alone(tensor) for tensor in dissection.tensors]
            return
        formats = weights.formats.items()
        exact = ("fp32", "bf16")
        self.recipes = {name: Recipe(fmt) for name, fmt in formats if fmt not in exact}
        modelled = self.target.models_activations(self.settings, self.recipes)
        kinds = {report.kind for report in weights.reports}
        restored = 3.0 + len(kinds) + len(together(weights.reports))
        work = 4.0 * len(self.text.items) + RESTORED_WINDOWS * restored
        self.progress.started(work, 0.0)
        without = [*weights.left_out, *weights.uncompared]
        note = f"without {listed(without)}" if without else ""
        file = self._session(weights.stored, memory_budget=DEFAULT_MEMORY)
        self._step("b", "the original with the file's weights", file, note=note)
        if dissection.usual_settings and modelled:
            title = f"the same with {self.target.title}'s activations"
            recipes = self.recipes
            deployed = self._session(weights.stored, recipes, DEFAULT_MEMORY)
            self._step("c", title, deployed, beside="b")

    def _compare_tokens(self, session: Session | None) -> None:
        """The file's ids of many strings beside the original's, and what the original loses if it is fed the file's."""
        if (tokenizer := self.model.tokenizer) is None:
            return
        words = ""
        try:
            if isinstance(session, TokenizingSession):  # the file's own way to ids
                encode = session.tokenizer().encode
            else:
                encode = find_tokenizer(session, self.dissection.files[0]).encode
            strings = self.dissection.strings(tokenizer)
            note = f"the same on {len(strings)} strings"
            for text in strings:
                expected = tokenizer(text, add_special_tokens=False)["input_ids"]
                if (actual := encode(text)) != list(expected):
                    words = other_ids(actual, expected, tokenizer)
                    note = ""
                    with suppress(KLLensError):  # ids that the model does not have
                        self.evidence.tokens_cost = self._cost_of_ids(encode, tokenizer)
                    break
        except KLLensError as error:
            note = f"not compared: {one_line(error)}"
        self.evidence.steps["g"] = Step(
            "g", "the tokenizer's ids", failure=words, note=note
        )

    def _cost_of_ids(self, encode: Callable[[str], list[int]], tokenizer: Any) -> float:
        """What the original loses per token if it is fed the file's ids of the text."""
        ids = self.text.items[0].ids
        begins = 0 if self.text.windows.bos is None else 1
        actual = (*ids[:begins], *encode(tokenizer.decode(ids[begins:])))

        def loss(window: tuple[int, ...]) -> float:
            logits = self._teacher.logits(window)
            return score_logits(logits, text_window(window)).sums[NLL]

        return max(loss(actual) - loss(ids), 0.0) / len(ids)

    def _restore(self, groups: Sequence[Sequence[TensorReport]]) -> None:
        """What each fault costs in a file that is otherwise sound, so that none hides behind another; then what kinds
        of component carry of the loss of sound weights."""
        evidence = self.evidence
        weights = self.evidence.weights
        parameter_of = {
            report.name: weights.parameters.get(report.name, "")
            for report in weights.reports
        }

        def stored(reports: Sequence[TensorReport]) -> set[str]:
            return {parameter_of[report.name] for report in reports}

        odd = stored([report for group in groups for report in group])
        rounded = {name: weights.rounded[name] for name in odd & weights.rounded.keys()}
        sound = weights.stored | rounded
        session = self._session(weights.rounded)
        evidence.rounding = mean_kl(self._scores(session, "plain rounding")[0])
        whole = self._few(sound)

        def cost(group: Sequence[TensorReport]) -> float | None:
            names = stored(group)
            if not names <= weights.stored.keys():
                return None
            damaged = {name: weights.stored[name] for name in names}
            value = self._few(sound | damaged) - whole
            return max(value, 0.0) if math.isfinite(value) else None

        def without(reports: Sequence[TensorReport]) -> float:
            names = stored(reports)
            return self._few({n: value for n, value in sound.items() if n not in names})

        evidence.damage = [
            (group, cost(group) if index < MOST_GROUPS else None)
            for index, group in enumerate(groups)
        ]
        evidence.damaged_by = self._few(weights.stored) - whole
        changed = [r for r in weights.reports if r.component and (r.error or 0.0) > 1e-6]
        evidence.restored = _carried(changed, whole, without)

    def _rounded_inputs(self) -> list[Restored]:
        """What each kind of component loses by its rounded inputs."""
        weights = self.evidence.weights
        recipes = self.recipes

        def without(reports: Sequence[TensorReport]) -> float:
            inexact = recipes.keys() - {report.component for report in reports}
            return self._few(weights.stored, {name: recipes[name] for name in inexact})

        rounded = [report for report in weights.reports if report.component in recipes]
        return _carried(rounded, self._few(weights.stored, recipes), without)

    # -- scores ----------------------------------------------------------------------------------------------

    def _session(
        self,
        values: Mapping[str, torch.Tensor],
        recipes: Mapping[str, Recipe] | None = None,
        memory_budget: int = 0,
    ) -> TorchSession:
        """The original with other values; with `recipes`, also with the activations of their kernels."""
        deployed = None if recipes is None else self.target
        return TorchSession(
            self.model,
            recipes,
            deployed=deployed,
            memory_budget=memory_budget,
            values=values,
        )

    def _latest(self) -> str:
        """The step that the file in its runtime should equal."""
        return next((letter for letter in "cb" if letter in self._beside), "")

    def _step(
        self,
        letter: str,
        title: str,
        session: Session,
        *,
        beside: str = "",
        note: str = "",
    ) -> None:
        with _step(self.evidence, letter, title):
            scores, apart = self._scores(session, title, self._beside.get(beside))
            if isinstance(session, TorchSession):
                self._beside[letter] = session
            step = Step(letter, title, mean_kl(scores), beside=beside, note=note)
            step = replace(step, apart=mean_kl(apart) if apart else None)
            self.evidence.steps[letter] = step

    def _scores(
        self,
        session: Session,
        title: str,
        comparison: Session | None = None,
        windows: int | None = None,
    ) -> tuple[list[Reading], list[Reading]]:
        """From the original, and from another step."""
        scores = []
        apart = []
        for window in self.text.items[:windows]:
            logits = session.logits(window.ids)
            scores.append(score_logits(logits, window, self._teacher.logits(window.ids)))
            if comparison is not None:
                apart.append(score_logits(logits, window, comparison.logits(window.ids)))
            self.progress.advanced(1.0, title)
        return scores, apart

    def _few(
        self,
        values: Mapping[str, torch.Tensor],
        recipes: Mapping[str, Recipe] | None = None,
    ) -> float:
        try:
            session = self._session(values, recipes)
            title = "restoring components"
            return mean_kl(
                self._scores(session, title, windows=RESTORED_WINDOWS)[0]
            ).value
        except KLLensError:  # not finite
            return float("inf")


def _carried(
    reports: Sequence[TensorReport],
    whole: float,
    without: Callable[[Sequence[TensorReport]], float],
) -> list[Restored]:
    """What is gained if each kind is exact; where nothing was finite before, everything."""
    kinds: dict[str, list[TensorReport]] = {}
    for report in reports:
        kinds.setdefault(report.kind, []).append(report)
    gains = []
    for kind, group in kinds.items():
        remaining = without(group)
        gain = whole - remaining if math.isfinite(remaining) else 0.0
        share = gain / whole if math.isfinite(gain) and whole else float(gain > 0)
        types = ", ".join(sorted({report.type for report in group}))
        bits = 8 * sum(r.bytes for r in group) / sum(8 * r.bytes / r.bits for r in group)
        name = f"all {kind}" if group[1:] else group[0].component
        gains.append(Restored(name, types, gain, share, bits))
    return sorted(gains, key=lambda part: -part.kl)
