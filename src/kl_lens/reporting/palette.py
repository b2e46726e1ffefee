"""Colours: one for each format, wherever it appears; one ramp for damage; one list for everything else.

The categorical colours follow Okabe and Ito, which people with any colour vision can tell apart; a shape or a label
always says the same. The ramp is straight in the perceptual space OKLab: equal steps of log KL look like equal steps,
pale to dark on paper, dark to bright on a dark screen.
"""

from __future__ import annotations

import math

RAMP_STEPS = 24

# Format → (light, dark). 8 bits are blue, 4 bits are orange, between them green and purple; 3 bits are red, 2 bits
# pink; FP16 is grey.
_FORMATS = {
    "fp16": ("#8a8f98", "#7d838d"),
    "int8": ("#0072b2", "#3d9be0"),
    "int8-g128": ("#3f93c4", "#74bbf0"),
    "int8-absmax": ("#7fb8d8", "#a5d3f5"),
    "q8_0": ("#2f8fce", "#5fb0f0"),
    "q6_k": ("#8d5fae", "#b791d9"),
    "q5_k": ("#009e73", "#2fc79b"),
    "q5_0": ("#3cb58f", "#62d6b0"),
    "q5_1": ("#6cc7a9", "#8fe3c6"),
    "int4": ("#d55e00", "#ff8a4c"),
    "int4-g128": ("#e07b1a", "#ffa05c"),
    "int4-g64": ("#e69422", "#ffb46a"),
    "int4-g32": ("#ebab3a", "#ffc77d"),
    "int4-absmax": ("#b96a3a", "#e59a70"),
    "q4_k": ("#e69f00", "#f5bd45"),
    "q4_0": ("#c97f00", "#e0a63a"),
    "uint4": ("#a8480a", "#f07c3c"),
    "uint4-g128": ("#b5651d", "#e8924a"),
    "uint4-g64": ("#c07f2e", "#f2aa5e"),
    "uint4-g32": ("#cc9640", "#f7bf78"),
    "nf4": ("#8a6d1f", "#cfae4e"),
    "nf4-g128": ("#9c7f2c", "#dabb5f"),
    "nf4-g64": ("#ad913b", "#e4c872"),
    "nf4-g32": ("#bda24c", "#edd486"),
    "mxfp4": ("#c9b25f", "#f3de9b"),
    "uint2-g64": ("#7d2b57", "#cc5f97"),
    "q4_1": ("#dba93c", "#ecc468"),
    "iq4_nl": ("#b89412", "#d9b93c"),
    "iq4_xs": ("#a6a116", "#cdc946"),
    "q3_k": ("#b3262e", "#f0666c"),
    "iq3_s": ("#c4474d", "#f5858a"),
    "iq3_xxs": ("#d4696e", "#f9a3a6"),
    "q2_k": ("#a3326f", "#e06fab"),
    "iq2_s": ("#b5518a", "#e78abd"),
    "iq2_xs": ("#c670a0", "#eda4cc"),
    "iq2_xxs": ("#d68fb6", "#f3bedb"),
}
# MLX's: (light, dark) of each number of bits, with groups of 128, 64 and 32.
_AFFINE = {
    8: (("#00619a", "#2f8bd0"), ("#1a7fbe", "#4fa6e6"), ("#4d9fd0", "#82c1f2")),
    6: (("#7a4d9c", "#a880cc"), ("#9468b5", "#bf9ce0"), ("#ab88c6", "#d3b8ec")),
    5: (("#008763", "#20b88c"), ("#1fa67e", "#45cfa4"), ("#52bb99", "#79dfbd")),
    4: (("#cf7400", "#f29a3d"), ("#dc8c14", "#f8b155"), ("#e6a53f", "#fcc674")),
    3: (("#a11f27", "#e85a61"), ("#bb3a41", "#f27a80"), ("#cb5b61", "#f7989c")),
    2: (("#932a63", "#d9629f"), ("#ab447d", "#e37fb3"), ("#bf6496", "#eb9bc6")),
}
for _bits, _colours in _AFFINE.items():
    _FORMATS |= {f"affine{_bits}-g{size}": pair for size, pair in zip((128, 64, 32), _colours, strict=True)}
