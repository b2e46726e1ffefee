"""The chain of measurements: each step changes one thing, on the same windows of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from kl_lens.autopsy.verdict import Evidence, listed
from kl_lens.autopsy.weights import alone, examine, together
from kl_lens.base.errors import KLLensError, UnsupportedError, one_line
from kl_lens.base.progress import Progress
from kl_lens.judging.judged import REMEMBERED, RUNTIME_ERRORS
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
    found = Evidence(
        target.title, target.exact_options, "" if model is None else model.name
    )
    found.changed = dissection.changed()
    settings = SessionSettings(threads=threads)
    title = f"the file in {target.title}"
    if model is not None and text is not None:
        _Comparison(
            model, text, dissection, target, settings, found, progress or Progress()
        ).perform(title)
    else:
        found.weights.reports = [alone(tensor) for tensor in dissection.tensors]
        found.damage = [(group, None) for group in together(found.weights.reports)]
        with _step(found, "d", title), closing(dissection.open(settings)) as session:
            window = text_window(
                tuple(token % session.vocabulary for token in range(STEPPED))
            )
            score_logits(
                session.logits(window.ids), window
            )  # raises if they are not finite
            found.steps["d"] = Step("d", title, note="its logits are finite")
            _one_by_one(found, session, window.ids)
    headline, findings = found.judged()
    return Autopsy(
        file=str(dissection.path),
        target=target.name,
        bytes=sum(path.stat().st_size for path in dissection.files),
        original=found.original,
        text="" if text is None else text.label,
        headline=headline,
        findings=findings,
        steps=tuple(found.steps[k] for k in sorted(found.steps)),
        restored=tuple(found.restored),
        tensors=tuple(found.weights.reports),
        rounding_kl=found.rounding,
        unchecked=tuple(found.unchecked),
    )


@contextmanager
def _step(found: Evidence, letter: str, title: str) -> Iterator[None]:
    """A step of the chain; if it fails, it says why."""
    try:
        yield
    except UnsupportedError as error:
        found.unchecked.append(f"it was not run: {one_line(error)}")
        found.steps[letter] = Step(letter, title, note=f"not checked: {one_line(error)}")
    except RUNTIME_ERRORS as error:
        found.steps[letter] = Step(letter, title, failure=one_line(error))


def _one_by_one(found: Evidence, session: Session, ids: Sequence[int]) -> None:
    """A prompt at once beside the same tokens one by one."""
    if not getattr(session, "stateful", True):
        return
    title = f"{STEPPED} tokens one by one"
    window = text_window(tuple(map(int, ids[:STEPPED])))
    with _step(found, "f", title):
        whole = session.logits(window.ids)
        session.reset()
        single = np.stack([session.step(token) for token in window.ids])
        apart = mean_kl([score_logits(single, window, whole)])
        found.steps["f"] = Step("f", title, apart=apart, beside="d")


@dataclass
class _Comparison:
    """The file beside the original."""

    model: LoadedModel
    text: EvaluationText
    dissection: Dissection
    target: Target
    settings: SessionSettings
    found: Evidence
    progress: Progress

    def __post_init__(self) -> None:
        self.recipes: dict[
            str, Recipe
        ] = {}  # of components whose kernels' activations are known
        self._teacher = TorchSession(self.model, remember=REMEMBERED)
        self._beside: dict[
            str, TorchSession
        ] = {}  # letter → the session that later steps are compared with

    def perform(self, title: str) -> None:
        """`title`: of the file in its runtime."""
        found = self.found
        found.steps["a"] = Step("a", "the original in float32", Estimate(0.0, 0.0))
        self.progress.started(4.0 * len(self.text.items), 0.0)
        self.progress.advanced(0.0, "reading its tensors")
        self._in_pytorch()
        session = None
        with _step(found, "d", title):
            session = self.dissection.open(self.settings)
        with nullcontext() if session is None else closing(session):
            if session is not None:
                self._step("d", title, session, beside=self._latest())
                if not found.failure("d"):
                    _one_by_one(found, session, self.text.items[0].ids)
            self._compare_tokens(session)
        if session is not None and not found.failure("d"):
            # Where exact settings leave activations alone, they should give what the weights alone give.
            plain = (
                self.target.in_float32(self.settings) is not None and "b" in self._beside
            )
            title = f"{title}, exact settings"
            settings = replace(self.settings, exact=True, threads=1)
            with (
                _step(found, "e", title),
                closing(self.dissection.open(settings)) as exact,
            ):
                self._step("e", title, exact, beside="b" if plain else self._latest())
        groups = together(found.weights.reports)
        if "b" in found.steps and (groups or (found.kl("b") or 0.0) > NEGLIGIBLE):
            self._restore(groups)
        if found.rounds_too_much:
            found.inputs = self._rounded_inputs()
        weights = found.weights
        apart = found.apart(found.decides)
        if weights.uncompared and not found.decides:
            names = listed(weights.uncompared)
            found.unchecked.append(
                f"the file holds nothing that could be compared with {names}"
            )
        if weights.left_out and not found.damage and apart is not None:
            names = listed(weights.left_out)
            found.unchecked.append(
                f"its KL of {apart:.3g} from PyTorch, which has no place for {names}"
            )

    def _in_pytorch(self) -> None:
        """Settings, every tensor, and the original with the file's weights."""
        found = self.found
        dissection = self.dissection
        model = self.model
        try:
            found.disagreements += dissection.tokenizer(model)
        except KLLensError as error:
            words = one_line(error)
            advice = "copy the original's files"
            found.disagreements.append(
                Disagreement("tokenizer", words, advice, about=VOCABULARY)
            )
        try:
            found.disagreements += dissection.settings(model)
            found.weights = weights = examine(
                dissection.parts(model), model, dissection.tensors
            )
        except UnsupportedError as error:
            found.unchecked.append(f"its weights were not compared: {one_line(error)}")
            found.weights.reports = [alone(tensor) for tensor in dissection.tensors]
            return
        formats = weights.formats.items()
        self.recipes = {
            name: Recipe(fmt) for name, fmt in formats if fmt not in ("fp32", "bf16")
        }
        modelled = self.target.models_activations(self.settings, self.recipes)
        kinds = len({report.kind for report in weights.reports}) + len(
            together(weights.reports)
        )
        self.progress.started(
            4.0 * len(self.text.items) + RESTORED_WINDOWS * (3.0 + kinds), 0.0
        )
        without = [*weights.left_out, *weights.uncompared]
        note = f"without {listed(without)}" if without else ""
        file = self._session(weights.held, remember=REMEMBERED)
        self._step("b", "the original with the file's weights", file, note=note)
        if dissection.usual_settings and modelled:
            deployed = self._session(weights.held, self.recipes, remember=REMEMBERED)
            self._step(
                "c",
                f"the same with {self.target.title}'s activations",
                deployed,
                beside="b",
            )

    def _compare_tokens(self, session: Session | None) -> None:
        """The file's ids of many strings beside the original's, and what the original loses if it is fed the file's."""
        if (tokenizer := self.model.tokenizer) is None:
            return
        words = ""
        try:
            if isinstance(session, TokenizingSession):  # the file's own way to ids
                own = session.tokenizer().encode
            else:
                own = find_tokenizer(session, self.dissection.files[0]).encode
            strings = self.dissection.strings(tokenizer)
            pairs = (
                (own(text), tokenizer(text, add_special_tokens=False)["input_ids"])
                for text in strings
            )
            if (
                pair := next((pair for pair in pairs if pair[0] != list(pair[1])), None)
            ) is not None:
                words = other_ids(*pair, tokenizer)
                begins = 0 if self.text.windows.bos is None else 1
                ids = self.text.items[0].ids
                with suppress(KLLensError):  # ids that the model does not have
                    both = (
                        [*ids[:begins], *own(tokenizer.decode(ids[begins:]))],
                        ids,
                    )
                    losses = [
                        score_logits(self._teacher.logits(i), text_window(tuple(i))).sums[
                            NLL
                        ]
                        for i in both
                    ]
                    self.found.tokens_cost = max(losses[0] - losses[1], 0.0) / len(ids)
            note = "" if words else f"the same on {len(strings)} strings"
        except KLLensError as error:
            note = f"not compared: {one_line(error)}"
        self.found.steps["g"] = Step("g", "the tokenizer's ids", failure=words, note=note)

    def _restore(self, groups: Sequence[Sequence[TensorReport]]) -> None:
        """What each fault costs in a file that is otherwise sound, so that none hides behind another; then what kinds
        of component carry of the loss of sound weights."""
        found = self.found
        weights = self.found.weights
        held = {
            report.name: weights.parameters.get(report.name, "")
            for report in weights.reports
        }
        odd = {
            held[report.name] for group in groups for report in group
        } & weights.rounded.keys()
        sound = weights.held | {name: weights.rounded[name] for name in odd}
        found.rounding = mean_kl(
            self._scores(self._session(weights.rounded), "plain rounding")[0]
        )
        whole = self._few(sound)

        def cost(group: Sequence[TensorReport]) -> float | None:
            names = {held[report.name] for report in group}
            if not names <= weights.held.keys():
                return None
            value = (
                self._few(sound | {name: weights.held[name] for name in names}) - whole
            )
            return max(value, 0.0) if math.isfinite(value) else None

        def without(reports: Sequence[TensorReport]) -> float:
            names = {held[report.name] for report in reports}
            return self._few(
                {name: value for name, value in sound.items() if name not in names}
            )

        found.damage = [
            (group, cost(group) if i < MOST_GROUPS else None)
            for i, group in enumerate(groups)
        ]
        found.damaged_by = self._few(weights.held) - whole
        changed = [r for r in weights.reports if r.component and (r.error or 0.0) > 1e-6]
        found.restored = _carried(changed, whole, without)

    def _rounded_inputs(self) -> list[Restored]:
        """What each kind of component loses by its rounded inputs."""
        weights = self.found.weights
        recipes = self.recipes

        def without(reports: Sequence[TensorReport]) -> float:
            exact = {report.component for report in reports}
            return self._few(
                weights.held, {name: recipes[name] for name in recipes.keys() - exact}
            )

        rounded = [report for report in weights.reports if report.component in recipes]
        return _carried(rounded, self._few(weights.held, recipes), without)

    # -- scores ----------------------------------------------------------------------------------------------

    def _session(
        self,
        values: Mapping[str, torch.Tensor],
        recipes: Mapping[str, Recipe] | None = None,
        remember: int = 0,
    ) -> TorchSession:
        """The original with other values; with `recipes`, also with the activations of their kernels."""
        deployed = None if recipes is None else self.target
        return TorchSession(
            self.model, recipes, deployed=deployed, remember=remember, values=values
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
        with _step(self.found, letter, title):
            scores, apart = self._scores(session, title, self._beside.get(beside))
            if isinstance(session, TorchSession):
                self._beside[letter] = session
            both = mean_kl(scores), mean_kl(apart) if apart else None
            self.found.steps[letter] = Step(
                letter, title, *both, beside=beside, note=note
            )

    def _scores(
        self,
        session: Session,
        title: str,
        other: Session | None = None,
        windows: int | None = None,
    ) -> tuple[list[Reading], list[Reading]]:
        """From the original, and from another step."""
        scores = []
        apart = []
        for window in self.text.items[:windows]:
            logits = session.logits(window.ids)
            scores.append(score_logits(logits, window, self._teacher.logits(window.ids)))
            if other is not None:
                apart.append(score_logits(logits, window, other.logits(window.ids)))
            self.progress.advanced(1.0, title)
        return scores, apart

    def _few(
        self,
        values: Mapping[str, torch.Tensor],
        recipes: Mapping[str, Recipe] | None = None,
    ) -> float:
        try:
            session = self._session(values, recipes)
            return mean_kl(
                self._scores(session, "restoring components", windows=RESTORED_WINDOWS)[0]
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
        rest = without(group)
        types = ", ".join(sorted({report.type for report in group}))
        gain = whole - rest if math.isfinite(rest) else 0.0
        bits = 8 * sum(r.bytes for r in group) / sum(8 * r.bytes / r.bits for r in group)
        share = gain / whole if math.isfinite(gain) and whole else float(gain > 0)
        gains.append(
            Restored(
                f"all {kind}" if group[1:] else group[0].component,
                types,
                gain,
                share,
                bits,
            )
        )
    return sorted(gains, key=lambda each: -each.kl)
