"""Replays' folders that somebody has changed: a report and a replay that resumes read or refuse.

FORKPOINT_FUZZ_FOLDERS=2000 tries so many changes; a failure prints its number.
"""

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import json_mutations
from forkpoint.apps.cli import main
from forkpoint.apps.replay.checkpoint import Checkpoints
from forkpoint.apps.replay.folder import CHECKPOINT, MANIFEST, ROWS, STATE
from integration.commands import write_config, write_rollouts

CASES = int(os.environ.get("FORKPOINT_FUZZ_FOLDERS", "40"))
RESUMED = 4
"""Of so many cases one is resumed as well, which takes most of the time."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a replay that was killed after its third step, and the command to resume it."""
    place = tmp_path_factory.mktemp("folders")
    rollouts = write_rollouts(place / "rollouts.jsonl")
    config = write_config(place / "config.json", num_hidden_layers=1, hidden_size=16)
    command = ["replay", str(rollouts), "--model", str(config), "--steps", "3", "--json"]
    command += ["--checkpoint-every", "2", "--baseline", "dense", "--output", str(place / "run")]
    command += ["--max-microbatch-tokens", "24", "--activations", "recompute"]
    real = Checkpoints.save

    def save(checkpoints: Checkpoints, step: int) -> None:
        if step == 3:  # a process that is killed now leaves this
            shutil.copytree(place / "run", place / "kept")
        real(checkpoints, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", save)
        assert main(command) == 0
    return place, [*command, "--resume"]


ELEMENTS = {
    *("html", "head", "meta", "link", "title", "style", "body", "footer"),
    *("article", "section", "div", "h1", "h2", "h3", "p", "img", "details", "summary"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "rel", "href"),
    *("class", "src", "alt", "open", "scope"),
}


def change(folder: Path, rng: random.Random) -> str:
    """Change one thing in a replay's folder, and say what."""
    (checkpoint,) = folder.glob(f"{CHECKPOINT}*")
    tensors = next(checkpoint.glob("*.safetensors"))
    state = checkpoint / STATE
    kind = rng.choice(("json", "json", "json", "bytes", "tensors"))
    if kind == "json":
        path = rng.choice((folder / MANIFEST, folder / ROWS, state))
        lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        number = rng.randrange(len(lines))
        new, what = json_mutations.mutate(json.loads(lines[number]), rng)
        lines[number] = json_mutations.dumps(new)
        path.write_bytes(("\n".join(lines) + "\n").encode("utf-8", "surrogatepass"))
    else:
        path = (
            tensors if kind == "tensors" else rng.choice([folder / MANIFEST, folder / ROWS, state])
        )
        what = change_bytes(path, rng)
    if rng.random() < 0.7:
        seal(state, tensors)
    return f"{path.name}: {what}"


def seal(state: Path, tensors: Path) -> None:
    """Make hashes in the state those of the files, if it can still be read."""
    try:
        values = json.loads(state.read_text())
        values["files"] = {tensors.name: hashlib.sha256(tensors.read_bytes()).hexdigest()}
    except (ValueError, TypeError, OSError, RecursionError):
        return
    state.write_text(json_mutations.dumps(values), "utf-8", "surrogatepass")


def change_bytes(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    # The header of a file of tensors is at its beginning.
    place = rng.randrange(min(len(content), rng.choice((8, 2000, len(content)))))
    how = rng.choice(("flip", "cut", "insert", "empty", "missing", "append"))
    if how == "missing":
        path.unlink()
        return how
    if how == "flip":
        content[place] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del content[place:]
    elif how == "insert":
        content[place:place] = rng.randbytes(4)
    elif how == "empty":
        content.clear()
    else:
        content += rng.randbytes(40)
    path.write_bytes(bytes(content))
    return f"{how} at {place}"


class Structure(HTMLParser):
    """Asserts that a page has the elements and attributes of reports, and two scripts."""

    scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ELEMENTS and {name for name, _ in attrs} <= ATTRIBUTES, (tag, attrs)
        self.scripts += tag == "script"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_changed_folders(base: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    place, resume = base
    codes: Counter[str] = Counter()
    for seed in range(CASES):
        rng = random.Random(seed)
        shutil.rmtree(place / "run", ignore_errors=True)
        shutil.copytree(place / "kept", place / "run")
        said = f"seed {seed}, {change(place / 'run', rng)}"
        page = place / "page.html"
        commands = [["report", str(place / "run"), "--output", str(page), "--json"]]
        commands += [resume] if seed % RESUMED == 0 else []
        for command in commands:
            before = contents(place / "run")
            code = main(command)
            out, err = capsys.readouterr()
            codes[f"{command[0]} {code}"] += 1
            assert code in (0, 2) and "internal error" not in err, f"{said}\n{err}"
            if code == 2:
                assert err.startswith("error: ") and not out, said
                assert contents(place / "run") == before, said
            elif command[0] == "report":
                structure = Structure()
                structure.feed(page.read_text(encoding="utf-8"))
                assert structure.scripts == 0, said
    assert min(codes["report 0"], codes["report 2"]) > CASES / 6, codes
    assert min(codes["replay 0"], codes["replay 2"]) > 0, codes
