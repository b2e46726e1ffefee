"""What a new target must write: one class with five names, its formats, `write` and `open`.

Everything else has a default in `abilities.py`, in one small class for each question that other code asks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kl_lens.run.records import Artifact, Plan
from kl_lens.targets.session import Session, SessionSettings

if TYPE_CHECKING:  # running an exported model must not load what exporting needs
    from kl_lens.model import LoadedModel


class Required(ABC):
    """Its module imports without the runtime's packages; methods import them when needed."""

    name: ClassVar[str]  # gguf: as typed
    title: ClassVar[str]  # llama.cpp: as shown
    extra: ClassVar[str]  # of `pip install kl-lens[EXTRA]`
    # The last one's version is the runtime's.
    packages: ClassVar[tuple[str, ...]]
    # Suffixes of the files that the runtime loads; only these count as size.
    loads: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def formats(self) -> tuple[str, ...]:
        """Formats that its kernels run well, small ones first."""

    @abstractmethod
    def write(
        self, model: LoadedModel, plan: Plan, folder: Path, **options: Any
    ) -> Artifact:
        """Writes only the files, to an empty folder. `exporting.py` has what targets share."""

    @abstractmethod
    def open(self, path: Path, settings: SessionSettings) -> Session:
        """Opens a session: with the runtime's defaults and what the file says, unless asked otherwise."""
