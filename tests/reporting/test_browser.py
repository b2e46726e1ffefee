"""The report in a real browser, from disk: it works, it is quiet, and nothing leaves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kl_lens.reporting import write_comparison, write_report
from kl_lens.runs import Run
from tests.reporting.sample import make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on PATH; Debian: apt install chromium, or ./test --all"
)

HOSTILE = '</script><script>alert(1)</script>"><img src=x onerror=alert(1)>'
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
# A loaded machine with two cores is slow; a page that hangs is slower still.
PATIENCE = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--no-first-run"]  # fmt: skip
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags, timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report in which everything from outside is hostile."""
    folder = make_run(tmp_path_factory.mktemp("browser") / "run", model=HOSTILE, prompt=HOSTILE)
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
    found = Opened(context.new_page())
    found.page.on("request", lambda request: found.requests.append(request.url))
    found.page.on("console", lambda message: found.messages.append(message.text))
    found.page.on("pageerror", lambda error: found.messages.append(str(error)))
    found.page.on("dialog", lambda dialog: (found.messages.append(dialog.message), dialog.dismiss()))
    found.page.goto(path.as_uri())
    return found


@pytest.fixture
def desktop(browser: Any, report: Path) -> Iterator[Opened]:
    found = opened(browser, report, DESKTOP)
    yield found
    found.page.context.close()


def column(page: Any, index: int) -> list[str]:
    script = f"[...document.querySelectorAll('#layers tbody tr:not([hidden])')].map(r => r.cells[{index}].textContent)"
    return list(page.evaluate(script))


def test_it_opens_without_a_request_or_a_message_and_nothing_hostile_runs(
    desktop: Opened, report: Path
) -> None:
    assert desktop.page.title() == f"KL Lens: {HOSTILE}"
    assert desktop.page.locator("h1").inner_text() == f"KL Lens: {HOSTILE}"
    assert HOSTILE in desktop.page.locator("blockquote").first.inner_text()
    assert desktop.page.locator("img").count() == 0
    assert desktop.requests == [report.as_uri()]
    assert desktop.messages == []


def test_a_click_on_a_column_sorts_the_table_by_number(desktop: Opened) -> None:
    page = desktop.page
    head = page.locator("#layers th", has_text="KL").first
    head.locator("button").click()
    falling = [float(v) for v in column(page, 5)]
    assert falling == sorted(falling, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    head.locator("button").click()
    rising = [float(v) for v in column(page, 5)]
    assert rising == sorted(rising)
    assert falling != rising
    page.locator("#layers th button", has_text="component").click()
    names = column(page, 0)
    assert names[0] == "backbone.embeddings"
    assert names.index("backbone.layers.2.mixer.in_proj") < names.index("backbone.layers.3.mixer.in_proj")
    assert desktop.messages == []


def test_filters_leave_the_rows_that_fit(desktop: Opened) -> None:
    page = desktop.page
    controls = page.locator(".controls")
    controls.locator("input").fill("layers.1.")
    controls.locator("select").nth(1).select_option("int4")
    assert set(column(page, 4)) == {"int4"}
    assert all(".1." in name for name in column(page, 0))
    assert controls.locator("output").inner_text() == "4 of 34 rows"
    controls.locator("select").nth(0).select_option("x_proj")
    assert column(page, 0) == ["backbone.layers.1.mixer.x_proj"]


def test_hovering_a_cell_shows_its_numbers(desktop: Opened) -> None:
    page, tip = desktop.page, desktop.page.locator("#tip")
    assert tip.is_hidden()
    page.locator("#sensitivity figure .cell").first.hover()
    assert "nats/token" in tip.inner_text()
    assert "±" in tip.inner_text()
    page.locator("h1").hover()
    assert tip.is_hidden()


def test_the_keyboard_reaches_every_mark_of_a_figure(desktop: Opened) -> None:
    page, tip = desktop.page, desktop.page.locator("#tip")
    first = page.locator("#sensitivity figure g.marks").first.locator("> [tabindex='0']")
    first.focus()
    page.keyboard.press("ArrowRight")
    second = tip.inner_text()
    page.keyboard.press("ArrowRight")
    assert tip.inner_text() != second
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == page.evaluate(
        "document.getElementById('tip').textContent"
    )
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_a_strip_names_the_component_under_the_pointer(desktop: Opened) -> None:
    page = desktop.page
    strip = page.locator("svg[data-codes]").first
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 5)
    assert page.locator("#tip").inner_text().split("\n")[0] == "backbone.embeddings"
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 5)
    assert page.locator("#tip").inner_text().split("\n")[0] == "backbone.layers.3.mixer.out_proj (block 3)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_fits_the_screen_and_keeps_its_contrast(
    browser: Any, report: Path, size: dict[str, int], scheme: str
) -> None:
    found = opened(browser, report, size, color_scheme=scheme)
    page = found.page
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
    ink, paper = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
    assert (_brightness(ink) > _brightness(paper)) == (scheme == "dark")
    assert abs(_brightness(ink) - _brightness(paper)) > 150
    small = page.evaluate(
        "[...document.querySelectorAll('svg .t')].filter(t => t.textContent.trim() && "
        "t.getScreenCTM().a * parseFloat(getComputedStyle(t).fontSize) < 8.5).length"
    )
    assert small == 0
    assert _clipped(page) == []
    assert found.requests == [report.as_uri()]
    assert found.messages == []
    page.context.close()


