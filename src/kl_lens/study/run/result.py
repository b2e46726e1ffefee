"""What a run made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kl_lens.study.run.settings import RunSettings


@dataclass(frozen=True)
class RunResult:
    settings: RunSettings
    folder: Path
    # Target → plans that were compared, the recommendation last.
    plans: dict[str, list[str]]
    exported: dict[str, Path]  # target → folder of the recommendation there
    failed: list[str]  # commands that failed
    without_file: dict[str, str]  # target → why it has no file, or none that works
    seconds: float
    generates: bool = True  # the model writes text

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else 0
