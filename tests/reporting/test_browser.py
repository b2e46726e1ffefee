"""The report in a real browser, from disk: it works, it is quiet, and nothing leaves."""

import csv
import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kl_lens import planning
from kl_lens.cli.main import main
from kl_lens.reporting import write_report
from kl_lens.reporting.data import collect
from kl_lens.run.folder import Run
from tests.reporting.sample import make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed"
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no chromium on PATH; Debian: apt install chromium, or ./test --all",
)

HOSTILE = '</script><script>alert(1)</script>"><img src=x onerror=alert(1)>'
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
# A loaded machine with two cores is slow; a page that hangs is slower still.
PATIENCE = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    flags = [
        f"--{flag}"
        for flag in (
            "no-sandbox",
            "disable-gpu",
            "disable-background-networking",
            "no-first-run",
        )
    ]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=flags, timeout=PATIENCE
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report in which everything from outside is hostile."""
    folder = make_run(
        tmp_path_factory.mktemp("browser") / "run", model=HOSTILE, prompt=HOSTILE
    )
    with Run.open(folder) as run:
        return write_report(run)


@dataclass
class Opened:
    page: Any
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


def opened(browser: Any, path: Path, size: dict[str, int], **settings: Any) -> Opened:
    context = browser.new_context(viewport=size, **settings)
    context.set_default_timeout(PATIENCE)
    tab = Opened(context.new_page())
    tab.page.on("request", lambda request: tab.requests.append(request.url))
    tab.page.on("console", lambda message: tab.messages.append(message.text))
    tab.page.on("pageerror", lambda error: tab.messages.append(str(error)))
    tab.page.on(
        "dialog", lambda dialog: (tab.messages.append(dialog.message), dialog.dismiss())
    )
    tab.page.goto(path.as_uri())
    return tab


@pytest.fixture(scope="module")
def desktop(browser: Any, report: Path) -> Opened:
    """One page for all tests that work on it; none needs what another leaves."""
    return opened(browser, report, DESKTOP)


def column(page: Any, index: int) -> list[str]:
    cell = f"(c => c.dataset.v ?? c.textContent)(r.cells[{index}])"
    script = f"[...document.querySelectorAll('#layers tbody tr:not([hidden])')].map(r => {cell})"
    return list(page.evaluate(script))


def slide(page: Any, index: int) -> dict[str, str]:
    """Moves the slider; gives back bytes, KL and the name of a file."""
    move = "(s, i) => { s.value = i; s.dispatchEvent(new Event('input')); }"
    page.locator(".explorer input[type=range]").first.evaluate(
        f"(s) => ({move})(s, {index})"
    )
    return dict(page.locator(".explorer").first.evaluate("e => ({...e.dataset})"))


def test_it_opens_without_a_request_or_a_message_and_nothing_hostile_runs(
    desktop: Opened, report: Path
) -> None:
    assert desktop.page.title() == f"KL Lens: {HOSTILE}"
    assert desktop.page.locator("h1").inner_text() == f"KL Lens: {HOSTILE}"
    assert HOSTILE in desktop.page.locator("blockquote").first.inner_text()
    assert desktop.page.locator("img").count() == 0
    assert desktop.requests == [report.as_uri()]
    assert desktop.messages == []


def test_tables_sort_by_number_and_names_as_people_count(desktop: Opened) -> None:
    page = desktop.page
    page.get_by_text("Every layer").first.click()
    head = page.locator("#layers thead th", has_text="int4").first
    orders = []
    for direction in ("descending", "ascending"):
        head.locator("button").click()
        orders.append([float(v.split()[0]) for v in column(page, 3)])
        assert head.get_attribute("aria-sort") == direction
    assert orders[0] == sorted(orders[0], reverse=True) != orders[1] == sorted(orders[1])
    page.locator("#layers thead th button", has_text="component").click()
    names = column(page, 0)
    assert names[0] == "backbone.embeddings"
    assert names.index("backbone.layers.2.mixer.in_proj") < names.index(
        "backbone.layers.3.mixer.in_proj"
    )
    assert desktop.messages == []


def test_the_slider_has_every_size_never_rises_and_agrees_with_plan_at_twenty(
    desktop: Opened, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run.open(report.parent) as run:
        view = collect(run)
    least, _ = view.spaces[None].problem.reach("bytes")
    last = int(
        desktop.page.locator(".explorer input[type=range]").first.get_attribute("max")
    )
    stops = [slide(desktop.page, index) for index in range(last + 1)]
    sizes = [int(stop["bytes"]) for stop in stops]
    kls = [float(stop["kl"]) for stop in stops]
    assert (sizes[0], sizes[-1]) == (least, view.fp16_bytes)
    assert sizes == sorted(set(sizes))
    assert kls == sorted(kls, reverse=True)
    assert kls[-1] == 0
    plans = [stop for stop in stops if not stop["file"]]
    assert len(plans) < len(stops)  # files that were measured are on it too
    for stop in [plans[round(i * (len(plans) - 1) / 19)] for i in range(20)]:
        assert (
            main(
                [
                    "plan",
                    "--run",
                    str(report.parent),
                    "--max-bytes",
                    stop["bytes"],
                    "--json",
                ]
            )
            == 0
        )
        [plan] = json.loads(capsys.readouterr().out)
        assert plan["bytes"] == int(stop["bytes"])
        assert plan["predicted_kl"] == pytest.approx(float(stop["kl"]), rel=1e-9)


def test_the_command_on_the_page_makes_the_plan_on_the_page(
    desktop: Opened, report: Path, tmp_path: Path
) -> None:
    page = desktop.page
    field = desktop.page.get_by_label("Size at most")
    field.fill("57 kB")
    field.press("Enter")
    words = shlex.split(page.locator(".made").first.inner_text())
    assert words[:4] == ["kl-lens", "plan", "--run", str(report.parent)]
    folder = tmp_path / "run"
    shutil.copytree(report.parent, folder)
    assert (
        main([str(folder) if word == str(report.parent) else word for word in words[1:]])
        == 0
    )
    with Run.open(folder) as run:
        plan = planning.read_plan(
            folder / "plans" / f"{words[-1]}.json", run.table().components
        )
    assert str(plan.bytes) == page.locator(".explorer").first.get_attribute("data-bytes")
    assert plan.bytes is not None
    assert plan.bytes <= 57_000
    page.get_by_label("KL at most").fill("0.05")
    page.get_by_label("KL at most").press("Enter")
    assert float(page.locator(".explorer").first.get_attribute("data-kl")) <= 0.05
    before = page.locator(".explorer").first.get_attribute("data-bytes")
    for words, reply in (("5%", "“5%” is no KL"), ("soon", "is no KL")):
        page.get_by_label("KL at most").fill(words)
        page.get_by_label("KL at most").press("Enter")
        assert reply in page.locator(".said").first.inner_text()
        assert page.locator(".explorer").first.get_attribute("data-bytes") == before
    assert desktop.messages == []


def test_commands_and_tables_can_be_taken_along(browser: Any, report: Path) -> None:
    tab = opened(browser, report, DESKTOP, permissions=["clipboard-read"])
    page = tab.page
    tool = page.locator("pre + .tool:visible").first
    tool.click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == tool.evaluate("e => e.previousElementSibling.textContent")
    with page.expect_download() as started:
        page.locator("#files .tool:visible", has_text="CSV").first.click()
    content = Path(started.value.path()).read_text(encoding="utf-8-sig")
    rows = list(csv.reader(content.splitlines()))
    assert rows[0][:3] == ["file", "size", "KL"]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert int(rows[2][1]) > 1000  # bytes
    assert tab.messages == []
    page.context.close()


def test_the_map_shows_one_format_or_the_plan_and_opens_a_component(
    desktop: Opened,
) -> None:
    page = desktop.page
    colours = "[...document.querySelectorAll('.cells_marks path')].map(p => p.getAttribute('fill'))"
    select = page.locator(".map select")
    select.select_option(label="int8")
    int8 = page.evaluate(colours)
    select.select_option(label="int4")
    int4 = page.evaluate(colours)
    assert int4 != int8
    level = [
        [int(fill.removeprefix("var(--h").partition(",")[0]) for fill in fills]
        for fills in (int4, int8)
    ]
    assert all(
        low >= high for low, high in zip(*level, strict=True)
    )  # the same scale for both
    select.select_option(label="the plan above")
    slide(page, 0)
    assert {fill.partition(",")[0] for fill in page.evaluate(colours)} == {"var(--b4"}
    slide(page, 10**6)
    assert {fill.partition(",")[0] for fill in page.evaluate(colours)} == {"var(--b16"}
    # A dark line and a light one: one is seen on every cell, in both modes.
    strokes = "[...document.querySelectorAll('#hatch path')].map(p => getComputedStyle(p).stroke)"
    assert page.evaluate(strokes) == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]
    cell = page.locator(".cells_marks path").nth(3)
    cell.hover()
    tip = page.locator("#tip")
    assert "fp16" in tip.inner_text()
    cell.click()
    assert page.locator(".component li").count() == 2
    page.keyboard.press("ArrowRight")
    assert (
        page.evaluate("document.activeElement.getAttribute('aria-label')")
        == tip.inner_text()
    )
    page.keyboard.press("Escape")
    assert tip.is_hidden()


@pytest.mark.parametrize(
    ("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"]
)
def test_it_fits_the_screen_and_keeps_its_contrast(
    browser: Any, report: Path, size: dict[str, int], scheme: str
) -> None:
    phone = {"has_touch": True, "is_mobile": True} if size == PHONE else {}
    tab = opened(browser, report, size, color_scheme=scheme, **phone)
    page = tab.page
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
    assert size == PHONE or page.evaluate("document.documentElement.scrollHeight") <= 6000
    ink, paper = page.evaluate(
        "(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))"
    )
    assert (_brightness(ink) > _brightness(paper)) == (scheme == "dark")
    assert abs(_brightness(ink) - _brightness(paper)) > 150
    small = page.evaluate(
        "[...document.querySelectorAll('figure text')].filter(t => t.getBoundingClientRect().width && "
        "Math.hypot(t.getScreenCTM().a, t.getScreenCTM().b) * parseFloat(getComputedStyle(t).fontSize) < 8.5).length"
    )
    assert small == 0
    # Labels of figures that stick out of the page, or out of a figure that cannot scroll.
    clipped = page.evaluate(
        """[...document.querySelectorAll('figure text')].filter(t => {
            const box = t.getBoundingClientRect(), scroller = t.closest('.scroll');
            if (!box.width || (scroller && scroller.scrollWidth > scroller.clientWidth)) return false;
            return box.left < -0.5 || box.right > document.documentElement.clientWidth + 0.5;
        }).map(t => t.textContent)"""
    )
    assert clipped == []
    if phone:  # a finger gets the numbers too
        page.locator(".cells_marks path").nth(2).tap()
        assert "KL" in page.locator("#tip").inner_text()
    assert tab.requests == [report.as_uri()]
    assert tab.messages == []
    page.context.close()


def test_what_can_be_used_has_an_edge_of_three_to_one(browser: Any, report: Path) -> None:
    for scheme in ("light", "dark"):
        page = opened(browser, report, DESKTOP, color_scheme=scheme).page
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        for used in (".limit", "select", ".tool", "pre", ".tall"):
            element = page.locator(used).first
            edge = element.evaluate("e => getComputedStyle(e).borderTopColor")
            light, dark = sorted(map(_luminance, (edge, paper)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 3, (scheme, used)
        page.context.close()


def _luminance(colour: str) -> float:
    """Relative, of sRGB."""
    shares = [
        float(n) / 255 for n in colour.removeprefix("rgb(").removesuffix(")").split(",")
    ]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _brightness(colour: str) -> float:
    numbers = [float(n) for n in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    return sum(numbers) / 3


def test_without_scripts_everything_is_still_there(browser: Any, report: Path) -> None:
    tab = opened(browser, report, DESKTOP, java_script_enabled=False)
    page = tab.page
    assert page.locator("section").count() == 7
    assert "nats per token" in page.locator("#answer article").inner_text()
    assert page.locator("#layers tbody tr").count() == 17
    assert page.locator("#sizes .line svg .dots_marks path").count() > 10
    assert page.locator("#sizes .cells_marks path").count() == 17
    assert page.locator(".reading").inner_text()
    assert page.locator("input[type=range], .switch, .knobs").first.is_hidden()
    assert page.locator(".tool").count() == 0
    page.context.close()
