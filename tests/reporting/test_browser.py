"""The report in a real browser, from disk: it works, it is quiet, and nothing leaves."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kl_lens import planning
from kl_lens.cli.main import main
from kl_lens.reporting import write_report
from kl_lens.run.folder import Run
from kl_lens.targets import get_target
from tests.reporting.sample import BESIDES, add_target, make_run

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


def ask(page: Any, budget: float) -> tuple[int, float]:
    """Types a budget; gives back the bytes and the summed KL of the plan that appears, once it is proven."""
    field = page.get_by_label("Budget, exactly")
    field.fill(str(budget))
    field.press("Enter")
    return plan_of(page)


def plan_of(page: Any) -> tuple[int, float]:
    page.locator("#explorer[data-settled][data-exact=true]").wait_for()
    size = page.locator(".tile[data-bytes]").get_attribute("data-bytes")
    return int(size), float(page.locator(".tile[data-kl]").get_attribute("data-kl"))


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
    head = page.locator("#layers thead th", has_text="int4").first
    head.locator("button").click()
    falling = [float(v.split()[0]) for v in column(page, 4)]
    assert falling == sorted(falling, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    head.locator("button").click()
    rising = [float(v.split()[0]) for v in column(page, 4)]
    assert rising == sorted(rising)
    assert falling != rising
    page.locator("#layers thead th button", has_text="component").click()
    names = column(page, 0)
    assert names[0] == "backbone.embeddings"
    assert names.index("backbone.layers.2.mixer.in_proj") < names.index("backbone.layers.3.mixer.in_proj")
    assert desktop.messages == []


def test_filters_leave_the_rows_that_fit(desktop: Opened) -> None:
    page = desktop.page
    controls = page.locator(".controls")
    controls.locator("input").fill("layers.1.")
    assert all(".1." in name for name in column(page, 0))
    assert controls.locator("output").inner_text() == "4 of 17 rows"
    controls.locator("select").select_option("x_proj")
    assert column(page, 0) == ["backbone.layers.1.mixer.x_proj"]


def test_any_budget_gives_the_very_plan_that_the_command_makes(
    desktop: Opened, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_ = random.Random(20)
    with Run.open(report.parent) as run:
        possible = planning.achievable_range(planning.build_problem(run.table())).bytes
    for _ in range(10):
        budget = random_.randint(*possible)
        size, kl = ask(desktop.page, budget)
        assert (
            main(["plan", "--run", str(report.parent), "--max-bytes", str(budget), "--dry-run", "--json"])
            == 0
        )
        [plan] = json.loads(capsys.readouterr().out)
        assert size == plan["bytes"]
        assert kl == pytest.approx(plan["predicted_kl"], rel=1e-9)


def test_the_command_on_the_page_makes_the_plan_on_the_page(
    desktop: Opened, report: Path, tmp_path: Path
) -> None:
    page = desktop.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    size, kl = ask(page, 57_000)
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    assert words[:4] == ["kl-lens", "plan", "--run", str(report.parent)]
    folder = tmp_path / "run"
    shutil.copytree(report.parent, folder)
    assert main([str(folder) if word == str(report.parent) else word for word in words[1:]]) == 0
    with Run.open(folder) as run:
        plan = planning.read_plan(folder / "plans" / f"{words[-1]}.json", run.table().components)
    assert plan.bytes == size
    assert plan.predicted_kl == pytest.approx(kl, rel=1e-9)
    assert desktop.messages == []


def test_the_slider_moves_by_mouse_and_by_keyboard(desktop: Opened) -> None:
    page, slider = desktop.page, desktop.page.locator("#budget")
    first = plan_of(page)
    box = slider.bounding_box()
    page.mouse.click(box["x"] + 0.9 * box["width"], box["y"] + box["height"] / 2)
    larger = plan_of(page)
    assert larger[0] > first[0]
    assert larger[1] < first[1]
    slider.focus()
    for _ in range(60):
        page.keyboard.press("ArrowLeft")
    between = plan_of(page)
    assert between[0] < larger[0]
    assert "predicted KL" in slider.get_attribute("aria-valuetext")
    page.keyboard.press("Home")
    smallest = plan_of(page)
    assert smallest[0] < between[0]
    colours = "[...document.querySelectorAll('.cells button')].map(b => b.className)"
    assert set(page.evaluate(colours)) == {"tipped f-int4"}
    page.keyboard.press("End")
    assert page.evaluate(colours) != ["tipped f-int4"] * 17
    assert desktop.messages == []


def test_an_allowed_loss_is_a_budget_too(desktop: Opened) -> None:
    page = desktop.page
    page.get_by_label("Allowed loss").check()
    _, kl = ask(page, 0.05)
    assert 0.02 < kl <= 0.05
    assert page.get_by_label("Tokens per second").is_disabled()  # no runtime, no speed


def test_a_target_has_its_own_files_speeds_and_exact_plans(browser: Any, tmp_path: Path) -> None:
    folder, target = make_run(tmp_path / "run"), get_target("openvino")
    with Run.open(add_target(folder)) as run:
        table, path = run.table(), write_report(run)
        speed = planning.speed_model(run, table, target)
    found = opened(browser, path, DESKTOP)
    page = found.page
    assert page.locator("#explorer").get_by_role("radio", name="OpenVINO").is_checked()
    panels = page.locator("#sensitivity .panel")
    assert [panel.is_visible() for panel in panels.all()] == [True, False]
    page.locator("#sensitivity label", has_text="weights alone").click()
    assert [panel.is_visible() for panel in panels.all()] == [False, True]
    least, most = planning.achievable_range(
        planning.build_problem(table, fixed_bytes=BESIDES, target=target)
    ).bytes
    for budget in (least, least + (most - least) // 3, most):
        limits: dict[str, Any] = {"max_bytes": budget, "fixed_bytes": BESIDES}
        expected = planning.plan_for_budget(table, **limits, target=target).totals
        assert ask(page, budget) == (expected.bytes, pytest.approx(expected.kl, rel=1e-9))
    page.get_by_label("Tokens per second").check()
    for pace in (30_000, 50_000):
        limits = {"min_speed": pace, "speed": speed, "fixed_bytes": BESIDES}
        expected = planning.plan_for_budget(table, **limits, target=target).totals
        assert ask(page, pace) == (expected.bytes, pytest.approx(expected.kl, rel=1e-9))
    assert "timed files" in page.locator(".tile", has_text="Speed").inner_text()
    assert "--target openvino --min-speed 50000 " in page.locator(".copy code").inner_text()
    page.locator("#explorer").get_by_role("radio", name="weights alone").check()
    page.locator("#explorer[data-settled]").wait_for()
    assert "--target" not in page.locator(".copy code").inner_text()
    assert found.messages == []
    page.context.close()


def test_two_pinned_plans_are_compared_component_by_component(desktop: Opened) -> None:
    page = desktop.page
    page.locator("[data-plan='/uniform_int8']").click()
    assert "Choose a second" in page.locator("#pinned").inner_text()
    page.locator("[data-plan='/uniform_int4']").focus()
    page.keyboard.press("Enter")
    rows = page.locator("#pinned tbody tr")
    assert rows.count() == 17
    assert "They differ in 17 of 17 components" in page.locator("#pinned").inner_text()
    first = rows.first.inner_text().split("\t")
    assert first[0] == "backbone.embeddings"  # what differs most comes first
    assert first[1:3] == ["int8", "int4"]
    assert first[3].startswith("−")
    assert first[4].startswith("+")
    page.get_by_role("button", name="Unpin").click()
    assert page.locator("#pinned").inner_text() == ""


@pytest.mark.parametrize("way", ["strip", "heat map", "table"])
def test_a_component_opens_in_place(desktop: Opened, way: str) -> None:
    page, name = desktop.page, "backbone.layers.2.mixer.out_proj"
    if way == "strip":
        page.locator(f".cells button[aria-label^='{name}']").click()
    elif way == "heat map":
        titled = f"path.cell[data-name='{name}']"
        page.locator(titled).first.click()
    else:
        page.locator("#layers tbody button", has_text=name).click()
    shown = page.locator(".component")
    assert shown.locator("h3").inner_text() == name
    assert page.evaluate("document.activeElement.textContent") == name
    assert "of what the plan is predicted to lose" in shown.inner_text()
    assert shown.locator("tbody tr").count() == 2
    assert shown.locator("tbody tr").first.locator("circle").count() == 4  # windows
    assert "One step" in shown.inner_text()
    page.get_by_role("button", name="Close").click()
    assert shown.count() == 0


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


def test_the_strip_names_the_component_under_the_pointer_and_moves_by_arrows(desktop: Opened) -> None:
    page, tip = desktop.page, desktop.page.locator("#tip")
    page.locator(".cells button").first.hover()
    assert tip.inner_text().split("\n")[0] == "backbone.layers.0.mixer.in_proj, block 0"
    page.locator(".cells button").first.focus()
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().split("\n")[0] == "backbone.layers.1.mixer.in_proj, block 1"
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    assert page.locator(".component h3").inner_text() == "backbone.embeddings"


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
    page.locator("header .toggle").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert page.locator("header .toggle").inner_text() == "Light"


def test_a_finger_gets_the_numbers_too(browser: Any, report: Path) -> None:
    found = opened(browser, report, PHONE, has_touch=True, is_mobile=True)
    found.page.locator("#sensitivity figure .cell").nth(2).tap()
    assert "nats/token" in found.page.locator("#tip").inner_text()
    found.page.context.close()


def test_without_scripts_everything_is_still_there(browser: Any, report: Path) -> None:
    found = opened(browser, report, DESKTOP, java_script_enabled=False)
    page = found.page
    assert page.locator("section").count() == 7
    assert page.locator("#layers tbody tr").count() == 17
    assert page.locator("#answer .charts figure").count() == 1
    assert page.locator("#explorer").inner_text() == ""
    assert page.locator("#sensitivity figure .cell").first.locator("title").count() == 1
    assert page.locator(".controls").is_hidden()
    assert page.locator("header .toggle").is_hidden()
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


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The accessibility checker that browsers use; from npm, and only for this."""
    folder, npm = tmp_path_factory.mktemp("axe"), shutil.which("npm")
    if npm is None:
        pytest.skip("no npm to fetch axe-core with")
    fetched = subprocess.run(
        [npm, "pack", "axe-core@4.10.3", "--silent"],
        cwd=folder,
        capture_output=True,
        timeout=120,
        check=False,
    )
    archives = list(folder.glob("*.tgz"))
    if fetched.returncode or not archives:
        pytest.skip("npm could not fetch axe-core")
    with tarfile.open(archives[0]) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_axe_finds_nothing_serious(
    browser: Any, report: Path, axe: str, size: dict[str, int], scheme: str
) -> None:
    found = opened(browser, report, size, color_scheme=scheme, bypass_csp=True)
    page = found.page
    page.locator(".cells button").nth(3).click()
    for name in ("uniform_int8", "uniform_int4"):
        page.locator(f"[data-plan='/{name}']").dispatch_event("click")
    page.evaluate(axe)
    violations = page.evaluate("axe.run().then(result => result.violations)")
    serious = [v for v in violations if v["impact"] in ("serious", "critical")]
    assert [(v["id"], v["nodes"][0]["html"][:200]) for v in serious] == []
    page.context.close()