_OTHER = ("#6b7078", "#9aa0a8")
# For what is not a format: families of plans, targets, runs, calibrations.
_SERIES = (
    ("#0072b2", "#4aa8e8"),
    ("#d55e00", "#ff8a4c"),
    ("#009e73", "#2fc79b"),
    ("#b5568f", "#e39ac5"),
    ("#c98a00", "#f0b840"),
    ("#5b6470", "#a3abb6"),
    ("#7a5195", "#b791d9"),
    ("#3b8ea5", "#7cc6da"),
)
SERIES = len(_SERIES)
# Anchors of the ramp as (lightness, a, b) in OKLab, from no damage to most.
_LIGHT_RAMP = ((0.955, 0.0, 0.030), (0.74, 0.11, 0.075), (0.50, 0.14, -0.005), (0.25, 0.055, -0.085))
_DARK_RAMP = ((0.27, 0.02, -0.055), (0.46, 0.12, -0.055), (0.67, 0.14, 0.06), (0.94, 0.0, 0.11))


def format_class(name: str) -> str:
    """The CSS class that colours a recipe's format; one that nobody registered gets a neutral one."""
    grid = name.lower().partition("+")[0]
    return f"f-{grid}" if grid in _FORMATS else "f-other"


def series_class(index: int) -> str:
    return f"s{index % SERIES}"


def ramp_class(share: float) -> str:
    """The class of a place on the ramp, 0 to 1."""
    share = 0.0 if math.isnan(share) else min(1.0, max(0.0, share))
    return f"h{min(RAMP_STEPS - 1, int(share * RAMP_STEPS))}"


def stylesheet() -> str:
    """The colours as CSS: variables for light and dark, and the classes that use them."""
    light, dark = [], []
    for name, (on_light, on_dark) in {**_FORMATS, "other": _OTHER}.items():
        light.append(f"--f-{name}:{on_light}")
        dark.append(f"--f-{name}:{on_dark}")
    for index, (on_light, on_dark) in enumerate(_SERIES):
        light.append(f"--s{index}:{on_light}")
        dark.append(f"--s{index}:{on_dark}")
    for step in range(RAMP_STEPS):
        share = step / (RAMP_STEPS - 1)
        light.append(f"--h{step}:{_hex(*_along(_LIGHT_RAMP, share))}")
        dark.append(f"--h{step}:{_hex(*_along(_DARK_RAMP, share))}")
    names = [f"f-{name}" for name in [*_FORMATS, "other"]] + [f"s{i}" for i in range(SERIES)]
    classes = [f".{name}{{--c:var(--{name})}}" for name in names]
    classes += [f".h{step}{{--c:var(--h{step})}}" for step in range(RAMP_STEPS)]
    on_light, on_dark = ";".join(light), ";".join(dark)
    return (
        f":root{{{on_light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{on_dark}}}}}\n"
        f":root[data-theme=dark]{{{on_dark}}}\n"
        # Twice as specific as the lines above: paper is white whatever was chosen on the screen.
        f"@media print{{:root:root:root{{{on_light}}}}}\n" + "\n".join(classes)
    )


def _along(anchors: tuple[tuple[float, float, float], ...], share: float) -> tuple[float, float, float]:
    """A place on the way from anchor to anchor; lightness runs straight from the first to the last."""
    position = share * (len(anchors) - 1)
    index = min(int(position), len(anchors) - 2)
    part = position - index
    _, a, b = (x + part * (y - x) for x, y in zip(anchors[index], anchors[index + 1], strict=True))
    return anchors[0][0] + share * (anchors[-1][0] - anchors[0][0]), a, b


def _hex(lightness: float, a: float, b: float) -> str:
    """OKLab → sRGB (Björn Ottosson's published matrices)."""
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(channel)):02x}" for channel in linear)


def _gamma(channel: float) -> float:
    channel = min(1.0, max(0.0, channel))
    return float(12.92 * channel if channel <= 0.0031308 else 1.055 * channel ** (1 / 2.4) - 0.055)
