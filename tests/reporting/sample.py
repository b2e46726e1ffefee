"""A run folder with every kind of record in it, made without a model: what the report is tested on.

The numbers obey simple laws (damage falls with bits, early and late blocks are sensitive), so that a figure of them
looks like a figure; nothing of it was measured.
"""

import json
import math
import random
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kl_lens import planning
from kl_lens.judging.ranking import rank
from kl_lens.planning.points import paper_points
from kl_lens.planning.predict import component_bytes
from kl_lens.run.folder import CALIBRATION, EVALUATION, Run
from kl_lens.run.records import (
    ARTIFACT,
    ORIGINAL,
    PLAN,
    Artifact,
    Component,
    Estimate,
    ExportedTensor,
    Measured,
    Plan,
    Profile,
    Quartiles,
    Score,
    Subject,
)
from kl_lens.run.subjects import current_digest
from kl_lens.targets import get_target
from kl_lens.weights.formats import get_format
from kl_lens.weights.recipes import Recipe
from tests.planning.tables import best
from tests.samples import window_of

KINDS = ("in_proj", "x_proj", "dt_proj", "out_proj")
WINDOWS = 4
TOKENS = 64
NOISE = 3e-7


def components(blocks: int, kinds: Sequence[str] = KINDS) -> list[Component]:
    shape = (64, 64)
    parts = [
        Component(
            "backbone.embeddings",
            "backbone.embeddings.weight",
            "embedding",
            "embedding",
            None,
            (500, 64),
            32000,
            tied_with=("lm_head",),
        )
    ]
    for block in range(blocks):
        for kind in kinds:
            name = f"backbone.layers.{block}.mixer.{kind}"
            parts.append(
                Component(
                    name,
                    f"{name}.weight",
                    kind,
                    "ssm",
                    block,
                    shape,
                    shape[0] * shape[1],
                    (block,),
                )
            )
        name = f"backbone.layers.{block}.mixer.conv1d"
        parts.append(
            Component(
                name,
                f"{name}.weight",
                "conv1d",
                "ssm",
                block,
                (128, 1, 4),
                512,
                (block,),
                quantizable=False,
                reason="a convolution of four taps",
            )
        )
    return parts


def make_run(
    folder: Path,
    *,
    model: str = "sample-mamba",
    blocks: int = 4,
    kinds: Sequence[str] = KINDS,
    formats: Sequence[str] = ("int4", "int8"),
    stages: Sequence[str] = ("rank", "plan", "evaluate", "benchmark", "generate"),
    prompt: str = "The history of the city",
    seed: int = 0,
) -> Path:
    """A run with measurements, and with what the named stages would add."""
    folder.mkdir(parents=True, exist_ok=True)
    with Run.create(folder) as run:
        parts = components(blocks, kinds)
        run.identify(
            {
                "model": model,
                "source": f"/somewhere/private/{model}",
                "tokenizer": None,
                "model_type": "mamba",
                "model_fingerprint": "f" * 16,
                "dtype": "float32",
                "head": "backbone.embeddings",
                "embedding": "backbone.embeddings",
                "components": [c.to_json() for c in parts],
            }
        )
        run.note_command(["kl-lens", "measure", model, "--run", "runs/sample"])
        _measure(run, parts, formats, CALIBRATION, seed, blocks)
        run.store("noise", CALIBRATION, {"kl_teacher_to_student": NOISE})
        if "rank" in stages:
            _measure(run, parts, formats, EVALUATION, seed + 1, blocks)
            _measure(run, parts, formats, "calibration:books", seed + 2, blocks)
            run.store("ranking", "latest", rank(run).to_json())
        plans = (
            _plan(run, verified="verify" in stages or "evaluate" in stages)
            if "plan" in stages
            else []
        )
        if "evaluate" in stages:
            _evaluate(run, plans)
        if "benchmark" in stages:
            _benchmark(run, plans)
        if "generate" in stages:
            for subject in (
                about(run, "original"),
                about(run, "openvino", "recommended"),
            ):
                value = {"prompt": prompt, "text": f" is long, says {subject.label}."}
                run.store_result("generation", subject, prompt, value)
    return folder


BESIDES = 7000  # bytes of a target's file besides weights


