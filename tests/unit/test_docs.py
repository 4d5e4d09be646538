"""The documentation: its examples run, its links lead somewhere, its make targets exist."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import forkpoint
from docs_runner import Block, blocks, commands, reader, run_file
from lanes import slow_besides

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path for folder in (ROOT, ROOT / "docs", ROOT / "benchmarks") for path in folder.glob("*.md")
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "path",
    slow_besides([ROOT / "README.md"], DOCUMENTS, pytest.mark.examples),
    ids=name,
)
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(block.runs for block in blocks(path.read_text(encoding="utf-8"))):
        return
    monkeypatch.chdir(tmp_path)
    run_file(path, tmp_path, reader(tmp_path))


def test_readme_runs_the_public_surface() -> None:
    """The calls that the design promises are in the README, in blocks that run."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = "\n".join(b.code for b in blocks(text) if b.runs and b.language == "python")
    called = {ast.unparse(n.func) for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Call)}
    assert called >= {
        "forkpoint.load_rollouts",
        "forkpoint.RolloutBatch",
        "forkpoint.wrap",
        "policy.plan",
        "policy.plan(batch).explain",
        "policy.forward_backward",
        "forkpoint.losses.GRPO",
        "policy.score",
        "policy.verify",
    }


@pytest.mark.parametrize("off_policy", [False, True])
def test_readme_before_and_after_agree(
    off_policy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block adds the same gradients twice: ordinary training's, then forkpoint's."""
    monkeypatch.chdir(tmp_path)
    namespace = reader(tmp_path)
    if off_policy:
        _move_policy(namespace["model"], tmp_path / "rollouts.jsonl")
    shown = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    first = next(block for block in shown if block.language == "python")
    before, after = first.code.split("\n# after", maxsplit=1)
    gradients = []
    for code in (before, f"# after{after}"):
        exec(code, namespace)
        gradients.append({n: p.grad.clone() for n, p in namespace["model"].named_parameters()})
        namespace["model"].zero_grad()
    for parameter, gradient in gradients[0].items():
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(gradients[1][parameter], gradient, rtol=1e-3, atol=1e-5)


def _move_policy(model: torch.nn.Module, path: Path) -> None:
    """Give rollouts old log-probs that are off by up to 0.5, so that some ratios are clipped."""
    batch = forkpoint.RolloutBatch(forkpoint.load_rollouts(path))
    logprobs = forkpoint.wrap(model).score(batch).logprobs.numpy()
    noise = np.random.default_rng(1).uniform(-0.5, 0.5, len(logprobs))
    moved = [
        replace(rollout, old_logprobs=(logprobs + noise)[begin:end])
        for rollout, begin, end in zip(batch, batch.offsets, batch.offsets[1:], strict=False)
    ]
    forkpoint.save_rollouts(path, moved)


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


def headings(path: Path) -> set[str]:
    """Anchors of a document's headings: lower case, words joined by hyphens."""
    found = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    for path in DOCUMENTS:
        code = re.findall(r"`([^`\n]+)`", path.read_text(encoding="utf-8"))
        code += [b.code for b in blocks(path.read_text(encoding="utf-8")) if b.language != "text"]
        named = {target for part in code for target in TARGET.findall(part)}
        assert named <= targets, f"{name(path)} names make {', '.join(sorted(named - targets))}"


def test_every_document_is_listed() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "index.md" or f"({path.name})" in index, f"{path.name} is not listed"


# The runner itself --------------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    path = folder / "document.md"
    path.write_text(text, encoding="utf-8")
    return path


def test_blocks_share_a_namespace_and_a_folder(tmp_path: Path) -> None:
    text = """
```python
x = 1
open("made.txt", "w").close()
```

```console
$ ls *.txt
made.txt
$ echo one \\
  two
one ...
```

```python
assert x == 1
y = x + 1
```
"""
    path, namespace = write(tmp_path, text), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert run_file(path, tmp_path, namespace) == 3
    assert namespace["y"] == 2


def test_a_broken_block_fails_at_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "# Title\n\n```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run_file(path, tmp_path, {})
    assert caught.traceback[-1].lineno + 1 == 5


@pytest.mark.parametrize(
    ("code", "message"),
    [("$ exit 3", "exit status 3"), ("$ echo one\ntwo", "and the document shows\ntwo")],
    ids=["status", "output"],
)
def test_a_broken_command_fails(tmp_path: Path, code: str, message: str) -> None:
    path = write(tmp_path, f"```console\n{code}\n```\n")
    with pytest.raises(AssertionError, match=message):
        run_file(path, tmp_path, {})


def test_only_a_reason_keeps_a_block_from_running() -> None:
    text = "{}\n```python\nraise RuntimeError\n```\n"
    assert not blocks(text.format("<!-- not run: needs two GPUs -->"))[0].runs
    assert blocks(text.format("<!-- not run: -->"))[0].runs
    assert blocks(text.format("Some text."))[0].runs


@pytest.mark.parametrize("text", ["```\nx\n```\n", "```pythn\nx\n```\n", "```python\nx\n"])
def test_a_fence_that_would_hide_code_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        blocks(text)


def test_a_console_block_begins_with_a_command() -> None:
    with pytest.raises(ValueError, match="line 7"):
        commands(Block("console", 7, "output", True))
