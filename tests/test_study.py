"""One front door: the command line and `Study` do the same, and bad arguments get the same clear errors."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

import kl_lens as kl
from kl_lens.cli.main import parse, settings_from
from kl_lens.study.evaluate import EvaluateSettings
from kl_lens.study.events import Events
from kl_lens.study.measure import MeasureSettings
from kl_lens.study.plan import PlanSettings
from kl_lens.study.run import RunSettings
from kl_lens.study.session import Session
from kl_lens.study.settings import Settings
from kl_lens.targets import read_artifact
from tests.cli.commands import done
from tests.docs.markdown import README, blocks, commands

pytest.importorskip("gguf", reason="needs the extra gguf")
FEW = {
    "calibrate": {"windows": 2, "window_length": 64},
    "measure": {"windows": 1, "window_length": 64},
}
BUDGET = "10.7MB"
COMPONENTS = r"layers\.9\."


def digests(folder: Path) -> dict[str, str]:
    """Every file of an exported folder but our own record, which names the versions and the time."""
    files = [
        path
        for path in folder.iterdir()
        if path.is_file() and path.name != "artifact.json"
    ]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> kl.Study:
    """Calibrated and measured: one block, with recipes that learn."""
    study = kl.Study(
        "reference:mamba",
        target="gguf",
        folder=tmp_path_factory.mktemp("study") / "python",
    )
    study.calibrate(**FEW["calibrate"])
    study.measure(**FEW["measure"], components=COMPONENTS, formats=["q4_k+gptq", "q8_0"])
    return study


def test_both_languages_write_the_same_bytes(study: kl.Study, tmp_path: Path) -> None:
    file = study.export(study.plan(max_bytes=BUDGET, name="small"))
    run = str(tmp_path / "words")
    few = {
        verb: [w for k, v in flags.items() for w in (f"--{k.replace('_', '-')}", str(v))]
        for verb, flags in FEW.items()
    }
    chosen = f"--target gguf --components {COMPONENTS} --formats q4_k+gptq,q8_0".split()
    done(f"calibrate reference:mamba --run {run}", *few["calibrate"])
    done(f"measure reference:mamba --run {run}", *few["measure"], *chosen)
    done(f"plan --run {run} --target gguf --max-bytes {BUDGET} --name small")
    done(f"export --run {run} --target gguf --plan small")
    from_python = digests(file)
    from_shell = digests(Path(run) / "artifacts/gguf/small")
    assert from_python == from_shell
    assert {t.realised for t in read_artifact(file).tensors} >= {"q4_k+gptq", "q8_0"}


def test_the_readme_shows_the_same_job_in_both_languages() -> None:
    """Every line of the Python example means the settings of the command in the same place."""
    words = [
        w[1:]
        for block in blocks(README)
        if block.tag == "bash"
        for w in commands(block)
        if w[0] == "kl-lens"
    ]
    typed = {w[0]: settings_from(parse(w)) for w in words}
    (example,) = [block.body for block in blocks(README) if block.tag == "python"]
    by_verb: dict[str, object] = {}

    class Listening(kl.Study):
        def do(self, settings: Settings) -> object:
            by_verb[settings.verb] = settings
            raise StopIteration

    for line in example.splitlines():
        if "study." in line and "table" not in line:
            names = {
                "study": Listening("reference:mamba", target="gguf", folder="runs/mamba"),
                "plan": "small",
            }
            with pytest.raises(StopIteration):
                exec(line, names)
    assert set(by_verb) == set(typed)
    for verb, settings in by_verb.items():
        opened = {"model": None} if verb in ("plan", "export", "evaluate") else {}
        assert replace(settings, **opened) == typed[verb], verb  # type: ignore[type-var]


def test_a_plan_that_was_changed_in_python_is_what_is_exported(study: kl.Study) -> None:
    plan = study.plan(max_bytes=BUDGET, name="edited")
    name = next(iter(plan.assignment))
    changed = replace(plan, assignment=plan.assignment | {name: "q8_0"})
    realised = {
        t.component: t.realised for t in read_artifact(study.export(changed)).tensors
    }
    assert realised[name] == "q8_0"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.measure(precision="int3"), "precision=int3: expected one of"),
        (lambda s: s.measure(windows="many"), "windows=many: expected"),
        (lambda s: s.measure(windows=-1), "windows=-1: expected"),
        (lambda s: s.plan(max_bytes="4 stones"), "is not a size; give for example 90MB"),
        (lambda s: s.plan(budgets=3), "plan has no setting 'budgets'; it has"),
        (
            lambda s: s.plan(minimise="speed"),
            "minimise=speed: expected one of bytes, kl, seconds",
        ),
        (lambda s: s.plan(), "say what to plan"),
        (lambda s: s.export("nothing-of-the-kind"), "nothing-of-the-kind"),
        (lambda s: kl.Study(target="onnx"), "no target is called 'onnx'"),
        (lambda s: kl.Study(precision="int3"), "Study has no setting 'precision'"),
        (lambda s: kl.generate("nowhere.gguf", "x"), "nowhere.gguf"),
    ],
)
def test_python_callers_get_the_clear_errors_of_the_command_line(
    study: kl.Study, call, message: str
) -> None:
    with pytest.raises(kl.KLLensError) as raised:
        call(study)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "settings",
    [
        MeasureSettings.of(model="reference:mamba", working_memory=10**8),
        PlanSettings.of(max_loss=0.01, working_memory=10**8),
        EvaluateSettings.of(working_memory=10**8),
        RunSettings.of(model="reference:mamba", working_memory=10**8),
    ],
    ids=lambda settings: settings.verb,
)
def test_plans_are_measured_within_the_memory_of_the_command(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session()
    monkeypatch.setattr(f"kl_lens.study.{settings.verb}.{settings.verb}", lambda *_: None)
    session.do(settings)
    monkeypatch.setattr("kl_lens.measuring.joint.PlanMeter", lambda *arguments: arguments)
    model = kl.load("reference:mamba")
    windows = model.task.drawn("wikitext2:valid", windows=1, length=8)
    assert session.meter(model, windows)[2] == 10**8  # type: ignore[index]


def test_what_several_stages_find_is_told_once() -> None:
    messages: list[str] = []

    class Screen(Events):
        def tell(self, text: str) -> None:
            messages.append(text)

    session = Session(events=Screen())
    for words in ("lost on a", "lost on b", "lost on a"):
        session.tell_once(words)
    assert messages == ["lost on a", "lost on b"]
