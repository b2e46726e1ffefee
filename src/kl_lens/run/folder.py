"""The run folder: the journal `run.sqlite` and plain files.

Each measurement is committed as it is made, so a kill loses only the work in progress. The first measurement fixes what
the run is about (model, text, seed, metrics version). A later command that does not fit is refused, with the difference
named; one that asks for more adds to the run.
"""

from __future__ import annotations

import json
import platform
import re
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Self

from kl_lens.base.errors import PlanError, RunError
from kl_lens.base.files import require_outside_models
from kl_lens.base.units import parse_names
from kl_lens.base.version import __version__
from kl_lens.run.journal import FILE, LOCK, Hold, Journal, checks_rows
from kl_lens.run.positions import PositionCurve, by_position
from kl_lens.run.readings import KL, METRICS_VERSION, Reading, summarise
from kl_lens.run.records import (
    PREDICTED,
    Component,
    Estimate,
    Measurement,
    SensitivityTable,
    Subject,
    checked_plan_name,
)

CALIBRATION = "calibration"
EVALUATION = "evaluation"  # roles of texts
STATES = "states"
# Role of states and caches; kind and name of the record of them.
COMPONENTS = "components"
TUNING = "tuning"  # kind of record: a text that a plan was tuned on
SCREENED = "screened"  # kind of records: what a staged search measured, for which limit, and what it predicts
SECOND_ORDER = "second order"  # kind of records: estimates of KL from gradients
INTERACTION = "interaction"  # kind of record: target → by what predictions are multiplied
KERNELS = "kernels"  # kind of record: why transformers' own code computed, where our kernels should have
WEIGHTS = "weights"  # measurements without a target's activations
ALL_PLANS = "all"
RECOMMENDED = "recommended"  # name of plans, kind of records: what the last `kl-lens run` recommends
STATISTICS = "statistics/statistics.json"  # describes the run's statistics
# Names for the parts of a run's identity.
_MEANINGS = {
    "model_fingerprint": "model's weights",
    "model": "model",
    "metrics_version": "definition of the metrics",
    "precision": "precision of matrix products",
    "statistics": "set of statistics",
    "bos": "beginning of texts (--bos)",
}


def recommended_name(target: str | None, limit: str = "") -> str:
    """What `kl-lens run` calls the plan it recommends. `limit`: the user's, so that files of several limits can be in
    one run. (No dot before the target: `.gguf` would make a folder look like a file.)"""
    return "-".join(filter(None, (RECOMMENDED, target, limit)))


def role_as(role: str, target: str | None) -> str:
    """The role of measurements with a target's activations: `calibration@gguf`. The text is the same."""
    return role if target in (None, WEIGHTS) else f"{role}@{target}"


class Result(NamedTuple):
    """One result about a subject: a score, a profile, a verdict, a text sample."""

    subject: Subject
    name: str  # unique for this kind and subject
    value: Any


