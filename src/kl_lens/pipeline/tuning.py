"""`plan --tune`: the weights of a finished plan, tuned on text. Kept if the KL on the first held-out half falls; the
second half confirms, as for every plan."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

import torch

from kl_lens import planning
from kl_lens.calibration import StoredStatistics
from kl_lens.calibration.tuning import TuningRates, tuned
from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import TextError
from kl_lens.pipeline.events import Events, going_on
from kl_lens.pipeline.target_planner import TargetPlanner
from kl_lens.pipeline.workbench import Workbench
from kl_lens.quantizers import TUNED
from kl_lens.recipes import FP16, Recipe, parsed
from kl_lens.records import Plan
from kl_lens.runs import CALIBRATION, Run
from kl_lens.text import Windows

VERSION = 1  # raise it when the same plan and text give other weights
WINDOWS = 1024


def with_tuning(
    plan: Plan, windows: int, run: Run, planner: TargetPlanner, bench: Workbench, events: Events
) -> Plan:
    """The plan with tuned weights, or the plan itself if its KL did not fall."""
    model, meter = planner.model, planner.halves[0]
    recipes = {name: recipe for name, recipe in parsed(plan.assignment).items() if recipe != FP16}
    model.weights.learnt_by(recipes.values(), plan.statistics)
    text = _text(windows, run, model, bench)
    rates = TuningRates()
    facts = [VERSION, model.fingerprint, model.weights.digests(recipes), text.fingerprint, asdict(rates)]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=4).hexdigest()
    spelled = {name: Recipe(recipe.grid.name, f"{TUNED}-{digest}") for name, recipe in recipes.items()}
    if not any(model.weights.has_tuned(name, recipe) for name, recipe in spelled.items()):
        events.note(f"tuning {plan.name} on {text.label}, {len(text)} windows of {text.length}")
        with going_on(run.folder), events.progress(f"tuning {plan.name}") as shown:
            made = tuned(
                model, recipes, text.ids, rates, lambda done, steps: shown.advanced(1, f"{done} of {steps}")
            )
            for name, quantized in made.items():
                model.weights.keep_tuned(name, spelled[name], quantized)
    assignment = plan.assignment | {
        name: recipe for name, recipe in spelled.items() if model.weights.has_tuned(name, recipe)
    }
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


def _text(windows: int, run: Run, model: LoadedModel, bench: Workbench) -> Windows:
    """Windows of the run's calibration text that neither measured nor taught methods."""
    known = run.text_identity(CALIBRATION)
    learnt = StoredStatistics.held_by(run.folder)
    used = [text for text in (known, learnt and learnt.identity["text"]) if text]
    how = {"length": used[0]["length"], "seed": used[0]["seed"] + 2, "split": used[0]["split"]}
    available = used[0]["stream_tokens"] // how["length"]
    drawn = bench.drawn(used[0]["source"], model.task, windows=min(windows, available), **how)
    taken = [
        s
        for text in used
        if text["source"] == drawn.source and text["split"] == drawn.split
        for s in text["starts"]
    ]
    apart = [i for i, start in enumerate(drawn.starts) if all(abs(start - s) >= drawn.length for s in taken)]
    if not apart:
        raise TextError(f"{drawn.label}: measuring used all of it; --tune needs more text")
    kept = torch.tensor(apart)
    return replace(
        drawn, ids=drawn.ids[kept], starts=tuple(drawn.starts[i] for i in apart),
        documents=tuple(drawn.documents[i] for i in apart),
    )  # fmt: skip