def add_target(folder: Path, target: str = "openvino") -> Path:
    """A recommendation for a target, in bytes of its file."""
    with Run.open(folder) as run:
        table = run.table()
        name = f"recommended-{target}"
        planning.store_fixed_bytes(run, get_target(target), BESIDES)
        best_plan = best(
            table, max_bpw=10, name=name, fixed_bytes=BESIDES, target=get_target(target)
        ).plan
        planning.write_plan(
            replace(best_plan, target=target),
            planning.plan_path(folder / "plans", name),
            table.components,
        )
    return folder


def about(run: Run, what: str, plan: str | None = None) -> Subject:
    """A subject as it is now: the original, a plan in `torch`, or the run's artifact of a target."""
    if what == "torch" or plan is None:
        subject = Subject(PLAN if plan else ORIGINAL, plan)
    else:
        subject = Subject(ARTIFACT, plan, what)
    return replace(subject, digest=current_digest(run, subject) or "")


def _damage(component: Component, format_name: str, blocks: int) -> float:
    """Nats per token: more for fewer bits, for the head, and for both ends of the network."""
    bits = get_format(format_name).bits
    kind = {"x_proj": 3.0, "out_proj": 2.0, "dt_proj": 2e-4}.get(component.kind, 1.0)
    if component.block is None:
        return 40 * 4.0 ** (-bits)
    depth = component.block / max(1, blocks - 1)
    return kind * (0.2 + (2 * depth - 1) ** 2) * 4.0 ** (-bits)


def _measure(
    run: Run,
    parts: Sequence[Component],
    formats: Sequence[str],
    role: str,
    seed: int,
    blocks: int,
) -> None:
    random_ = random.Random(seed)
    identity = {
        "source": "wikitext2",
        "split": "train" if role != EVALUATION else "test",
        "order": "drawn",
        "length": TOKENS,
        "seed": 42,
        "stride": None,
    }
    run.identify_text(role, identity, [f"{role}-{w}" for w in range(WINDOWS)])
    documents = [{"name": "wiki", "sha256": "0" * 64}]
    run.store("text", role, identity | {"fingerprint": "abc123", "documents": documents})
    run.store_teacher(role, [(w, TOKENS, 3.2 * TOKENS) for w in range(WINDOWS)])
    for component in (c for c in parts if c.quantizable):
        for format_name in formats:
            windows = []
            for window in range(WINDOWS):
                kl = _damage(component, format_name, blocks) * random_.lognormvariate(
                    0, 0.3
                )
                change = random_.gauss(0.4 * kl, 0.6 * math.sqrt(kl) * 0.02)
                same_top = max(0.0, 1 - kl)
                windows.append(
                    window_of(
                        window, TOKENS, kl, 1.1 * kl, 2 * kl, change, same_top, signal=9.0
                    )
                )
            run.store_samples(role, component.name, format_name, windows, 0.1, "float32")


def _plan(run: Run, verified: bool) -> list[Plan]:
    table = run.table()
    points = paper_points(table)
    whole = sum(2 * c.parameters for c in table.components)
    exact = best(table, max_bytes=0.45 * whole, name="recommended").plan
    small = best(table, max_bytes=0.35 * whole, name="small").plan
    random_ = random.Random(5)
    finished = []
    for plan in [*points, exact, small]:
        measured = None
        if verified and plan.predicted_kl is not None:
            kl = plan.predicted_kl * random_.uniform(0.9, 1.25)
            perplexity = Estimate(21.0 * math.exp(0.5 * kl), 0.9)
            measured = Measured(
                Estimate(kl, 0.05 * kl), perplexity, 21.0, "wikitext2:valid", 4
            )
        judged = replace(plan, measured=measured)
        planning.write_plan(
            judged, planning.plan_path(run.folder / "plans", plan.name), table.components
        )
        finished.append(judged)
    run.note_command(shlex.split("kl-lens plan --run runs/sample --paper --verify"))
    words = "kl-lens plan --run runs/sample --max-bytes 80kB --name small --verify"
    run.note_command(shlex.split(words))
    return finished


