"""What `generate`, `report`, `publish` and `doctor` show. Loads no libraries: `generate` needs none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kl_lens.base.units import human_bytes
from kl_lens.cli.terminal import Shown, table

if TYPE_CHECKING:
    from kl_lens.study.doctor import DoctorResult
    from kl_lens.study.generate import GenerateResult
    from kl_lens.study.publish import PublishResult
    from kl_lens.study.report import ReportResult


def show_generate(result: GenerateResult) -> Shown:
    """The text was printed while it was made; the speeds do not belong to it."""
    print(
        f"[{result.prompt_tokens} prompt tokens at {result.prompt_tokens_per_second:.1f} tokens/s, "
        f"{result.new_tokens} new at {result.tokens_per_second:.1f} tokens/s "
        f"({result.ms_per_token:.2f} ms each), loaded in {result.load_seconds:.2f} s, "
        f"peak memory {result.peak_memory_bytes / 1e6:.0f} MB]",
        file=sys.stderr,
    )
    return ()


def show_report(result: ReportResult) -> Shown:
    print(result.path)
    return ()


def show_publish(result: PublishResult) -> Shown:
    rows = [{"file": name, "size": human_bytes(count)} for name, count in result.files.items()]
    yield table(str(result.folder), rows)
    yield result.url or "Nothing was uploaded (--dry-run)."


def show_doctor(result: DoctorResult) -> Shown:
    from rich.markup import escape

    rows = []
    for name, health in result.parts.items():
        found = "\n".join([health.runtime or "nothing", *health.facts])
        rows.append({"part": name, "found": found, "problem": health.problem or "none"})
    yield table("", rows)
    problems = [health for health in result.parts.values() if health.problem]
    yield from dict.fromkeys(f"To fix it: {escape(health.mend)}" for health in problems if health.mend)
    if not problems:
        yield "No problems found."


def json_doctor(result: DoctorResult) -> dict[str, Any]:
    return result.parts