def _brightness(colour: str) -> float:
    numbers = [float(n) for n in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    return sum(numbers) / 3


def _clipped(page: Any) -> list[str]:
    """Labels of figures that stick out of the page, or out of a figure that cannot scroll."""
    return list(
        page.evaluate(
            """[...document.querySelectorAll('figure svg .t, .ramp svg .t')].filter(t => {
                const box = t.getBoundingClientRect(), scroller = t.closest('.scroll');
                if (!box.width || (scroller && scroller.scrollWidth > scroller.clientWidth)) return false;
                return box.left < -0.5 || box.right > document.documentElement.clientWidth + 0.5;
            }).map(t => t.textContent)"""
        )
    )


def test_the_button_switches_between_light_and_dark(desktop: Opened) -> None:
    page = desktop.page
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator(".toggle").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert page.locator(".toggle").inner_text() == "Light"


def test_a_finger_gets_the_numbers_too(browser: Any, report: Path) -> None:
    found = opened(browser, report, PHONE, has_touch=True, is_mobile=True)
    found.page.locator("#sensitivity figure .cell").nth(2).tap()
    assert "nats/token" in found.page.locator("#tip").inner_text()
    found.page.context.close()


def test_without_scripts_everything_is_still_there(browser: Any, report: Path) -> None:
    found = opened(browser, report, DESKTOP, java_script_enabled=False)
    page = found.page
    assert page.locator("section").count() == 7
    assert page.locator("#layers tbody tr").count() == 34
    assert page.locator("#sensitivity figure .cell").first.locator("title").count() == 1
    assert page.locator(".controls").is_hidden()
    assert page.locator(".toggle").is_hidden()
    page.context.close()


def test_it_prints_on_white_without_controls(browser: Any, report: Path) -> None:
    found = opened(browser, report, DESKTOP, color_scheme="dark")
    page = found.page
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".controls").is_hidden()
    assert page.evaluate(
        "document.querySelector('.tall').scrollHeight <= document.querySelector('.tall').clientHeight"
    )
    page.context.close()


def test_runs_side_by_side_open_as_quietly(browser: Any, report: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", model="other", blocks=30)
    path = write_comparison([report.parent, other], tmp_path / "comparison.html")
    found = opened(browser, path, PHONE)
    assert found.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert found.requests == [path.as_uri()]
    assert found.messages == []
    assert _clipped(found.page) == []
    found.page.context.close()
