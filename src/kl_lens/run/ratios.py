"""Whether a file's speed beside the FP16 file's may be shown: screen, tables, report and JSON ask here."""

from __future__ import annotations

from dataclasses import dataclass

from kl_lens.run.records import Profile, Quartiles

WIDEST = 1.5  # a ratio of the ends above this says nothing
NOTICED = 0.05  # share of processor time worth reporting
# Requested processors over existing ones. Above this, threads that wait for each other are descheduled in every token,
# and no statistic helps: llama.cpp with two threads next to two busy processes took 76 ms per token in every format;
# with one thread it took 3.9 ms, and was 1.4 times as fast in 4 or 8 bits.
CROWDED = 1.3


@dataclass(frozen=True)
class Ratio:
    """Speed relative to the FP16 file, or why it cannot be measured."""

    spread: Quartiles | None  # None: too few turns
    obstacle: str | None = None  # why it may not be shown

    @property
    def brief(self) -> str:
        if self.obstacle or self.spread is None:
            return "not measurable"
        low, median, high = (
            f"{v:.2f}" for v in (self.spread.low, self.spread.median, self.spread.high)
        )
        return median if low == high else f"{median} ({low}–{high})"

    @property
    def words(self) -> str:
        return f"not measurable here: {self.obstacle}" if self.obstacle else self.brief

    def to_json(self) -> dict[str, object]:
        """As shown: without a median if the interval says nothing."""
        values: dict[str, object] = {} if self.spread is None else self.spread.to_json()
        if self.obstacle:
            values.pop("median", None)
            values["not_measurable"] = self.obstacle
        return values


def ratio_of(profile: Profile, timing: str) -> Ratio:
    """The ratio of this timing, and what speaks against showing it."""
    spread = profile.ratios.get(timing)
    if spread is None:
        return Ratio(None, "too few turns; raise --repeats or --new-tokens")
    stolen = profile.load.get("stolen", 0.0)
    used = profile.load.get("others", 0.0)
    crowd = profile.load.get("asked", 0.0) + stolen + used
    is_exact = spread.low == spread.high  # the base itself, or a tool without intervals
    is_clear = spread.high <= WIDEST * spread.low and crowd <= CROWDED
    if is_exact or is_clear:
        return Ratio(spread)
    share = ""
    if stolen >= NOTICED:
        share = f" ({100 * stolen:.0f} % stolen)"
    elif used >= NOTICED:
        share = f" ({100 * used:.0f} % used by others)"
    return Ratio(spread, f"the machine was busy{share}")
