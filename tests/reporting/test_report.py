"""The report of one run: what is in it, what is said when something is missing, what never gets in."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kl_lens import planning
from kl_lens.base.errors import RunError
from kl_lens.cli.benchmark import as_json, use_rows
from kl_lens.cli.run import row_of
from kl_lens.planning import build_problem
from kl_lens.profiling import Machine, Report
from kl_lens.profiling.machine import Bandwidth
from kl_lens.reporting import write_report
from kl_lens.reporting.answer import recommend
from kl_lens.reporting.data import collect
from kl_lens.reporting.explorer import DIGITS, coded
from kl_lens.run.folder import Run
from kl_lens.run.records import ARTIFACT, Quartiles, Subject
from kl_lens.study.benchmark import BenchmarkResult
from kl_lens.targets import get_target
from tests.reporting.document import Element, read
from tests.reporting.sample import BESIDES, NOISE, WINDOWS, about, add_target, make_run

MakePage = Callable[..., str]
SECTIONS = ["answer", "sensitivity", "prediction", "sizes", "speed", "details", "provenance"]
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><script>alert(1)</script>",
    "</title></style><svg onload=alert(1)>",
    "' onmouseover='alert(1)",
    "<!-- ]]> -->",
)


def section(page: str, name: str) -> Element:
    found = read(page).with_id(name)
    assert found is not None
    return found


def test_all_sections_are_there_in_order(sample_page: str) -> None:
    sections = [e.attributes["id"] for e in read(sample_page).all("section")]
    assert sections == SECTIONS
    numbers = [h.words.split()[0] for h in read(sample_page).all("h2")]
    assert numbers == [str(n + 1) for n in range(len(SECTIONS))]


def test_the_answer_comes_first_in_plain_words_with_its_command(sample_page: str) -> None:
    words = section(sample_page, "answer").words
    assert re.search(r"recommended: [\d.]+ kB, \d+ % of FP16", words)
    assert re.search(r"Perplexity (rises|falls|goes)", words)
    assert re.search(
        r"Speed against the FP16 file on CPU: [\d.]+ \([\d.]+–[\d.]+\) times \(OpenVINO\)", words
    )
    assert "kl-lens plan --run runs/sample --max-bytes 80kB --name recommended --verify" in words
    assert "kl-lens measure sample-mamba --run runs/sample" in words


def test_the_heat_map_has_a_cell_for_every_component_and_format(sample_page: str) -> None:
    titles = [t.words for t in section(sample_page, "sensitivity").all("title")]
    for name in ("backbone.layers.0.mixer.in_proj", "backbone.layers.3.mixer.dt_proj"):
        assert [t for t in titles if t.startswith(f"{name}\nint4: KL ")]
        assert [t for t in titles if t.startswith(f"{name}\nint8: KL ")]
    assert [t for t in titles if t.startswith("backbone.embeddings\nint4")]


def test_the_noise_floor_is_named_and_cells_below_it_are_hatched(sample_page: str) -> None:
    found = section(sample_page, "sensitivity")
    assert f"noise floor {NOISE:.2e}".replace("e-07", "e-7") in found.words
    hatched = [p for p in found.all("path") if p.attributes.get("class") == "hatch"]
    buried = [t.words for t in found.all("title") if "within the noise of measuring" in t.words]
    assert len(hatched) == len(buried) > 0
    assert all("dt_proj" in words for words in buried)


def test_tau_is_given_for_every_metric_format_and_calibration(sample_page: str) -> None:
    found = section(sample_page, "prediction")
    rows = [row.words for table in found.all("table") for row in table.all("tr")]
    for metric in ("KL", "reverse KL", "MSE of logits", "SQNR", "Δ cross-entropy"):
        for text in ("in domain, 4 of 4", "books, 4 of 4"):
            for format_name in ("int4", "int8"):
                assert [r for r in rows if metric in r and text in r and format_name in r], (metric, text)
    assert "95 % interval" in found.words
    dots = [t.words for t in found.all("title") if "change in perplexity" in t.words]
    assert len(dots) == 2 * 17  # 4 blocks of 4 kinds and the embedding, in two formats


def test_every_plan_is_in_the_size_figures_with_the_frontier(sample_page: str) -> None:
    found = section(sample_page, "sizes")
    titles = {t.words.partition("\n")[0] for t in found.all("title")}
    assert {"the original", "INT8", "INT4", "recommended", "small"} <= titles
    assert {f"kl_point{i:02}" for i in range(1, 11)} <= titles
    captions = [f.all("b")[0].words for f in found.all("figure")]
    assert captions == ["Size against perplexity: weights alone", "Predicted against measured"]


def test_the_first_figure_is_size_against_kl_with_the_frontier_and_plans_that_can_be_pinned(
    sample_page: str,
) -> None:
    found = section(sample_page, "answer").all("figure")[0]
    assert "Size against KL: weights alone" in found.words
    assert "frontier, predicted" in found.words
    plans = {p.attributes["data-plan"] for p in found.all("path") if "data-plan" in p.attributes}
    assert {"/recommended", "/uniform_int8", "/kl_point05"} <= plans


def test_speed_is_drawn_per_target_with_the_bandwidth_bound(sample_page: str) -> None:
    found = section(sample_page, "speed")
    for words in (
        "Throughput against size",
        "limit of the machine",
        "OpenVINO",
        "llama.cpp",
    ):
        assert words in found.words
    assert "Latency against size" not in found.words  # the inverse of throughput says nothing new
    dashed = [p for p in found.all("path") if "dashed" in p.attributes.get("class", "")]
    assert len(dashed) >= 2  # two targets; the key has one more
    assert "9.00 GB per second" in found.words


def test_each_device_and_protocol_has_its_own_figures(sample_page: str) -> None:
    headings = [h.words for h in section(sample_page, "speed").all("h3")]
    assert headings == [
        "CPU, 2 threads: as a user sees it",
        "GPU.0, 1 thread: the published protocol (benchmark_app)",
    ]


def test_a_ratio_that_is_not_to_fp16_is_not_shown_as_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", stages=("plan", "evaluate", "benchmark"))
    with Run.open(folder) as run:
        for subject, name, value in run.results("profile"):
            settings = {"ratios_to_fp16": False, "ratios_to": "gguf/small"}
            run.store_result("profile", subject, name, value | {"settings": settings})
        page = write_report(run).read_text(encoding="utf-8")
    assert "Speed against the FP16 file" not in section(page, "answer").words
    assert "no ratio is given" in section(page, "speed").words


@pytest.mark.parametrize(
    ("low", "high", "brief", "words"),
    [
        (1.31, 1.47, "1.39 (1.31–1.47)", "1.39 (1.31–1.47) times"),
        (0.25, 2.12, "not measurable", "not measurable here: the machine was busy (42 % stolen)"),
    ],
)
def test_screen_table_report_and_json_agree_on_what_a_speed_is_worth(
    tmp_path: Path, low: float, high: float, brief: str, words: str
) -> None:
    folder = make_run(tmp_path / "run", stages=("plan", "evaluate", "benchmark"))
    ratio = Quartiles(1.39, low, high, 24).to_json()
    with Run.open(folder) as run:
        for subject, name, value in run.results("profile"):
            if value["protocol"] == "use":
                changed = {"ratios": {"tokens_per_second": ratio}, "load": {"stolen": 0.42}}
                run.store_result("profile", subject, name, value | changed)
        page = write_report(run).read_text(encoding="utf-8")
        view = collect(run)
    assert words in section(page, "answer").words
    assert brief in section(page, "speed").words
    profiles = [p for p in view.profiles if p.protocol == "use"]
    machine = Machine(Bandwidth(1e9, 1e9, 2, 1 << 20, 3), 1e9, None)
    told = as_json(BenchmarkResult(Report(machine, profiles), folder))["profiles"][0]["ratios"]
    memory = {"prompt_lengths": [128], "memory": {"model_bytes": 1}}
    complete = [replace(p, settings=p.settings | memory) for p in profiles]
    assert brief in use_rows(complete)[0]["× FP16"]
    assert row_of(view, "recommended", "openvino")["speed, × FP16"] == brief
    if brief == "not measurable":
        assert not re.search(r"1\.39 (\(0\.25|times)|FP16: 1\.39", page)
        expected = {"low": low, "high": high, "repeats": 24}
        expected["not_measurable"] = "the machine was busy (42 % stolen)"
        assert told == {"tokens_per_second": expected}
    else:
        assert told == {"tokens_per_second": ratio}


def test_a_change_within_twice_its_error_is_called_chance(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", stages=("plan", "evaluate"))
    with Run.open(folder) as run:
        (found,) = [
            r for r in run.results("score")
            if r.subject.label == "openvino/recommended" and r.name.startswith("perplexity")
        ]  # fmt: skip
        found.value["values"]["token_perplexity_change"]["standard_error"] = 9.0
        run.store_result("score", *found)
        page = write_report(run).read_text(encoding="utf-8")
    assert "which may be chance" in section(page, "answer").words


def test_the_layer_table_has_every_component_with_its_kl_in_every_recipe(sample_page: str) -> None:
    table = read(sample_page).with_id("layers")
    assert table is not None
    heads = [th.words for th in table.all("th")]
    assert heads == ["component", "kind", "block", "weights", "int4", "int8", "in the plan"]
    rows = table.all("tr")[1:]
    assert len(rows) == 17
    assert all(row.words.count("±") == 2 for row in rows)


def data_of(page: str) -> dict[str, Any]:
    block = read(page).with_id("explorer-data")
    assert block is not None
    return dict(json.loads(block.words))


def test_the_page_holds_every_choice_that_planning_has_to_the_byte(
    sample_run: Path, sample_page: str
) -> None:
    of_run = data_of(sample_page)["run"]
    [space] = of_run["spaces"]
    with Run.open(sample_run) as run:
        problem = build_problem(run.table())
    assert space["fixed"] == problem.fixed_bytes
    recipes = space["recipes"]
    for (members, choices, sizes, kls), group in zip(space["groups"], problem.groups, strict=True):
        assert tuple(of_run["components"][m][0] for m in members) == group.members
        assert [recipes[c] for c in choices] == [c.recipe for c in group.choices]
        assert (sizes, kls) == ([c.bytes for c in group.choices], [c.kl for c in group.choices])


def test_a_targets_choices_are_in_bytes_of_its_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", stages=())
    with Run.open(add_target(folder)) as run:
        table, spaces = run.table(), collect(run).spaces
    assert list(spaces) == ["openvino"]
    expected = planning.build_problem(table, fixed_bytes=BESIDES, target=get_target("openvino"))
    assert spaces["openvino"].problem.groups == expected.groups
    assert spaces["openvino"].problem.fixed_bytes == expected.fixed_bytes
    cheapest = {c.recipe: c.bytes for c in expected.groups[0].choices}
    assert cheapest != {c.recipe: c.bytes for c in build_problem(table).groups[0].choices}


def test_without_a_slider_the_page_says_why(tmp_path: Path) -> None:
    with Run.open(add_target(make_run(tmp_path / "run"))) as run:
        run.store("fixed_bytes", "openvino", None)
        page = write_report(run).read_text()
        assert "No slider for OpenVINO: the run does not say what its OpenVINO file needs" in page
        planning.store_fixed_bytes(run, get_target("openvino"), BESIDES)
        page = write_report(run).read_text()
    assert "No slider" not in page


def test_speeds_in_the_page_are_those_of_planning(tmp_path: Path) -> None:
    with Run.open(add_target(make_run(tmp_path / "run"))) as run:
        page = write_report(run).read_text()
        [space] = [space for space in data_of(page)["run"]["spaces"] if space["target"] == "openvino"]
        table, target = run.table(), get_target("openvino")
        speed = planning.speed_model(run, table, target)
    problem = planning.build_problem(table, speed=speed, target=target, fixed_bytes=BESIDES)
    given = space["speed"]
    assert given["constant"] == problem.fixed_seconds
    assert speed.basis == given["basis"]
    for (members, recipes, sizes, _), group in zip(space["groups"], problem.groups, strict=True):
        found = [
            0.0 if members[0] == given["lookup"] else given["rates"][r] * b
            for r, b in zip(recipes, sizes, strict=True)
        ]
        assert found == [choice.seconds for choice in group.choices]
    # The sample's seconds are proportional to its files' bytes.
    assert speed.off < 1e-3
    assert min(speed.rates.values()) == pytest.approx(max(speed.rates.values()), rel=1e-3)


def test_the_page_holds_every_plan_and_every_measurement(sample_run: Path, sample_page: str) -> None:
    of_run = data_of(sample_page)["run"]
    [space] = of_run["spaces"]
    with Run.open(sample_run) as run:
        view = collect(run)
    assert {p["name"] for p in space["plans"]} == {p.name for p in view.plans}
    names = [c[0] for c in of_run["components"]]
    for plan in space["plans"]:
        stored = {n: space["recipes"][DIGITS.index(d)] for n, d in zip(names, plan["codes"], strict=True)}
        found = view.plan(plan["name"])
        assert found is not None
        assert stored == found.stored
    assert [len(rows) for rows in space["measured"]] == [2] * 17
    windows = space["measured"][0][0][4]
    assert len(windows) == 2 * WINDOWS


def test_a_windows_kl_survives_its_two_digits_to_a_percent() -> None:
    values = [1e-11, 3.3e-7, 0.0123, 4.5, 0.0, math.inf]
    text = coded(values)
    levels = [62 * DIGITS.index(a) + DIGITS.index(b) for a, b in zip(text[::2], text[1::2], strict=True)]
    back = [1e-12 * 10 ** (15 * level / 3843) for level in levels]
    assert back[:4] == pytest.approx(values[:4], rel=0.01)
    assert back[4:] == pytest.approx([1e-12, 1e3])


def test_tasks_and_samples_are_shown(sample_page: str) -> None:
    found = section(sample_page, "details")
    assert "arc_easy: acc" in found.words
    assert "0.413 ± 0.012" in found.words
    quotes = [q.words for q in found.all("blockquote")]
    assert quotes == [
        "The history of the city is long, says original.",
        "The history of the city is long, says openvino/recommended.",
    ]


def test_provenance_names_the_library_that_judged_a_file(sample_run: Path, tmp_path: Path) -> None:
    """Which may never have been timed."""
    folder = shutil.copytree(sample_run, tmp_path / "run")
    with Run.open(folder) as run:
        score = next(s for s in collect(run).scores if s.subject.what == ARTIFACT)
        runtime = {"found": "your choice", "version": "ggml 0.25.3, commit 0123abc"}
        run.store_result("score", score.subject, "again", replace(score, runtime=runtime).to_json())
        words = section(write_report(run).read_text(encoding="utf-8"), "provenance").words
    assert "judged, OpenVINOggml 0.25.3, commit 0123abc" in words


def test_provenance_names_model_text_splits_seeds_versions_and_commands(sample_page: str) -> None:
    words = section(sample_page, "provenance").words
    for expected in (
        "ffffffffffffffff",
        "wikitext2",
        "train",
        "test",
        "42",
        "torch",
        "abc123",
        "kl-lens plan",
    ):
        assert expected in words


def test_places_on_the_authors_disk_stay_there(sample_page: str) -> None:
    assert "/somewhere/private" not in sample_page
    assert "/opt/venv" not in sample_page
    assert "elsewhere" not in sample_page


def test_nothing_on_the_page_asks_for_anything(sample_page: str) -> None:
    tree = read(sample_page)
    for name in ("img", "iframe", "object", "embed", "video", "audio", "source", "base", "form"):
        assert tree.all(name) == []
    assert [e.attributes["href"] for e in tree.all("link")] == ["data:,"]
    assert all(a.attributes["href"].startswith("#") for a in tree.all("a"))
    assert all("src" not in s.attributes for s in tree.all("script"))
    style = "".join(s.words for s in tree.all("style"))
    assert re.findall(r"url\(([^)]*)\)", style) == ["#hatch"]
    assert "@import" not in style
    [policy] = [m for m in tree.all("meta") if m.attributes.get("http-equiv") == "Content-Security-Policy"]
    assert policy.attributes["content"].startswith("default-src 'none'")


@pytest.mark.parametrize(
    ("stages", "absent"),
    [
        ((), {"answer", "prediction", "sizes", "speed"}),
        (("plan",), {"prediction", "speed"}),
        (("rank",), {"answer", "sizes", "speed"}),
        (("plan", "evaluate"), {"prediction", "speed"}),
    ],
)
def test_a_stage_that_was_not_done_has_no_section_and_leaves_no_gap(
    make_page: MakePage, stages: tuple[str, ...], absent: set[str]
) -> None:
    tree = read(make_page(stages=stages))
    assert [e.attributes["id"] for e in tree.all("section")] == [s for s in SECTIONS if s not in absent]
    headings = [h.words for h in tree.all("h2")]
    assert [words.split()[0] for words in headings] == [str(n + 1) for n in range(len(headings))]
    assert [a.words for a in tree.all("nav")[0].all("a")] == headings


def test_an_empty_run_still_makes_a_page(tmp_path: Path) -> None:
    with Run.create(tmp_path / "empty") as run:
        page = write_report(run).read_text(encoding="utf-8")
    assert [s.attributes["id"] for s in read(page).all("section")] == ["provenance"]


def test_the_reader_chooses_whose_heat_maps_to_see(tmp_path: Path) -> None:
    with Run.open(add_target(make_run(tmp_path / "run"))) as run:
        found = section(write_report(run).read_text(encoding="utf-8"), "sensitivity")
    assert [label.words for label in found.all("label")] == ["OpenVINO", "weights alone"]
    panels = [e for e in found.all("div") if e.attributes.get("class") == "panel"]
    assert len(panels) == 2
    assert all("int4: KL " in panel.words for panel in panels)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_model_name_and_prompt_stay_text(make_page: MakePage, text: str) -> None:
    tree = read(make_page(model=text, prompt=text, stages=("generate",)))
    assert len(tree.all("script")) == 1  # our own
    assert tree.all("img") == []
    assert [key for e in _elements(tree) for key in e.attributes if key.startswith("on")] == []
    assert tree.all("h1")[0].words == f"KL Lens: {text}"
    assert tree.all("blockquote")[0].words.startswith(text)


def test_hostile_names_of_components_and_subjects_stay_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", kinds=("in_proj", "<img src=x onerror=alert(1)>"))
    with Run.open(folder) as run:
        for _, name, value in run.results("profile"):
            subject = Subject(ARTIFACT, settings={"path": HOSTILE[1]})
            run.store_result(
                "profile", subject, name, value | {"subject": subject.to_json(), "device": HOSTILE[0]}
            )
        page = write_report(run).read_text(encoding="utf-8")
    tree = read(page)
    assert tree.all("img") == []
    assert len(tree.all("script")) == 2
    assert HOSTILE[0] in section(page, "speed").words


def _elements(element: Element) -> list[Element]:
    return [element] + [e for child in element.children for e in _elements(child)]


def test_without_a_recommended_plan_the_smallest_that_loses_little_is_the_answer(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", stages=("plan", "evaluate"))
    (folder / "plans" / "recommended.json").unlink()
    with Run.open(folder) as run:
        view = collect(run)
    answer = recommend(view)
    assert answer is not None
    assert "within 2 % of the original's" in answer.rule
    kept = [
        p for p in view.plans
        if p.perplexity and p.original_perplexity and p.perplexity.value / p.original_perplexity <= 1.02
    ]  # fmt: skip
    assert answer.plan.bytes == min(p.bytes for p in kept)


def test_a_plan_that_was_not_verified_is_not_called_good(make_page: MakePage) -> None:
    words = section(make_page(stages=("plan",)), "answer").words
    assert "not measured yet" in words


@pytest.mark.slow
def test_400_components_in_8_recipes_stay_below_a_megabyte_and_a_half(large_run: Path) -> None:
    with Run.open(large_run) as run:
        path = write_report(run)
    page = path.read_text(encoding="utf-8")
    of_run = data_of(page)["run"]
    assert len(of_run["components"]) >= 400
    assert {len(rows) for rows in of_run["spaces"][0]["measured"]} == {8}
    assert 500_000 < path.stat().st_size < 1_500_000


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", stages=("plan",))
    with Run.open(folder) as run:
        subject = about(run, "torch", "small")
        run.store_result("score", subject, "perplexity|t|d", {"subject": subject.to_json()})
        with pytest.raises(RunError, match=r"score 'perplexity\|t\|d' cannot be read"):
            write_report(run)


def test_a_report_cannot_replace_a_folder(sample_run: Path, tmp_path: Path) -> None:
    with Run.open(sample_run) as run, pytest.raises(RunError, match="is a folder"):
        write_report(run, tmp_path)
