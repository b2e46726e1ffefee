"""Speed against size, per target on one device, with the bound that memory bandwidth sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kl_lens.profiling import ratio_of
from kl_lens.reporting.figures.sizes import unit_of
from kl_lens.reporting.markup import Html
from kl_lens.reporting.names import subject_title
from kl_lens.reporting.numbers import count, number, size
from kl_lens.reporting.palette import series_class
from kl_lens.reporting.scales import by_span
from kl_lens.reporting.svg import SHAPES, Mark, Plot, figure, legend
from kl_lens.run.records import Profile, Quartiles

# Timing → (title, axis, factor). Names with @N (prompt length) match without it.
TIMINGS: dict[str, tuple[str, str, float]] = {
    "tokens_per_second": ("Throughput", "tokens per second, decoding", 1.0),
    "seconds_per_token": ("Latency", "milliseconds per token, decoding", 1e3),
    "first_token_seconds": ("Time to the first token", "milliseconds to the first token", 1e3),
    "prefill_tokens_per_second": ("Prefill", "prompt tokens per second", 1.0),
    "throughput_fps": ("Throughput", "inferences per second", 1.0),
    "latency_ms": ("Latency", "milliseconds per inference", 1.0),
}
_INVERSES = {
    "seconds_per_token": "tokens_per_second",
    "prefill_tokens_per_second": "first_token_seconds",
    "latency_ms": "throughput_fps",
}

Label = Callable[[Profile], str]


def bound_of(profile: Profile, timing: str) -> float | None:
    """The best that the machine's bandwidth (and, for prompts, its products) allow, in the unit of the timing."""
    direct = profile.bound.get(timing)
    if direct:
        return direct
    base, _, length = timing.partition("@")
    rate = profile.bound.get("tokens_per_second")
    if base == "seconds_per_token" and rate:
        return 1 / rate
    least = profile.bound.get(f"prefill_seconds@{length}")
    if base == "first_token_seconds" and least:
        return least
    return int(length) / least if base == "prefill_tokens_per_second" and least else None


def timing_names(profiles: Sequence[Profile]) -> list[str]:
    """What to draw: each timing once, of those with several prompt lengths the longest; no timing that is another's
    inverse."""
    names = list(dict.fromkeys(name for p in profiles for name in p.timings))
    chosen: dict[str, str] = {}
    for base in TIMINGS:
        with_length = [n for n in names if n.partition("@")[0] == base]
        if with_length and _INVERSES.get(base) not in chosen:
            chosen[base] = max(with_length, key=lambda n: int(n.partition("@")[2] or 0))
    return list(chosen.values())


def speed_plot(
    timing: str,
    profiles: Sequence[Profile],
    label: Label,
    series: Callable[[Profile], str],
    recommended: Callable[[Profile], bool] = lambda profile: False,
) -> Html | None:
    """One timing over file size; quartiles as error bars, one colour and shape per series."""
    base, _, length = timing.partition("@")
    title, axis, factor = TIMINGS[base]
    axis += f" ({length} prompt tokens)" if length else ""
    shown = [p for p in profiles if timing in p.timings]
    if not shown:
        return None
    divisor, unit = unit_of(max(p.file_bytes for p in shown))
    bounds = [(p, value) for p in shown if (value := bound_of(p, timing)) is not None]
    values = [factor * v for p in shown for v in _three(p.timings[timing])] + [factor * b for _, b in bounds]
    y = by_span(values, 0.8)
    plot = Plot(
        f"{title} against size",
        by_span([p.file_bytes / divisor for p in shown]),
        y,
        f"size of the file, {unit}",
        axis + (" (log)" if y.kind == "log" else ""),
    )
    names = list(dict.fromkeys(series(p) for p in shown))
    entries = []
    for index, name in enumerate(names):
        colour, shape = series_class(index), SHAPES[index % len(SHAPES)]
        entries.append((name, shape, colour))
        limits = sorted((p.file_bytes / divisor, factor * b) for p, b in bounds if series(p) == name)
        plot.curve(limits, f"dashed {colour}")
        for profile in (p for p in shown if series(p) == name):
            spread = profile.timings[timing]
            star = recommended(profile)
            plot.marks.append(
                Mark(
                    profile.file_bytes / divisor,
                    factor * spread.median,
                    _words(profile, timing, axis, factor),
                    colour,
                    "star" if star else shape,
                    y_error=(factor * spread.low, factor * spread.high),
                    label=label(profile),
                    emphasis=star,
                )
            )
    if bounds:
        entries.append(("limit of the machine", "dash", "quiet"))
    return figure(f"{title} against size", plot.render(), None, legend(entries))


def _three(spread: Quartiles) -> tuple[float, float, float]:
    return spread.low, spread.median, spread.high


def _words(profile: Profile, timing: str, axis: str, factor: float) -> str:
    spread = profile.timings[timing]
    words = f"{subject_title(profile.subject)}, {profile.device}, {count(profile.threads, 'thread')}\n"
    words += f"{size(profile.file_bytes)}\n"
    words += f"{axis}: {number(factor * spread.median)}\n"
    words += (
        f"quartiles {number(factor * spread.low)} to {number(factor * spread.high)}, {spread.repeats} repeats"
    )
    if timing in profile.ratios and profile.settings.get("ratios_to_fp16", True):
        words += f"\n× FP16: {ratio_of(profile, timing).words}"
    bound = bound_of(profile, timing)
    if bound is not None:
        words += f"\nbound {number(factor * bound)}"
    return words
