"""The report of one run: what is in it, what is said when something is missing, what never gets in."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kl_lens import planning
from kl_lens.base.errors import RunError
from kl_lens.cli.judging import json_benchmark as as_json, use_rows
from kl_lens.cli.main import main
from kl_lens.cli.run import row_of
from kl_lens.profiling.benchmark import Report
from kl_lens.reporting import write_report
from kl_lens.reporting.data import collect
from kl_lens.reporting.notebook import PlottedFrontier, PlottedTable, ReportFile
from kl_lens.reporting.sections.explorer import Explorer
from kl_lens.run.folder import Run
from kl_lens.run.records import ARTIFACT, Estimate, Quartiles, Subject
from kl_lens.targets import get_target
from tests.reporting.document import Element, read
from tests.reporting.sample import (
    BESIDES,
    about,
    add_target,
    export,
    make_run,
    store_score,
)

MakePage = Callable[..., str]
SECTIONS = ["answer", "sizes", "files", "prediction", "speed", "details", "provenance"]
HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></style><svg onload=alert(1)>",
    "' onmouseover='alert(1) <!-- ]]> -->",
)


def section(page: str, name: str) -> Element:
    element = read(page).with_id(name)
    assert element is not None
    return element


def marks(element: Element) -> list[str]:
    """The descriptions of dots and cells."""
    return [
        p.attributes["aria-label"]
        for p in element.all("path")
        if "aria-label" in p.attributes
    ]


def data_of(page: str) -> dict[str, Any]:
    block = read(page).with_id("explorer-data")
    assert block is not None
    return dict(json.loads(block.words))


def test_the_answer_comes_first_with_the_command_that_makes_it(sample_page: str) -> None:
    assert [e.attributes["id"] for e in read(sample_page).all("section")] == SECTIONS
    words = section(sample_page, "answer").words
    assert re.search(
        r"recommended: [\d.]+ kB, \d+ % of the size of FP16\.KL [\d.e-]+ ± [\d.e-]+ nats per token",
        words,
    )
    # Both on held-out text: the files' perplexity on test text is beside their own KL.
    assert re.search(r"perplexity [\d.]+, original 21.00 \(\+[\d.]+ %", words)
    assert re.search(
        r"Speed against the FP16 file on CPU: [\d.]+ \([\d.]+–[\d.]+\) times \(OpenVINO\)",
        words,
    )
    assert (
        "kl-lens plan --run runs/sample --max-bytes 80kB --name small --verify" in words
    )
    assert "kl-lens measure sample-mamba --run runs/sample" in words


def test_a_targets_choices_are_in_bytes_of_its_file_and_its_answer_names_the_nearest_stock_file(
    tmp_path: Path,
) -> None:
    with Run.open(
        add_target(make_run(tmp_path / "run", stages=("plan", "verify")))
    ) as run:
        table = run.table()
        folder = run.folder / "plans"
        expected = planning.build_problem(
            table, fixed_bytes=BESIDES, target=get_target("openvino")
        )
        assert collect(run).spaces["openvino"].problem == expected
        whole = planning.read_plan(folder / "recommended.json", table.components)
        exact = planning.read_plan(folder / "recommended-openvino.json", table.components)
        stock = [
            replace(
                planning.uniform_plan(table, name),
                name=f"stock.{name}",
                family="stock",
                target="openvino",
            )
            for name in ("int4", "int8")
        ]
        for plan in (exact, *stock):
            path = planning.plan_path(folder, plan.name)
            planning.write_plan(
                replace(plan, measured=whole.measured), path, table.components
            )
        words = section(write_report(run).read_text(encoding="utf-8"), "answer").words
        run.store("fixed_bytes", "openvino", None)
        assert (
            "No slider for OpenVINO: the run does not say what its"
            in write_report(run).read_text()
        )
    assert "INT8, the nearest stock file that is no larger" in words
    assert "loses 1 times as much" in words
    assert "INT4" not in words


def test_the_slider_and_the_map_have_the_recipe_of_every_component_at_every_size(
    sample_run: Path, sample_page: str
) -> None:
    with Run.open(sample_run) as run:
        view = collect(run)
    explorer = Explorer(view, view.spaces[None])
    [space] = data_of(sample_page)["spaces"]
    assert [row[0] for row in space["positions"]] == [p.bytes for p in explorer.positions]
    for row, position in zip(space["positions"], explorer.positions, strict=True):
        stored = [space["recipes"][recipe] for recipe in row[4]]
        assert stored == [position.stored[c.name] for c in explorer.components]


def test_a_file_that_loses_less_than_any_plan_of_its_size_is_on_the_frontier(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "run", stages=("plan", "verify"))
    with Run.open(folder) as run:
        path = planning.plan_path(folder / "plans", "uniform_int4")
        plan = planning.read_plan(path, run.table().components)
        assert plan.measured
        better = replace(plan.measured.kl, value=plan.measured.kl.value / 3)
        planning.write_plan(
            replace(plan, measured=replace(plan.measured, kl=better)),
            path,
            run.table().components,
        )
        view = collect(run)
    explorer = Explorer(view, view.spaces[None])
    [at] = [
        i
        for i, p in enumerate(explorer.positions)
        if p.file and p.file.name == "uniform_int4"
    ]
    assert all(p.kl < better.value for p in explorer.positions[at + 1 :])
    assert "No smaller loss is known" in explorer.words(explorer.positions[at])[2]
    assert all(
        "uniform_int4" not in explorer.words(p)[2] for p in explorer.positions[:at]
    )


def test_what_was_not_measured_is_predicted_by_page_and_plan_alike_and_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run", stages=())
    with Run.open(folder) as run:
        rows = [(c.name, "int4-g32", 0.0012) for c in run.table().candidates]
        rows.append((rows[0][0], "int4", 1e-9))  # has been measured since
        run.store(
            "screened", "calibration", {"limit": {"max_loss": 0.01}, "predicted": rows}
        )
        measured = run.table()
        predicted = run.table(predicted=True)
        view = collect(run)
        page = write_report(run).read_text(encoding="utf-8")
    assert len(predicted.measurements) == len(measured.measurements) + 17
    explorer = Explorer(view, view.spaces[None])
    guessed = [explorer.predicted(position) for position in explorer.positions]
    assert guessed[-1] == 0  # FP16
    at = guessed.index(max(guessed))
    assert (
        f"{guessed[at]} of 17 components predicted, not measured"
        in explorer.words(explorer.positions[at])[2]
    )
    assert "KL about 0.0012, predicted" in page
    assert "Hatched: predicted." in page
    assert "≈ 0.0012" in section(page, "details").words
    budget = ["--max-bytes", str(explorer.positions[at].bytes)]
    assert main(["plan", "--run", str(folder), *budget, "--json"]) == 0
    printed = capsys.readouterr()
    [plan] = json.loads(printed.out)
    assert (
        f"the KL of {guessed[at]} of 17 components was predicted"
        in printed.err.replace("\n", " ")
    )
    assert plan["predicted_kl"] == pytest.approx(explorer.positions[at].kl, rel=1e-9)
    with Run.open(
        folder
    ) as run:  # what plans of its own limit use, a staged search has measured
        limit = {"max_bytes": explorer.positions[at].bytes}
        run.store("screened", "calibration", {"limit": limit, "predicted": rows})
    assert main(["plan", "--run", str(folder), *budget, "--json"]) == 0
    printed = capsys.readouterr()
    assert "was predicted" not in printed.err
    assert json.loads(printed.out)[0]["predicted_kl"] > plan["predicted_kl"]


def test_a_ratio_that_is_not_to_fp16_is_not_shown_as_one_and_chance_is_called_chance(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "run", stages=("plan", "evaluate", "benchmark"))
    with Run.open(folder) as run:
        (score,) = [
            r
            for r in run.results("score")
            if r.subject.label == "openvino/recommended"
            and r.name.startswith("perplexity")
        ]
        score.value["values"]["token_perplexity_change"]["standard_error"] = 9.0
        score.value["runtime"] = {
            "found": "your choice",
            "version": "ggml 0.25.3, commit 0123abc",
        }
        run.store_result("score", *score)
        for subject, name, value in run.results("profile"):
            settings = {"ratios_to_fp16": False, "ratios_to": "gguf/small"}
            run.store_result("profile", subject, name, value | {"settings": settings})
        page = write_report(run).read_text(encoding="utf-8")
    assert "Speed against the FP16 file" not in section(page, "answer").words
    assert "no ratio is given" in section(page, "speed").words
    assert (
        "which may be chance" in section(page, "answer").words
    )  # within twice its error
    assert (
        "OpenVINO1.0 / ggml 0.25.3, commit 0123abc" in section(page, "provenance").words
    )


def test_screen_table_report_and_json_agree_on_what_a_speed_is_worth(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "run", stages=("plan", "evaluate", "benchmark"))
    busy = "the machine was busy (42 % stolen)"
    for low, high, brief, words in (
        (1.31, 1.47, "1.39 (1.31–1.47)", "1.39 (1.31–1.47) times"),
        (0.25, 2.12, "not measurable", f"not measurable here: {busy}"),
    ):
        ratio = Quartiles(1.39, low, high, 24).to_json()
        with Run.open(folder) as run:
            for subject, name, value in run.results("profile"):
                if value["protocol"] == "use":
                    changed = {
                        "ratios": {"tokens_per_second": ratio},
                        "load": {"stolen": 0.42},
                    }
                    run.store_result("profile", subject, name, value | changed)
            page = write_report(run).read_text(encoding="utf-8")
            view = collect(run)
        assert words in section(page, "answer").words
        speed = section(page, "speed")
        assert brief in speed.words
        drawn = [m for m in marks(speed) if "tokens per second" in m]
        assert (drawn == []) == (brief == "not measurable")  # no exact points beside it
        profiles = [p for p in view.profiles if p.protocol == "use"]
        ratios = as_json(Report(1e9, profiles))["profiles"][0]["ratios"]
        memory = {"prompt_lengths": [128], "memory": {"model_bytes": 1}}
        complete = [replace(p, settings=p.settings | memory) for p in profiles]
        assert brief in use_rows(complete)[0]["× FP16"]
        assert row_of(view, "recommended", "openvino")["speed, × FP16"] == brief
        unshown = {"low": low, "high": high, "repeats": 24, "not_measurable": busy}
        assert ratios == {
            "tokens_per_second": unshown if brief == "not measurable" else ratio
        }
    assert not re.search(r"1\.39 (\(0\.25|times)|FP16: 1\.39", page)


def test_tasks_samples_and_provenance_are_shown_and_places_on_the_authors_disk_are_not(
    sample_page: str,
) -> None:
    details = section(sample_page, "details")
    assert "arc_easy: acc" in details.words
    assert "0.413 ± 0.012" in details.words
    assert [q.words for q in details.all("blockquote")] == [
        f"The history of the city is long, says {subject}."
        for subject in ("original", "openvino/recommended")
    ]
    words = section(sample_page, "provenance").words
    for expected in (
        "f" * 16,
        "wikitext2",
        "train",
        "test",
        "42",
        "torch",
        "abc123",
        "kl-lens plan",
    ):
        assert expected in words
    for private in ("/somewhere/private", "elsewhere"):
        assert private not in sample_page


@pytest.mark.parametrize(
    ("stages", "absent"),
    [
        ((), {"answer", "files", "prediction", "speed"}),
        (("plan",), {"prediction", "speed"}),
        (("rank",), {"answer", "files", "speed"}),
    ],
)
def test_a_stage_that_was_not_done_has_no_section_and_leaves_no_gap(
    make_page: MakePage, stages: tuple[str, ...], absent: set[str]
) -> None:
    tree = read(make_page(stages=stages))
    assert [e.attributes["id"] for e in tree.all("section")] == [
        s for s in SECTIONS if s not in absent
    ]
    headings = [h.words for h in tree.all("h2")]
    assert [words.split()[0] for words in headings] == [
        str(n + 1) for n in range(len(headings))
    ]
    assert [a.words for a in tree.all("nav")[0].all("a")] == headings
    answer = tree.with_id("answer")
    assert (
        answer is None or "not measured yet" in answer.words
    )  # not verified: not called good


def test_hostile_names_of_everything_stay_text(tmp_path: Path) -> None:
    text = " ".join(HOSTILE)
    folder = make_run(
        tmp_path / "run",
        model=text,
        prompt=text,
        kinds=("in_proj", "<img src=x onerror=alert(1)>"),
    )
    with Run.open(folder) as run:
        for _, name, value in run.results("profile"):
            subject = Subject(ARTIFACT, settings={"path": HOSTILE[1]})
            changed = value | {"subject": subject.to_json(), "device": HOSTILE[0]}
            run.store_result("profile", subject, name, changed)
        tree = read(write_report(run).read_text(encoding="utf-8"))
    assert len(tree.all("script")) == 2  # our own, and its data
    assert tree.all("img") == []
    elements = [tree]
    for element in elements:
        elements += element.children
        assert not [key for key in element.attributes if key.startswith("on")]
    assert tree.all("h1")[0].words == f"KL Lens: {text}"
    assert tree.all("blockquote")[0].words.startswith(text)
    assert HOSTILE[0] in tree.with_id("speed").words


def test_an_empty_run_and_a_damaged_record_are_named(
    tmp_path: Path,
) -> None:
    empty = pytest.raises(RunError, match="has an empty journal; make a run with")
    with Run.create(tmp_path / "empty") as run, empty:
        write_report(run)
    folder = make_run(tmp_path / "run", stages=("plan",))
    with Run.open(folder) as run:
        with pytest.raises(RunError, match="is a folder"):
            write_report(run, tmp_path)
        subject = about(run, "torch", "small")
        run.store_result(
            "score", subject, "perplexity|t|d", {"subject": subject.to_json()}
        )
        with pytest.raises(RunError, match=r"score 'perplexity\|t\|d' cannot be read"):
            write_report(run)


def test_a_notebook_shows_the_page_the_frontier_and_the_table(sample_run: Path) -> None:
    with Run.open(sample_run) as run:
        table = PlottedTable(**vars(run.table()))
        page = ReportFile(write_report(run))
    assert page.is_file()
    assert page._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert "</script>" not in page._repr_html_()
    frontier = PlottedFrontier(planning.frontier(planning.build_problem(table)))
    assert len(frontier) > 1
    assert "predicted KL, nats" in frontier._repr_svg_()
    assert "var(" not in frontier._repr_svg_()  # programs that know no stylesheet
    drawn = table.plot("int8")._repr_svg_()
    assert drawn.count("int8: KL") == 17


def test_numbers_of_different_texts_are_never_beside_each_other_and_every_text_is_listed(
    tmp_path: Path,
) -> None:
    """A file was evaluated on a little text for both numbers, and later on another one for its perplexity."""
    folder = add_target(make_run(tmp_path / "run", stages=("plan", "evaluate")))
    with Run.open(folder) as run:
        plan = planning.read_plan(
            folder / "plans/recommended-openvino.json", run.table().components
        )
        export(run, "openvino", plan)
        file = about(run, "openvino", plan.name)
        little = {"dataset": "wikitext2", "split": "test", "window": 64, "stride": 64}
        few = little | {"limit": 2, "fingerprint": "def"}
        books = little | {"dataset": "books", "fingerprint": "987"}
        store_score(run, file, "divergence", few, 128, kl_mean=0.01, same_top=0.947)
        for subject, protocol, perplexity in (
            (about(run, "original"), few, 30.0),
            (file, few, 30.6),
            (about(run, "original"), books, 50.0),
            (file, books, 55.0),
        ):
            value = {"token_perplexity": perplexity}
            store_score(run, subject, "perplexity", protocol, 128, **value)
        page = write_report(run).read_text(encoding="utf-8")
    words = section(page, "answer").words
    assert "The likeliest next token stays the same 94 times in 100" in words
    assert "KL 0.01 nats per token; perplexity 30.60, original 30.00 (+2.0 %" in words
    assert "55.00" not in words
    texts = section(page, "provenance").all("table")[0].words
    for expected in ("calibration", "judging plans", "valid", "judging files", "books"):
        assert expected in texts
    assert "Exported, not evaluated yet" not in section(page, "files").words


def test_a_file_from_elsewhere_stands_on_the_chart_with_its_size_and_its_text(
    tmp_path: Path,
) -> None:
    folder = add_target(make_run(tmp_path / "run", stages=("plan", "evaluate")))
    path = tmp_path / "someones"
    path.mkdir()
    for name, size in (("openvino_model.xml", 1000), ("openvino_model.bin", 79_000)):
        (path / name).write_bytes(bytes(size))
    with Run.open(folder) as run:
        file = Subject(ARTIFACT, None, "openvino", {"path": str(path)})
        text = {"dataset": "books", "split": "test", "window": 64, "fingerprint": "a"}
        kl = Estimate(0.022, 0.001)
        store_score(run, file, "divergence", text, 128, kl_mean=kl)
        page = write_report(run).read_text(encoding="utf-8")
    sizes = section(page, "sizes")
    assert "someones\n80.00 kB\nKL 0.022 ± 0.001 nats per token, measured" in marks(sizes)
    assert "files from elsewhere" in sizes.words
    assert "files, on books:test" in sizes.words
