"""`plan --tune`: the scales of a finished plan, tuned on text. Kept if the KL on the first held-out half falls; the
second half confirms, as for every plan."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

from kl_lens import planning
from kl_lens.base.errors import TextError
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.measuring.tuning import TuningRates, tuned
from kl_lens.model import LoadedModel
from kl_lens.run.folder import TUNING, Run
from kl_lens.run.records import Plan
from kl_lens.study.events import going_on
from kl_lens.study.planner import TargetPlanner
from kl_lens.study.session import Session
from kl_lens.text.windows import Windows, refuse_overlap
from kl_lens.weights.formats.scales import scales_of
from kl_lens.weights.quantizers import TUNED
from kl_lens.weights.recipes import FP16, Recipe, parsed

VERSION = 1  # raise it when the same plan and text give other weights


def with_tuning(plan: Plan, windows: int, planner: TargetPlanner) -> Plan:
    """The plan with tuned weights, or the plan itself if its KL did not fall."""
    session, run, model, meter = planner.session, planner.run, planner.model, planner.halves[0]
    events = session.events
    recipes = {name: recipe for name, recipe in parsed(plan.assignment).items() if recipe != FP16}
    model.weights.learnt_by(recipes.values(), plan.statistics)
    drawn = _drawn(windows, run, model, session)
    for half in planner.halves:
        refuse_overlap(drawn, half.text)
    text = _unused(drawn, run, model, session)
    rates = TuningRates()
    facts = [VERSION, model.fingerprint, model.weights.digests(recipes), text.fingerprint, asdict(rates)]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=4).hexdigest()
    spelled = {
        name: Recipe(recipe.grid.name, f"{TUNED}-{digest}")
        for name, recipe in recipes.items()
        if scales_of(recipe.grid, model.weights.quantized(name, recipe))
    }
    if not all(model.weights.has_tuned(name, recipe) for name, recipe in spelled.items()):
        identity = {
            name: drawn.provenance()[name] for name in ("source", "split", "windows", "length", "seed")
        }
        run.store(TUNING, digest, identity)  # no plan of this run is judged on it
        events.note(f"tuning {plan.name} on {text.label}, {len(text)} windows of {text.length}")
        with going_on(run.folder), events.progress(f"tuning {plan.name}") as shown:

            def advance(done: int, steps: int) -> None:
                if done == 1:
                    shown.started(steps, 0)
                shown.advanced(1, f"step {done}")

            for name, quantized in tuned(model, recipes, text.ids, rates, advance).items():
                model.weights.keep_tuned(name, spelled[name], quantized)
    assignment = plan.assignment | spelled
    before, after = meter.measure(plan.assignment), meter.measure(assignment)
    gain = planning.paired_difference(after.windows, before.windows)
    change = f"KL {before.kl.value:.4g} before and {after.kl.value:.4g} after, on {meter.text.label}"
    if gain.mean >= 0:
        events.note(f"{plan.name}: tuning did not help ({change}); the plan stays as it was")
        return plan
    events.note(f"{plan.name}: tuned, {change}")
    return replace(
        plan, assignment=assignment, made_by=f"{plan.made_by}, tuned", predicted_kl=None, measured=None,
        statistics=None, notes=plan.notes | {"tuned": change},
    )  # fmt: skip


def _drawn(windows: int, run: Run, model: LoadedModel, session: Session) -> Windows:
    """Windows of the run's calibration text at other places than those that measured or taught methods."""
    measured = session.calibration(run, model.task)
    assert measured.seed is not None
    return session.drawn(
        measured.source, model.task, split=measured.split, length=measured.length, seed=measured.seed + 2,
        windows=min(windows, measured.stream_tokens // measured.length),
    )  # fmt: skip


def _unused(drawn: Windows, run: Run, model: LoadedModel, session: Session) -> Windows:
    """The windows that share nothing with those that measured or taught methods."""
    learnt = StoredStatistics.held_by(run.folder)
    used = [session.calibration(run, model.task)]
    used += [session.drawn_again(learnt.identity["text"], model.task)] if learnt else []
    taken = [start for text in used if text.label == drawn.label for start in text.starts]
    apart = [i for i, start in enumerate(drawn.starts) if all(abs(start - t) >= drawn.length for t in taken)]
    if not apart:
        raise TextError(f"{drawn.label}: measuring used all of it; --tune needs more text")
    return replace(
        drawn, ids=drawn.ids[apart], starts=tuple(drawn.starts[i] for i in apart),
        documents=tuple(drawn.documents[i] for i in apart),
    )  # fmt: skip
