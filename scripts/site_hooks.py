"""Puts files of the repository that pages link to on the site of the documentation.

mkdocs knows the files below docs/ alone. Pages also link to CONTRIBUTING.md and to examples, so
that links work where Markdown is read in the repository. Each such file becomes a page below
repository/, a source file as one block of code, and links are changed to lead there.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BELOW = "repository/"
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
LANGUAGES = {".py": "python", ".jsonl": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file that is linked to and lies outside docs/."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting += ["CONTRIBUTING.md", "CHANGELOG.md"]
    known = set(waiting[:-2])
    while waiting:
        path = waiting.pop()
        if path not in known and (ROOT / path).is_file():
            known.add(path)
            files.append(_page(path, config))
        if path.endswith(".md") and (ROOT / path).is_file():
            targets = (_target(path, m[2]) for m in LINK.finditer(_read(path)))
            waiting += {t for t in targets if not t.startswith("docs/")} - known
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links between docs/ and the rest of the repository."""
    here = page.file.src_uri
    source = here.removeprefix(BELOW) if here.startswith(BELOW) else f"docs/{here}"

    def changed(link: re.Match[str]) -> str:
        to = _site_path(_target(source, link[2]))
        if files.get_file_from_path(to) is None:
            return link[0]
        return f"{link[1]}{os.path.relpath(to, Path(here).parent)}{link[3]}"

    return LINK.sub(changed, markdown)


def _target(source: str, link: str) -> str:
    """A link of a file, relative to the repository."""
    return os.path.normpath(f"{Path(source).parent}/{link}")


def _site_path(path: str) -> str:
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{BELOW}{path}" if path.endswith(".md") else f"{BELOW}{path}.md"


def _page(path: str, config: MkDocsConfig) -> File:
    text = _read(path)
    if path.startswith("benchmarks/history/"):
        text = f"---\nsearch:\n  exclude: true\n---\n\n{text}"  # figures of earlier versions
    if not path.endswith(".md"):
        text = f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n````\n"
    return File.generated(
        config, _site_path(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV
    )


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
