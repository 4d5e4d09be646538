"""The documentation: its examples run, its links lead somewhere, its make targets exist."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

import forkpoint
from docs_runner import blocks, reader, run_file
from forkpoint import losses

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LOADED = re.compile(r"<(?:script|img|iframe)[^>]* src=\"([^\"]+)|<link [^>]*href=\"([^\"]+)")
README, LOOP = ROOT / "README.md", ROOT / "docs" / "start" / "own-loop.md"
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# peft asks newer transformers for a name that is to go.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path != README], ids=name)
@pytest.mark.examples
def test_examples_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    run_file(path, reader(tmp_path), capsys)


@pytest.mark.examples
def test_readme_runs_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = README.read_text(encoding="utf-8")
    shown = re.findall(r"It prints `([^`]+)`", text)
    run_file(README, {"__name__": "__docs__"}, capsys)
    printed = capsys.readouterr().out
    assert shown and all(line in printed for line in shown), printed
    assert text.count("\n") <= 150


def test_before_and_after_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block adds the same gradients twice: ordinary training's, then forkpoint's."""
    monkeypatch.chdir(tmp_path)
    namespace = reader(tmp_path)
    shown = blocks(LOOP.read_text(encoding="utf-8"))
    both = next(
        code for language, _, code, _ in shown if language == "python" and "# after" in code
    )
    before, after = both.split("\n# after", maxsplit=1)
    gradients = []
    for code in (before, f"# after{after}"):
        exec(code, namespace)
        gradients.append({n: p.grad.clone() for n, p in namespace["model"].named_parameters()})
        namespace["model"].zero_grad()
    for parameter, gradient in gradients[0].items():
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(gradients[1][parameter], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        file, _, heading = target.partition("#")
        if "://" in file:
            continue
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{name(path)} links to {target}, and there is no {file}"
        if heading:
            assert heading in headings(linked), f"{name(path)} links to {target}: no such heading"


def test_files_that_pages_include_are_there() -> None:
    """A line that ruff has formatted as Python would be shown as it stands."""
    included = 0
    for path in DOCUMENTS:
        for line in re.findall(r"^ *--8.*$", path.read_text(encoding="utf-8"), re.MULTILINE):
            file = re.fullmatch(r' *--8<-- "([^"]+)"', line)
            assert file and (ROOT / file[1]).is_file(), f"{name(path)}: {line}"
            included += 1
    assert included


def headings(path: Path) -> set[str]:
    """Anchors of a document's headings: lower case, words joined by hyphens."""
    found = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_options_of_papers_are_allowed() -> None:
    text = (ROOT / "docs" / "reference" / "papers.md").read_text(encoding="utf-8")
    names = {"Config": forkpoint.Config} | {n: getattr(losses, n) for n in losses.__all__}
    made = [c for c in re.findall(r"`(\w+\([^`]*\))`", text) if c.partition("(")[0] in names]
    assert len(made) > 12
    for code in made:
        eval(code.replace("=...", "=1"), names)  # raises for an option that is not there


def test_one_version_is_named_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = next(v for v in re.findall(r"^## \[([^]]+)\]", changes, re.MULTILINE))
    assert forkpoint.__version__ == project["version"] == newest
    assert f"\nversion: {newest}\n" in citation


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    for path in DOCUMENTS:
        code = re.findall(r"`([^`\n]+)`", path.read_text(encoding="utf-8"))
        shown = blocks(path.read_text(encoding="utf-8"))
        code += [code for language, _, code, _ in shown if language != "text"]
        named = {target for part in code for target in TARGET.findall(part)}
        assert named <= targets, f"{name(path)} names make {', '.join(sorted(named - targets))}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    for path in (ROOT / "docs").rglob("*.md"):
        page = path.relative_to(ROOT / "docs").as_posix()
        assert f" {page}\n" in navigation, f"{page} is not in the navigation of mkdocs.yml"


@pytest.mark.examples
def test_site_builds_and_loads_nothing_from_a_network(tmp_path: Path) -> None:
    """Warnings are errors: dead links, dead headings, docstrings that cannot be read."""
    mkdocs = ROOT / ".venv-docs" / "bin" / "mkdocs"
    if not mkdocs.exists():
        pytest.skip("mkdocs is not installed; make docs installs it in .venv-docs")
    done = subprocess.run(
        [mkdocs, "build", "--site-dir", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "search" / "search_index.js").exists(), "pages opened as files cannot search"
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))
    for page in pages:
        found = LOADED.findall(page.read_text(encoding="utf-8"))
        loaded = [a or b for a, b in found]
        assert loaded, f"{page} loads no style sheet"
        assert not [link for link in loaded if "//" in link], f"{page} loads {loaded}"


# The runner itself --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nx = 1\nassert x == 2, x\n```\n", "1"),
        ("```console\n$ exit 3\n```\n", "exit status 3"),
        ("```console\n$ echo one\ntwo\n```\n", "and the document shows\ntwo"),
        ("```console\noutput\n```\n", "line 2 is no command"),
        ("```\nx\n```\n", "allowed are"),
        ("```pythn\nx\n```\n", "allowed are"),
        ("```python\nx\n", "never closed"),
    ],
)
def test_broken_blocks_fail(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "document.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises((AssertionError, ValueError), match=said):
        run_file(path, {}, capsys)
