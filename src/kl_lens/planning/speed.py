"""How fast a plan's file would be: a constant, plus the bytes of each format times a rate.

`plan --min-speed` and the report's slider use it. It is fitted to the files that the run has timed. Those are few, so
formats are taken to have similar rates, as far as the timings do not say otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import scipy  # its parts load on first use: that takes seconds

from kl_lens.base.errors import PlanError
from kl_lens.run.folder import Run
from kl_lens.run.records import Artifact, Profile, SensitivityTable
from kl_lens.run.subjects import current_profiles, recorded_artifact
from kl_lens.targets import Target

FEWEST = 3  # timed files of different sizes
# Relative: how far timings are expected to scatter, and the rates of formats to differ.
NOISE = 0.03
SPREAD = 0.3
WORST = 0.3  # median error, of each file predicted from the others, above which there is no model


@dataclass(frozen=True)
class TimedFile:
    bytes: Mapping[str, int]  # format → bytes that tokens read
    seconds: float  # per token


@dataclass(frozen=True)
class SpeedModel:
    constant: float  # seconds per token that no format changes
    rates: Mapping[str, float]  # format → seconds per byte
    usual: float  # seconds per byte of a format that no timed file has
    files: int = 0
    off: float = 0.0  # median error, of each file predicted from the others
    conditions: str = ""  # `CPU, 2 threads`
    # Of the export: how the timed files were written.
    options: Mapping[str, str] = field(default_factory=dict)
    # The component that tokens take one row of: its bytes cost no time.
    lookup: str | None = None

    def rate(self, format_name: str) -> float:
        """Seconds per byte. A kernel's time depends on the format, not on the method."""
        return self.rates.get(format_name, self.usual)

    def of(self, component: str, format_name: str, size: int) -> float:
        """Seconds of a component (or a group of them) per token."""
        return 0.0 if component == self.lookup else self.rate(format_name) * size

    @property
    def basis(self) -> str:
        """What it rests on, for people."""
        return (
            f"from {self.files} timed files ({self.conditions}); each predicted from the others: {100 * self.off:.0f} "
            "% off (median)"
        )


def speed_model(run: Run, table: SensitivityTable, target: Target) -> SpeedModel:
    """The model of a target's files on the device on which most were timed, written with the options of most. Raises
    PlanError if there is none."""
    groups: dict[str, dict[str, Profile]] = {}
    written: dict[str, dict[str, str]] = {}
    for profile in current_profiles(run):
        plan = profile.subject.own_plan
        is_timed = "seconds_per_token" in profile.timings
        if plan and is_timed and profile.subject.target == target.name:
            plural = "" if profile.threads == 1 else "s"
            options = _options(run, profile, target)
            machine = f"{profile.device}, {profile.threads} thread{plural}"
            described = (f"{name} {value}" for name, value in options.items())
            label = ", ".join([machine, *described])
            groups.setdefault(label, {})[plan] = profile
            written[label] = options
    conditions = max(groups, key=lambda label: len(groups[label]), default="")
    profiles = groups.get(conditions, {})
    lookup = table.embedding if table.embedding != table.head else None
    read = {c.name for c in table.candidates if c.name != lookup}
    files = [_timed(run, profile, read) for profile in profiles.values()]
    different = len({sum(file.bytes.values()) for file in files})
    if different < FEWEST:
        raise PlanError(
            f"speeds are predicted from at least {FEWEST} timed {target.title} files of different sizes, and the run "
            f"has {different}; export more plans, then: kl-lens benchmark --run {run.folder} --target {target.name}"
        )
    fit = fitted(files)
    off = error_left_out(files)
    if fit is None or off > WORST:
        raise PlanError(
            f"smaller {target.title} files were not reliably faster in this run ({conditions}), so a speed cannot be "
            f"the budget; on a quiet machine, repeat: kl-lens benchmark --run {run.folder} --target {target.name}"
        )
    fit = replace(fit, files=len(files), off=off, conditions=conditions)
    return replace(fit, lookup=lookup, options=written[conditions])


def _artifact(run: Run, profile: Profile) -> Artifact:
    name = f"{profile.subject.target}/{profile.subject.plan}"
    artifact = recorded_artifact(run.artifact_folder(name))
    assert artifact is not None  # or the profile would be outdated
    return artifact


def _options(run: Run, profile: Profile, target: Target) -> dict[str, str]:
    """Those of its export that change its speed and were not left to the runtime."""
    settings = _artifact(run, profile).settings
    chosen = {name: settings.get(name) for name in target.speed_options}
    return {name: value for name, value in chosen.items() if value is not None}


def _timed(run: Run, profile: Profile, read: set[str]) -> TimedFile:
    sizes: Counter[str] = Counter()
    for tensor in _artifact(run, profile).tensors:
        if tensor.component in read:
            sizes[tensor.realised.partition("+")[0]] += tensor.bytes
    return TimedFile(sizes, profile.timings["seconds_per_token"].median)


def fitted(files: Sequence[TimedFile]) -> SpeedModel | None:
    """Constant and rates that fit relative times best, none below zero; None if smaller files are not faster.

    First one rate for all bytes, then one for each format, drawn towards the first.
    """
    formats = sorted({name for file in files for name in file.bytes})
    sizes = np.array([[file.bytes.get(n, 0.0) for n in formats] for file in files])
    times = np.array([file.seconds for file in files])
    mean = times.mean()
    whole = sizes.sum(1)
    scale = mean / whole.mean()
    shares = np.column_stack([mean / times, scale * whole / times])
    usual = float(scale * scipy.optimize.nnls(shares, np.ones(len(files)))[0][1])
    if usual == 0:
        return None
    rows = np.column_stack([mean / times, usual * sizes / times[:, None]]) / NOISE
    drawn = np.eye(1 + len(formats))[1:] / SPREAD
    goals = np.repeat([1 / NOISE, 1 / SPREAD], [len(files), len(formats)])
    constant, *factors = scipy.optimize.nnls(np.vstack([rows, drawn]), goals)[0].tolist()
    rates = {name: usual * factor for name, factor in zip(formats, factors, strict=True)}
    return SpeedModel(float(mean * constant), rates, usual)


def error_left_out(files: Sequence[TimedFile]) -> float:
    """The median error of each file predicted from the others."""
    errors = []
    for index, file in enumerate(files):
        model = fitted([*files[:index], *files[index + 1 :]])
        errors.append(error_of(file, model))
    return float(np.median(errors))


def error_of(file: TimedFile, model: SpeedModel | None) -> float:
    """How far a prediction is off, as a share."""
    if model is None:
        return np.inf
    reading = sum(model.rate(name) * size for name, size in file.bytes.items())
    predicted = model.constant + reading
    return abs(predicted / file.seconds - 1)