class Run:
    """One run folder, open for reading and writing.

    Example:
        >>> with Run.open(Path("runs/mamba")) as run:
        ...     print(run.table().formats)
    """

    def __init__(self, folder: Path, new_folders: Sequence[Path] = ()) -> None:
        """`new_folders`: those that were made for it, itself first."""
        self.folder = folder
        self._new_folders = new_folders
        self._is_new = not (folder / FILE).exists()
        self.journal = Journal(folder / FILE)
        self._hold: Hold | None = None

    @classmethod
    def create(cls, folder: Path) -> Self:
        """Opens the run folder; creates it if missing."""
        folder = Path(folder)
        try:
            if folder.exists() and not folder.is_dir():
                raise RunError(f"{folder} is a file; --run needs a folder")
            if not (folder / FILE).exists():
                require_outside_models(folder, "--run")
            new_folders = [
                path for path in (folder, *folder.parents) if not path.exists()
            ]
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written ({error.strerror}); use another --run"
            ) from error
        return cls(folder, new_folders)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Opens a run that must exist."""
        try:
            mode = (Path(folder) / FILE).stat().st_mode
        except FileNotFoundError:
            mode = 0
        except NotADirectoryError:
            raise RunError(f"{folder} is a file; --run needs a folder") from None
        except OSError as error:  # the name is too long, or the folder is not readable
            raise RunError(
                f"{folder} cannot be read ({error.strerror}); use another --run"
            ) from error
        if not stat.S_ISREG(mode):
            raise RunError(
                f"{folder} has no run; make one with: kl-lens measure MODEL --run {folder}"
            )
        return cls.create(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """A new run in which nothing was measured when an error came leaves nothing behind."""
        failed = error is not None and issubclass(error, Exception)
        forgets = failed and self._is_new and self._hold is not None and self._is_empty()
        self.close()
        if forgets:
            for name in (FILE, f"{FILE}-wal", f"{FILE}-shm", LOCK):
                (self.folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # something else is there
                for folder in self._new_folders:
                    folder.rmdir()

    def close(self) -> None:
        self.journal.close()
        if self._hold is not None:
            self._hold.release()

    def _is_empty(self) -> bool:
        """Whether nothing was measured or made."""
        tables = ("samples", "results", "records WHERE kind != 'text'")
        return not any(self.journal.rows(f"SELECT 1 FROM {t} LIMIT 1") for t in tables)

    # -- what the run is about -------------------------------------------------------------------------

    @checks_rows
    def identify(self, model: Mapping[str, Any]) -> None:
        """Sets the model of the run, or raises if it has another one."""
        identity = {**model, "metrics_version": METRICS_VERSION}
        with self.journal.alone():
            # If two processes bring two models, the second is refused.
            if "dtype" in model:
                self.require_dtype(model["dtype"])
            stored = self.identity
            for key, value in identity.items():
                if key in _MEANINGS and stored.get(key, value) != value:
                    raise RunError(
                        f"{self.folder} was made with another {_MEANINGS[key]}: "
                        f"{key} is {stored[key]!r} there and {value!r} now; use another --run"
                    )
            rows = [(key, json.dumps(value)) for key, value in identity.items()]
            self.journal.write("INSERT OR IGNORE INTO identity VALUES (?, ?)", rows)

    def require_dtype(self, dtype: str) -> None:
        """Raises if the run was made with another one: in it, the weights of the same model are others."""
        made_with = self.identity.get("dtype", dtype)
        if made_with != dtype:
            raise RunError(
                f"{self.folder} was made with --dtype {made_with}, not {dtype}; give --dtype {made_with}, or use "
                "another --run"
            )

    @checks_rows
    def identify_text(
        self, role: str, identity: Mapping[str, Any], hashes: Sequence[str]
    ) -> None:
        """Sets the text of a role (calibration, evaluation, …), or raises if it has another one.

        More windows may be added; existing ones must be the same. A text that nothing was measured on fixes nothing.
        """
        with self.journal.alone():
            if difference := self._text_difference(role, identity, hashes):
                measured = "SELECT 1 FROM samples WHERE role = ? OR role GLOB ? LIMIT 1"
                if self.journal.rows(measured, role, f"{role}@*"):
                    raise RunError(f"{self.folder}: {difference}")
                self.journal.write("DELETE FROM texts WHERE role = ?", [(role,)])
                self.journal.write("DELETE FROM windows WHERE role = ?", [(role,)])
            self.journal.write(
                "INSERT OR IGNORE INTO texts VALUES (?, ?)",
                [(role, json.dumps(identity))],
            )
            rows = [(role, index, value) for index, value in enumerate(hashes)]
            self.journal.write(
                "INSERT OR IGNORE INTO windows (role, window, hash) VALUES (?, ?, ?)",
                rows,
            )

    def _text_difference(
        self, role: str, identity: Mapping[str, Any], hashes: Sequence[str]
    ) -> str | None:
        """How the text of a role differs from this one, and what to do; None: it does not."""
        earlier = self.text_identity(role) or identity
        for key, value in identity.items():
            if earlier.get(key) != value:
                return (
                    f"its {role} text has {key} {earlier.get(key)!r}, now it is {value!r}; "
                    "use another --run, or the text, length and seed of this one"
                )
        stored = self.window_hashes(role)
        for index, value in enumerate(hashes):
            if stored.get(index, value) != value:
                return f"{role} window {index} has other tokens than before; use another --run"
        return None

    @property
    @checks_rows
    def identity(self) -> dict[str, Any]:
        rows = self.journal.rows("SELECT key, value FROM identity")
        return {key: json.loads(value) for key, value in rows}

    @checks_rows
    def text_identity(self, role: str) -> dict[str, Any] | None:
        """What the text of a role is, and the number of its windows."""
        rows = self.journal.rows("SELECT identity FROM texts WHERE role = ?", role)
        return (
            json.loads(rows[0][0]) | {"windows": len(self.window_hashes(role))}
            if rows
            else None
        )

    def window_hashes(self, role: str) -> dict[int, str]:
        return dict(
            self.journal.rows(
                "SELECT window, hash FROM windows WHERE role = ? ORDER BY window", role
            )
        )

    def roles(self) -> list[str]:
        return [
            role for (role,) in self.journal.rows("SELECT role FROM texts ORDER BY rowid")
        ]

    def note_command(self, command: Sequence[str]) -> None:
        """Records a command that writes, and locks the run until it is closed."""
        self._hold = self._hold or Hold(self.folder, command)
        row = (time.time(), json.dumps(list(command)), json.dumps(provenance()))
        self.journal.write("INSERT INTO commands VALUES (?, ?, ?)", [row])

    @checks_rows
    def commands(self) -> list[dict[str, Any]]:
        rows = self.journal.rows(
            "SELECT started, command, provenance FROM commands ORDER BY started"
        )
        if any(not 0 <= float(started) < 2**40 for started, _, _ in rows):
            raise ValueError("not a time")
        return [
            {
                "started": float(s),
                "command": list(json.loads(c)),
                "provenance": dict(json.loads(p)),
            }
            for s, c, p in rows
        ]

    # -- measurements ----------------------------------------------------------------------------------

    def store_teacher(self, role: str, windows: Iterable[tuple[int, int, float]]) -> None:
        """(window, tokens with a target, the teacher's summed cross-entropy on them)."""
        rows = [(tokens, total, role, window) for window, tokens, total in windows]
        change = "UPDATE windows SET tokens = ?, teacher_cross_entropy = ? WHERE role = ? AND window = ?"
        self.journal.write(change, rows)

    @checks_rows
    def teacher_cross_entropy(self, role: str) -> tuple[float, int]:
        """The teacher's mean cross-entropy per token on a role's text, and the number of tokens."""
        query = "SELECT sum(teacher_cross_entropy), sum(tokens) FROM windows WHERE role = ? AND tokens > 0"
        ((total, tokens),) = self.journal.rows(query, role)
        if not tokens:
            raise RunError(f"{self.folder} holds no {role} measurements yet")
        return total / tokens, tokens

    def store_samples(
        self,
        role: str,
        component: str,
        format_name: str,
        windows: Sequence[Reading],
        seconds: float,
        compute_dtype: str,
    ) -> None:
        """Commits some windows of one candidate: the unit of work that a kill can lose."""
        rows = [
            (
                role,
                component,
                format_name,
                w.window,
                w.tokens,
                w.targets,
                json.dumps(w.sums),
                w.arrays[KL],
            )
            for w in windows
        ]
        with self.journal.alone():
            self.journal.write(
                "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows
            )
            self.journal.write(
                "INSERT INTO effort VALUES (?, ?, ?, ?, ?) ON CONFLICT (role, component, format) "
                "DO UPDATE SET seconds = seconds + excluded.seconds",
                [(role, component, format_name, seconds, compute_dtype)],
            )

    def expect(
        self, role: str, candidates: Iterable[tuple[str, str]], compute_dtype: str
    ) -> None:
        """Fixes the order of candidates (component, format) before their results arrive."""
        rows = [(role, *key, 0.0, compute_dtype) for key in candidates]
        self.journal.write("INSERT OR IGNORE INTO effort VALUES (?, ?, ?, ?, ?)", rows)

    def measured_windows(self, role: str) -> dict[tuple[str, str], set[int]]:
        """(component, format) → windows that are done."""
        windows: dict[tuple[str, str], set[int]] = {}
        query = "SELECT component, format, window FROM samples WHERE role = ?"
        for component, format_name, window in self.journal.rows(query, role):
            windows.setdefault((component, format_name), set()).add(window)
        return windows

    @checks_rows
    def samples(
        self, role: str, component: str, format_name: str, windows: int | None = None
    ) -> list[Reading]:
        """The windows of one candidate, in order; `windows`: only the first ones."""
        rows = self.journal.rows(
            "SELECT window, tokens, targets, sums, token_kl FROM samples "
            "WHERE role = ? AND component = ? AND format = ? AND window < ? ORDER BY window",
            *(role, component, format_name, sys.maxsize if windows is None else windows),
        )
        return [
            Reading(window, tokens, targets, json.loads(sums), {KL: kl})
            for window, tokens, targets, sums, kl in rows
        ]

    @checks_rows
    def measurements(
        self, role: str = CALIBRATION, windows: int | None = None
    ) -> list[Measurement]:
        """One record per candidate, in the order of first measurement."""
        measurements = []
        query = "SELECT component, format, seconds, compute_dtype FROM effort WHERE role = ? ORDER BY rowid"
        for component, format_name, seconds, dtype in self.journal.rows(query, role):
            samples = self.samples(role, component, format_name, windows)
            if samples:
                measurements.append(
                    Measurement(
                        component=component,
                        format=format_name,
                        metrics=summarise(samples),
                        tokens=sum(s.tokens for s in samples),
                        windows=len(samples),
                        compute_dtype=dtype,
                        seconds=seconds,
                    )
                )
        return measurements

    @checks_rows
    def measured_role(self, target: str | None = None, role: str = CALIBRATION) -> str:
        """The role to read for a target: measured with its activations, else weights alone. Without a target: weights
        alone, else whatever was measured first."""
        query = "SELECT role FROM effort GROUP BY role ORDER BY min(rowid)"
        roles = [
            name for (name,) in self.journal.rows(query) if name.partition("@")[0] == role
        ]
        wanted = [role_as(role, target), role]
        return next(
            (name for name in wanted if name in roles),
            roles[0] if roles and not target else role,
        )

    @property
    def usual_target(self) -> str | None:
        """The target whose measurements are read by default; None for weights alone."""
        return self.measured_role().partition("@")[2] or None

    @property
    @checks_rows
    def components(self) -> tuple[Component, ...]:
        """What its measurements are about."""
        stored = self.identity.get("components")
        if stored is None:
            raise RunError(
                f"{self.folder} has no measurements; make some with: kl-lens measure MODEL --run {self.folder}"
            )
        return tuple(Component.from_json(component) for component in stored)

    @checks_rows
    def table(
        self,
        role: str = CALIBRATION,
        windows: int | None = None,
        target: str | None = None,
        *,
        predicted: bool = False,
    ) -> SensitivityTable:
        """All measurements of a role and the components they are about.

        Args:
            target: with its activations.
            predicted: also what was not measured and has a predicted KL.
        """
        components = self.components
        identity = self.identity
        if "@" not in role:
            role = self.measured_role(target, role)
        measurements = self.measurements(role, windows)
        if predicted:
            measured = {(m.component, m.format) for m in measurements}
            rows = (self.load(SCREENED, role) or {}).get("predicted", ())
            measurements += [
                Measurement(name, recipe, {KL: Estimate(kl, 0.0)}, 0, 0, PREDICTED, 0.0)
                for name, recipe, kl in rows
                if (name, recipe) not in measured
            ]
        return SensitivityTable(
            model=identity["model"],
            model_type=identity["model_type"],
            components=components,
            head=identity["head"],
            embedding=identity["embedding"],
            measurements=tuple(measurements),
            statistics=identity.get("statistics"),
        )

    @checks_rows
    def states(self) -> SensitivityTable | None:
        """The measurements of states and caches, and what they are about; None if there are none."""
        stored = self.load(STATES, COMPONENTS)
        if stored is None:
            return None
        components = tuple(Component.from_json(component) for component in stored)
        identity = self.identity
        return SensitivityTable(
            identity["model"],
            identity["model_type"],
            components,
            "",
            "",
            tuple(self.measurements(STATES)),
        )

    def state_rows(self) -> Iterator[tuple[Component, Measurement, PositionCurve]]:
        """Every measurement of a state or cache: of what, its means, its KL by position."""
        table = self.states()
        parts = (
            {component.name: component for component in table.components} if table else {}
        )
        for m in table.measurements if table else ():
            samples = self.samples(STATES, m.component, m.format)
            kls = [sample.by_token() for sample in samples]
            yield parts[m.component], m, by_position(kls)

    def forget_learnt(self, formats: Iterable[str]) -> None:
        """Deletes the measurements of these recipes, and the digest of their statistics."""
        rows = [(name,) for name in formats]
        with self.journal.alone():
            for table in ("samples", "effort"):
                self.journal.write(f"DELETE FROM {table} WHERE format = ?", rows)
            self.journal.write("DELETE FROM identity WHERE key = 'statistics'")

    @property
    def statistics(self) -> str | None:
        """The digest of the statistics in the run folder, complete or not."""
        try:
            index = json.loads((self.folder / STATISTICS).read_text(encoding="utf-8"))
            return str(index["digest"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    # -- other records ---------------------------------------------------------------------------------

    def store(self, kind: str, name: str, value: Any) -> None:
        """Stores a JSON record (noise, ranking, artifact, …)."""
        row = (kind, name, json.dumps(value), time.time())
        self.journal.write("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", [row])

    @checks_rows
    def load(self, kind: str, name: str) -> Any | None:
        rows = self.journal.rows(
            "SELECT value FROM records WHERE kind = ? AND name = ?", kind, name
        )
        return json.loads(rows[0][0]) if rows else None

    @checks_rows
    def load_all(self, kind: str) -> dict[str, Any]:
        rows = self.journal.rows(
            "SELECT name, value FROM records WHERE kind = ? ORDER BY created", kind
        )
        return {name: json.loads(value) for name, value in rows}

    # -- results about subjects ------------------------------------------------------------------------

    def store_result(self, kind: str, subject: Subject, name: str, value: Any) -> None:
        """Stores a result; replaces an earlier one of the same name, subject and digest."""
        row = (kind, *_columns(subject), name, json.dumps(value), time.time())
        self.journal.write(
            "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", [row]
        )

    @checks_rows
    def results(self, kind: str) -> list[Result]:
        """All results of a kind; `kl_lens.run.subjects.current_results` leaves out outdated ones."""
        rows = self.journal.rows(
            "SELECT what, plan, target, settings, digest, name, value FROM results WHERE kind = ? "
            "ORDER BY created, rowid",
            kind,
        )
        return [
            Result(
                Subject(
                    what, plan or None, target or None, dict(json.loads(settings)), digest
                ),
                name,
                json.loads(value),
            )
            for what, plan, target, settings, digest, name, value in rows
        ]

    def forget_results(self, kind: str) -> None:
        self.journal.write("DELETE FROM results WHERE kind = ?", [(kind,)])

    @checks_rows
    def artifact_folder(self, name: str) -> Path:
        """Folder of the artifact `TARGET/PLAN`: in the run, which may have moved, or where it was written."""
        inside = self.folder / "artifacts" / name
        record = self.load("artifact", name)
        return inside if record is None or inside.is_dir() else Path(record["folder"])

    def interaction(self, target: str | None) -> float:
        """How many times more than the sum of their parts whole plans for a target lost; 1 until any was measured."""
        return float((target and self.load(INTERACTION, target)) or 1.0)

    def recommended(self, target: str | None) -> str:
        """Name of the plan that the last `kl-lens run` recommends for a target."""
        usual = recommended_name(target)
        return self.load(RECOMMENDED, usual) or usual


def _columns(subject: Subject) -> tuple[str, ...]:
    settings = json.dumps(subject.settings, sort_keys=True)
    return (
        subject.what,
        subject.plan or "",
        subject.target or "",
        settings,
        subject.digest,
    )


def named_plans(text: str) -> tuple[str, ...] | None:
    """Parses `small,large`; None for `all`."""
    if text == ALL_PLANS:
        return None
    names = tuple(checked_plan_name(name) for name in parse_names(text))
    if not names:
        raise PlanError(
            f"{text!r} names no plan; give small, or small,large, or {ALL_PLANS}"
        )
    return names


def provenance() -> dict[str, Any]:
    """Versions and machine, stored with every command."""
    return {
        "versions": dict(_versions()),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "command": sys.argv[1:],
    }


@cache
def _versions() -> dict[str, str]:
    """Of the packages it depends on, with extras but without developers' tools."""
    versions = {"kl-lens": __version__, "python": platform.python_version()}
    with suppress(metadata.PackageNotFoundError):  # run from its source
        for line in metadata.requires("kl-lens") or ():
            package = re.split(r"[^\w.-]", line)[0]
            if not re.search("extra == .dev", line) and package not in versions:
                with suppress(metadata.PackageNotFoundError):
                    versions[package] = metadata.version(package)
    return versions
