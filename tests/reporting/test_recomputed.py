"""Every number in the tables and the answer of a real run's page, recomputed by hand from the journal and the files."""

import json
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kl_lens.cli.main import main
from tests.reporting.document import Element, read

pytestmark = pytest.mark.slow
pytest.importorskip("gguf", reason="needs the extra gguf")

KL = "kl_teacher_to_student"
# Bits per weight of llama.cpp's types, from the bytes of their blocks.
BITS = {"fp16": 16, "q8_0": 8.5, "q6_k": 6.5625, "q5_k": 5.5, "q5_0": 5.5}
BITS |= {"q4_k": 4.5, "q4_0": 4.5, "q4_1": 5, "q5_1": 6, "iq4_xs": 4.25, "iq4_nl": 4.5}
_NUMBER = re.compile(r"[−-]?\d[\d,]*(?:\.\d+)?(?:e[−-]?\d+)?")
_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
Table = dict[str, dict[str, str]]  # first cell → heading → cell


def numbers(text: str) -> list[float]:
    return [float(n.replace(",", "").replace("−", "-")) for n in _NUMBER.findall(text)]


def fits(text: str, *expected: float) -> bool:
    """Whether the numbers in a text are these, to the last digit that it shows."""
    shown = _NUMBER.findall(text)
    unit = next((size for name, size in _UNITS.items() if name in text), 1.0)
    unit = 0.01 if "%" in text else unit
    for digits, value in zip(shown, expected, strict=True):
        mantissa, _, power = digits.partition("e")
        places = len(mantissa.partition(".")[2])
        half = 0.5 * unit * 10.0 ** (int(power.replace("−", "-") or 0) - places)
        if abs(unit * numbers(digits)[0] - value) > 1.001 * half:
            return False
    return True


def table_of(element: Element) -> Table:
    heads = [cell.words for cell in element.all("th")]
    rows = [[cell.words for cell in row.all("td")] for row in element.all("tr")[1:]]
    return {row[0]: dict(zip(heads, row, strict=True)) for row in rows}