def _evaluate(run: Run, plans: Sequence[Plan]) -> None:
    protocol = {
        "dataset": "wikitext2",
        "split": "test",
        "window": 512,
        "stride": 256,
        "fingerprint": "abc",
    }
    for plan in plans:
        export(run, "openvino", plan)

    def store(subject: Subject, kind: str, **values: Estimate) -> None:
        store_score(run, subject, kind, protocol, 4096, **values)

    subjects = [
        (about(run, t, p.name), p.predicted_kl or 0.0)
        for p in plans
        for t in ("torch", "openvino")
    ]
    for subject, kl in [(about(run, "original"), 0.0), *subjects]:
        values = {"token_perplexity": Estimate(26.0 * math.exp(0.5 * kl), 0.8)}
        if subject.what != ORIGINAL:
            values["token_perplexity_change"] = Estimate(
                26.0 * math.expm1(0.5 * kl), 0.02 + 2 * kl
            )
            divergence = {
                "kl_mean": Estimate(1.1 * kl, 0.04 * kl),
                "same_top": Estimate(1 - kl),
            }
            store(subject, "divergence", **divergence)
        store(subject, "perplexity", **values)
    for subject in (about(run, "original"), about(run, "openvino", "recommended")):
        for task in ("arc_easy", "lambada"):
            accuracy = Estimate(0.413, 0.012)
            store_score(run, subject, "task", {"few_shot": 0}, 200, task, acc=accuracy)


def store_score(
    run: Run,
    subject: Subject,
    kind: str,
    protocol: dict[str, Any],
    tokens: int,
    what: str = "",
    **values: Estimate | float,
) -> None:
    """`what`: the task, or the text of the protocol."""
    what = what or f"{protocol['dataset']}:{protocol['split']}"
    estimates = {
        name: value if isinstance(value, Estimate) else Estimate(value)
        for name, value in values.items()
    }
    runtime = {"library": "openvino", "version": "1.0"}
    score = Score(subject, kind, what, estimates, tokens, protocol, runtime, 1.0)
    name = f"{kind}|{what}|{protocol.get('fingerprint')}"
    run.store_result("score", subject, name, score.to_json() | {"provenance": {}})


def export(run: Run, target: str, plan: Plan) -> int:
    """An artifact's record, without its files; gives back its size."""
    assert plan.bytes is not None
    size = plan.bytes + 900
    recipes = {c: plan.assignment.get(c.name, "fp16") for c in run.table().candidates}
    tensors = tuple(
        ExportedTensor(c.name, c.name, f, f, component_bytes(c, Recipe.parse(f)))
        for c, f in recipes.items()
    )
    artifact = Artifact(
        target, plan.name, ("model.bin",), tensors, plan.bytes, size, "sample", "f" * 16
    )
    folder = run.folder / "artifacts" / target / plan.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "artifact.json").write_text(json.dumps(artifact.to_json()))
    run.store(
        "artifact", f"{target}/{plan.name}", artifact.to_json() | {"folder": "elsewhere"}
    )
    return size


def _benchmark(run: Run, plans: Sequence[Plan]) -> None:
    whole = sum(2 * c.parameters for c in run.table().components)
    everything = [Plan("fp16", {}, "nothing quantized", 0.0, whole), *plans]
    for target, bandwidth, share in (("openvino", 9e9, 0.6), ("gguf", 9e9, 0.45)):
        for plan in everything:
            size = export(run, target, plan)
            subject = about(run, target, plan.name)
            profile = _profile(subject, size, whole, bandwidth, share)
            run.store_result(
                "profile", subject, "use|CPU", profile.to_json() | {"provenance": {}}
            )


def _profile(
    subject: Subject, size: int, whole: int, bandwidth: float, share: float
) -> Profile:
    rate = share * bandwidth / size

    def spread(value: float) -> Quartiles:
        return Quartiles(value, 0.95 * value, 1.04 * value, 5)

    timings = {
        "load_seconds": spread(0.2),
        "first_token_seconds@32": spread(9 / rate),
        "first_token_seconds@128": spread(30 / rate),
        "seconds_per_token": spread(1 / rate),
        "tokens_per_second": spread(rate),
    }
    ratio = spread(whole / size)
    bound = {
        "bytes_per_token": float(size),
        "read_bandwidth": bandwidth,
        "tokens_per_second": bandwidth / size,
        "share": share,
    }
    return Profile(
        subject,
        "use",
        "CPU",
        2,
        timings,
        {"tokens_per_second": ratio, "seconds_per_token": ratio},
        120_000_000,
        size,
        bound,
        {"repeats": 5, "ratios_to": f"{subject.target}/fp16", "ratios_to_fp16": True},
        {"library": "openvino", "version": "1.0"},
    )
