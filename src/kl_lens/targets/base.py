"""A target: everything that other code needs from a runtime and its files.

To add one, write one class with what `required.py` lists, and one line in `registry.py`; `abilities.py` has defaults
for the rest. Code outside `targets/` names no target.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.base.errors import TargetError
from kl_lens.base.files import replacing, require_own_folder
from kl_lens.run.records import Artifact, Plan
from kl_lens.run.subjects import file_digest
from kl_lens.targets import abilities
from kl_lens.targets.exporting import earlier_artifact, write_record
from kl_lens.targets.session import CACHES

if TYPE_CHECKING:  # running an exported model must not load what exporting needs
    from kl_lens.model import LoadedModel


class Target(
    abilities.Storage,
    abilities.Files,
    abilities.Installing,
    abilities.Devices,
    abilities.Memory,
    abilities.Kernels,
    abilities.Dissecting,
    abilities.Publishing,
):
    """One runtime: what it holds, how its files are written and opened, and how its kernels round."""

    def export(
        self, model: LoadedModel, plan: Plan, folder: Path, **options: Any
    ) -> Artifact:
        """Writes the files and their record (`artifact.json`), in place of an earlier export's.

        On an error, or if the runtime cannot open the files, the folder stays as it was.
        """
        earlier = earlier_artifact(folder)
        require_own_folder(folder)
        model.beginning.settle(model)  # the files say it
        with replacing(folder) as draft:
            artifact = self.write(model, plan, draft, **options)
            settings = artifact.settings | ({CACHES: plan.caches} if plan.caches else {})
            artifact = replace(
                artifact,
                digests={name: file_digest(draft / name) for name in artifact.files},
                realised_bytes=self.loaded_bytes(draft),
                settings=settings,
            )
            write_record(draft, artifact)
            if notes := [*self._tried(draft, folder), *self._left_out(model, artifact)]:
                notes = [*settings.get("notes", ()), *notes]
                artifact = replace(artifact, settings=settings | {"notes": notes})
                write_record(draft, artifact)
        for name in set(earlier.files if earlier else ()) - set(artifact.files):
            (folder / name).unlink(missing_ok=True)
        return artifact

    def _tried(self, draft: Path, folder: Path) -> Iterator[str]:
        """A note where there is no runtime; TargetError, about the folder of the export, if the files do not open."""
        try:
            note = self.try_out(draft)
        except TargetError as error:
            reason = str(error).replace(f"{draft}{os.sep}", "")
            raise TargetError(
                f"{self.title} cannot open the files exported to {folder}: "
                + reason.replace(str(draft), str(folder))
            ) from error
        if note is not None:
            yield note

    def _left_out(self, model: LoadedModel, artifact: Artifact) -> Iterator[str]:
        if model.further_heads and not artifact.settings.get("further_heads"):
            yield (
                f"left out: heads for further tokens ({len(model.further_heads)} tensors mtp.*), for which KL Lens "
                f"knows no place in files for {self.title}. Text stays the same; speculative decoding with them is "
                "lost"
            )