def ratio(sums: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Σ sums / Σ weights with its standard error over windows."""
    value = math.fsum(sums) / math.fsum(weights)
    residuals = [s - value * w for s, w in zip(sums, weights, strict=True)]
    count = len(sums)
    spread = math.fsum(r**2 for r in residuals) / (count - 1) / count
    return value, math.sqrt(spread) / (math.fsum(weights) / count)


class Hand:
    """A run's journal and files, read without a line of the program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = sqlite3.connect(folder / "run.sqlite").execute
        query = "SELECT value FROM identity WHERE key = 'components'"
        self.components = json.loads(self.rows(query).fetchone()[0])
        self.parameters = sum(c["parameters"] for c in self.components)
        plans = [json.loads(path.read_text()) for path in folder.glob("plans/*.json")]
        self.plans = {plan["name"]: plan for plan in plans}
        [self.interaction] = self.records("interaction").values() or [1.0]

    def records(self, kind: str) -> dict[str, Any]:
        query = "SELECT name, value FROM records WHERE kind = ? ORDER BY created"
        return {name: json.loads(value) for name, value in self.rows(query, (kind,))}

    def size(self, plan: str) -> int:
        """Of the file that was written, else as planned."""
        files = [*self.folder.glob(f"artifacts/gguf/{plan}/*.gguf")]
        if files:
            return files[0].stat().st_size
        return self.plans[plan]["bytes"] + self.plans[plan]["fixed_bytes"]

    def bytes_of(self, plan: str) -> float:
        assignment = self.plans[plan]["assignment"]
        recipes = {c["name"]: assignment.get(c["name"], "fp16") for c in self.components}
        bits = {name: BITS[recipe.partition("+")[0]] for name, recipe in recipes.items()}
        return sum(bits[c["name"]] * c["parameters"] / 8 for c in self.components)

    def alone(self) -> dict[tuple[str, str], tuple[float, ...]]:
        """(component, recipe) → what it loses: with an error if measured, without if predicted."""
        lost: dict[tuple[str, str], tuple[float, ...]] = {}
        for role, screened in self.records("screened").items():
            assert role.startswith("calibration")
            lost |= {(c, recipe): (value,) for c, recipe, value in screened["predicted"]}
        windows: dict[tuple[str, str], list[tuple[float, float]]] = {}
        query = "SELECT component, format, tokens, sums FROM samples WHERE role GLOB 'calibration@*' ORDER BY window"
        for component, recipe, tokens, sums in self.rows(query):
            pair = json.loads(sums)[KL], tokens
            windows.setdefault((component, recipe), []).append(pair)
        return lost | {
            key: ratio(*zip(*pairs, strict=True)) for key, pairs in windows.items()
        }

    def judged(self) -> list[dict[str, tuple[float, ...]]]:
        """What the windows of each subject on the test text say; the original's first."""
        groups: dict[str, list[dict[str, Any]]] = {}
        texts: dict[str, dict[str, int]] = {}
        for name, reading in self.records("reading").items():
            identity, window = name.split("|")
            groups.setdefault(identity, []).append(reading)
            texts.setdefault(identity, {})[window] = len(texts.get(identity, {}))
        longest = max(map(len, groups.values()))
        whole = [group for group in groups.values() if len(group) == longest]
        whole.sort(key=lambda group: KL in group[0]["sums"])
        return [dict(values(group, whole[0])) for group in whole]


def values(group: list[dict[str, Any]], original: list[dict[str, Any]]) -> Any:
    targets = [r["targets"] for r in group]

    def sums(of: list[dict[str, Any]], name: str) -> list[float]:
        return [r["sums"][name] for r in of]

    for label, weights in (("token", targets), ("word", sums(group, "words"))):
        loss = ratio(sums(group, "nll"), weights)[0]
        before = ratio(sums(original, "nll"), weights)[0]
        yield f"{label} perplexity", (math.exp(loss),)
        pairs = zip(sums(group, "nll"), sums(original, "nll"), weights, strict=True)
        steps = [
            math.exp(loss) * (a - loss * w) - math.exp(before) * (b - before * w)
            for a, b, w in pairs
        ]
        change = math.exp(loss) - math.exp(before)
        if label == "token":
            yield "change, paired", (change, ratio(steps, weights)[1])
    if KL in group[0]["sums"]:
        tokens = [r["tokens"] for r in group]
        yield "KL", ratio(sums(group, KL), tokens)
        yield "same top token, %", (100 * ratio(sums(group, "same_top"), tokens)[0],)


@pytest.fixture(scope="module")
def hand(tmp_path_factory: pytest.TempPathFactory) -> Hand:
    folder = tmp_path_factory.mktemp("recomputed") / "run"
    few = "--windows 2 --window-length 64 --held-out-windows 3 --evaluation-windows 2"
    words = f"run reference:mamba --run {folder} --target gguf --max-bytes 4MB --repeats 2 {few}"
    assert main(words.split()) == 0
    return Hand(folder)


@pytest.fixture(scope="module")
def page(hand: Hand) -> Callable[[str], Element]:
    tree = read((hand.folder / "report.html").read_text(encoding="utf-8"))

    def part(identifier: str) -> Element:
        element = tree.with_id(identifier)
        assert element is not None
        return element

    return part


def test_the_files(hand: Hand, page: Callable[[str], Element]) -> None:
    judged = hand.judged()
    files = table_of(page("files").all("table")[0])
    used: Counter[int] = Counter()
    assert len(files) > 3
    for title, row in files.items():
        cells = {name: row[name] for name in judged[-1] if numbers(row[name])}
        cells = {name: text for name, text in cells.items() if text != "0"}
        matching = [
            index
            for index, shown in enumerate(judged)
            if all(
                fits(text, *shown.get(name, ())[: len(numbers(text))])
                for name, text in cells.items()
                if name in shown
            )
            and ("KL" in shown) == (title != "original")
        ]
        assert matching, title
        used.update(matching[:1])
    assert used[0] == 1


def test_every_plan(hand: Hand, page: Callable[[str], Element]) -> None:
    alone = hand.alone()
    whole = hand.size("uniform_fp16")
    rows = table_of(page("plans"))
    assert set(rows) == set(hand.plans)
    for name, row in rows.items():
        plan = hand.plans[name]
        # Without a target: of the weights.
        size = hand.size(name) if plan["target"] else plan["bytes"]
        assert plan["bytes"] == pytest.approx(hand.bytes_of(name), abs=1)
        assert fits(row["size"], size)
        full = whole if plan["target"] else 2 * hand.parameters
        assert fits(row["of FP16"], size / full)
        assert fits(row["bits per weight"], 8 * plan["bytes"] / hand.parameters)
        parts = [
            alone.get(pair) for pair in plan["assignment"].items() if pair[1] != "fp16"
        ]
        if row["predicted KL"] != "–":
            total = math.fsum(part[0] for part in parts if part)
            assert fits(row["predicted KL"], hand.interaction * total)
        if measured := plan["measured"]:
            for column, key in (
                ("KL, held-out text", "kl"),
                ("perplexity, held-out text", "perplexity"),
            ):
                known = [n for n in measured[key].values() if n is not None]
                assert fits(row[column], *known)
        counts = Counter(plan["assignment"].values())
        for recipe, count, share in re.findall(
            r"(\S+) (\d+) \(([\d.]+)", row["formats: components (share of the weights)"]
        ):
            members = [
                c for c in hand.components if plan["assignment"].get(c["name"]) == recipe
            ]
            if recipe == "kept":
                members = [c for c in hand.components if not c["quantizable"]]
                counts["kept"] = len(members)
            assert int(count) == counts[recipe]
            assert fits(
                share, 100 * sum(c["parameters"] for c in members) / hand.parameters
            )


def test_every_layer(hand: Hand, page: Callable[[str], Element]) -> None:
    alone = hand.alone()
    rows = table_of(page("layers"))
    shown = 0
    for component, row in rows.items():
        for recipe, text in row.items():
            if (component, recipe) in alone:
                expected = alone[component, recipe]
                assert fits(text, *expected), (component, recipe)
                assert text.startswith("≈") == (len(expected) == 1)
                shown += 1
    assert shown == len(alone)
    weights = {c["name"]: c["parameters"] for c in hand.components}
    assert all(fits(row["weights"], weights[name]) for name, row in rows.items())


def test_the_answer(hand: Hand, page: Callable[[str], Element]) -> None:
    words = page("answer").words
    [name] = (
        name
        for name in hand.plans
        if name.startswith("recommended") and "own" not in name
    )
    size = hand.size(name)
    title = page("files").all("table")[0]
    files = table_of(title)
    [row] = (row for label, row in files.items() if label.startswith("recommended"))
    assert fits(re.search(r"llama\.cpp: (\S+ MB)", words)[1], size)  # type: ignore[index]
    share = re.search(r"(\d+ %) of the size of FP16", words)
    assert share
    assert fits(share[1], size / hand.size("uniform_fp16"))
    ours = next(j for j in hand.judged() if "KL" in j and fits(row["KL"], *j["KL"]))
    same = re.search(r"stays the same (\d+) times", words)
    assert same
    assert int(same[1]) == math.floor(ours["same top token, %"][0])
    assert row["KL"] in words
    assert (
        f"perplexity {row['token perplexity']}, original {files['original']['token perplexity']}"
        in words
    )


def test_the_timings(hand: Hand, page: Callable[[str], Element]) -> None:
    query = (
        "SELECT value FROM results WHERE kind = 'profile' AND name NOT LIKE '%partial'"
    )
    profiles = [json.loads(value) for (value,) in hand.rows(query)]
    tables = page("speed").all("table")
    for row in table_of(tables[0]).values():
        [profile] = (
            p
            for p in profiles
            if fits(row["size"], p["file_bytes"])
            and fits(row["peak memory"], p["peak_memory_bytes"])
        )
        timings = profile["timings"]
        speed = timings["tokens_per_second"]
        assert fits(row["speed"], speed["median"])
        assert fits(row["quartiles"], speed["low"], speed["high"])
        assert fits(row["load, s"], timings["load_seconds"]["median"])
        first, after = numbers(row["first token, ms"])
        assert fits(
            f"{first}", 1e3 * timings[f"first_token_seconds@{after:.0f}"]["median"]
        )
        bound = profile["bound"]
        assert fits(row["of the bound"], bound["share"])
        assert bound["share"] == pytest.approx(
            speed["median"] / bound["tokens_per_second"]
        )
        assert bound["tokens_per_second"] == pytest.approx(
            bound["read_bandwidth"] / bound["bytes_per_token"]
        )


def test_numbers_are_compared_to_their_last_digit() -> None:
    cases: Iterable[tuple[str, tuple[float, ...], bool]] = (
        ("4.00 MB", (4.004e6,), True),
        ("4.00 MB", (4.006e6,), False),
        ("4.5e-7 ± 4e-9", (4.54e-7, 4.4e-9), True),
        ("4.5e-7 ± 4e-9", (4.56e-7, 4.4e-9), False),
        ("36 %", (0.364,), True),
    )
    assert all(fits(text, *expected) is right for text, expected, right in cases)
