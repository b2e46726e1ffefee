"""Targets whose files are a folder of safetensors with a config.json."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kl_lens.run.records import Artifact, Plan
from kl_lens.targets.abilities import Target
from kl_lens.targets.exporting import (
    Piece,
    file_size,
    record,
    write_beside,
    write_file,
    write_settings,
)

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel

SUFFIX = ".safetensors"
WEIGHT_FILE = "model.safetensors"


@dataclass(frozen=True)
class FolderContents:
    """What the folder of a plan holds besides the tokenizer."""

    pieces: Sequence[Piece]
    config: dict[str, Any]  # config.json
    settings: dict[str, Any] = field(default_factory=dict)  # of the record


class FolderTarget(Target):
    loads = (SUFFIX,)
    methods = ("gptq", "search")
    usual = False
    made_for: ClassVar[str]  # the format that the files' headers name
    # Distributions whose versions the record names.
    written_with: ClassVar[tuple[str, ...]]

    @abstractmethod
    def folder_contents(self, model: LoadedModel, plan: Plan) -> FolderContents:
        """What the folder of a plan is to hold."""

    def write(
        self, model: LoadedModel, plan: Plan, folder: Path, **options: Any
    ) -> Artifact:
        contents = self.folder_contents(model, plan)
        folder.mkdir(parents=True, exist_ok=True)
        records = write_file(folder / WEIGHT_FILE, contents.pieces, self.made_for)
        write_settings(folder, contents.config)
        settings = {
            "versions": {name: metadata.version(name) for name in self.written_with},
            "notes": write_beside(model, folder),
            **contents.settings,
        }
        return record(self.name, model, plan, folder, records, **settings)

    def file_bytes(self, model: LoadedModel, plan: Plan, *, exact: bool = False) -> int:
        """Exact, from the header, without quantizing anything."""
        return file_size(self.folder_contents(model, plan).pieces, self.made_for)

    def loaded_files(self, path: Path) -> list[Path]:
        """All of a folder, even if only one is given."""
        return super().loaded_files(folder_of(path))


def folder_of(path: Path) -> Path:
    """The folder of a file, or itself."""
    return path.parent if path.suffix == SUFFIX else path
