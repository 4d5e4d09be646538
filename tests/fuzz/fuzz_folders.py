"""Folders of real replays, changed in one place and read by the command line.

Every file has a turn: the manifest, microbatches, plans, and the checkpoint's header, tensors and
    facts, also with the checksums made anew as somebody would who wants the change to be read.
"""

import contextlib
import io
import json
import random
import shutil
import struct
import time
import traceback
import zlib
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import json_mutations
from forkpoint import load_rollouts, losses, record
from forkpoint.apps.cli import main
from forkpoint.apps.replay.folder import ReplayFolder
from forkpoint.apps.replay.schema import CHECKPOINT, MANIFEST, PLANS, ROWS
from integration.commands import write_config, write_rollouts

STEPS, SAVED_AT, KILLED_AT = 4, 2, 3
ALLOWED = (0, 2)


@dataclass(frozen=True)
class Base:
    """A replay that was killed after KILLED_AT of STEPS steps, and what resumes it."""

    name: str
    folder: Path
    arguments: tuple[str, ...]


def make_bases(place: Path, *names: str) -> list[Base]:
    """Replays of every kind that folders differ in, or those of these names."""
    rollouts = write_rollouts(place / "rollouts.jsonl")
    config = write_config(place / "config.json", num_hidden_layers=1, hidden_size=16)
    with record(place / "trace", loss=losses.GSPO()) as trace:
        for scale in (1.0, 0.5):
            trace.add(load_rollouts(rollouts), {"scale": scale})
    common = ("--model", str(config), "--steps", str(STEPS), "--checkpoint-every", str(SAVED_AT))
    across = ("--sharing", "tree", "--boundary", "across", "--max-microbatch-tokens", "24")
    ways = {
        "dense": (str(rollouts), *common, "--baseline", "dense", "--groups-per-step", "2"),
        "trace": (str(place / "trace"), *common, *across, "--optimizer", "sgd"),
        "recompute": (
            *(str(rollouts), *common, *across, "--activations", "recompute"),
            *("--baseline", "dense", "--schedule", "cosine", "--max-grad-norm", "0.5"),
        ),
    }
    bases = [
        _killed(name, place / f"run-{name}", arguments)
        for name, arguments in ways.items()
        if not names or name in names
    ]
    for base in bases:
        shutil.copytree(base.folder, base.folder.with_suffix(".kept"))
    return bases


def _killed(name: str, folder: Path, arguments: tuple[str, ...]) -> Base:
    """The folder as a process leaves it that is killed between two checkpoints."""
    arguments = ("replay", *arguments, "--output", str(folder))
    real = ReplayFolder.add_row

    def add_row(self: ReplayFolder, microbatch: Any) -> None:
        real(self, microbatch)
        if microbatch["step"] == KILLED_AT:
            shutil.copytree(folder, folder.with_suffix(".killed"))

    ReplayFolder.add_row = add_row
    try:
        outcome = call(*arguments, "--json")
    finally:
        ReplayFolder.add_row = real
    assert outcome.code == 0, outcome.err
    shutil.rmtree(folder)
    folder.with_suffix(".killed").rename(folder)
    (folder / ".lock").unlink()
    return Base(name, folder, (*arguments, "--resume"))


# Calling ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def call(*arguments: str) -> Outcome:
    """The command line in this process; what it raises counts as a defect."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except BaseException:
            code = -1
            traceback.print_exc()
    return Outcome(code, out.getvalue(), err.getvalue())


ELEMENTS = {
    *("html", "head", "meta", "link", "title", "style", "body", "footer"),
    *("article", "section", "div", "h1", "h2", "h3", "p", "img", "details", "summary"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "rel", "href"),
    *("class", "src", "alt", "open", "scope"),
}


class _Structure(HTMLParser):
    """Collects what elements and attributes a page has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}


def faults_of_page(text: str) -> list[str]:
    """Parts of a page that no report has."""
    page = _Structure()
    page.feed(text)
    faults = [f"element {name}" for name in page.elements - ELEMENTS]
    return faults + [f"attribute {name}" for name in page.attributes - ATTRIBUTES]


# Changing files -----------------------------------------------------------------------------------


def change(folder: Path, rng: random.Random) -> tuple[str, str]:
    """Change one thing in a replay's folder; which file, and what."""
    kind = rng.choices(
        ("manifest", "microbatches", "plans", "facts", "tensors", "header", "bytes", "lines"),
        (3, 3, 4, 4, 2, 1, 1, 1),
    )[0]
    if kind == "manifest":
        path = folder / MANIFEST
        new, what = json_mutations.mutate(json.loads(path.read_text()), rng)
        path.write_text(json_mutations.dumps(new), encoding="utf-8", errors="surrogatepass")
        return kind, what
    if kind in ("microbatches", "plans"):
        path = folder / {"microbatches": ROWS, "plans": PLANS}[kind]
        lines = path.read_bytes().splitlines()
        number = rng.randrange(len(lines))
        new, what = json_mutations.mutate(json.loads(lines[number]), rng)
        lines[number] = json_mutations.dumps(new).encode("utf-8", "surrogatepass")
        path.write_bytes(b"\n".join(lines) + b"\n")
        return kind, f"line {number + 1}: {what}{_reseal(folder, rng)}"
    if kind == "lines":
        path = folder / rng.choice((ROWS, PLANS))
        return kind, f"{path.name} {_change_lines(path, rng)}{_reseal(folder, rng)}"
    if kind == "bytes":
        path = folder / rng.choice((MANIFEST, ROWS, PLANS, CHECKPOINT))
        return kind, f"{path.name} {_change_bytes(path, rng)}"
    return kind, _change_checkpoint(folder / CHECKPOINT, kind, rng)


def _reseal(folder: Path, rng: random.Random) -> str:
    """Make the checkpoint's checksums those of the files as they are; sometimes not."""
    if rng.random() < 0.25:
        return ""
    tensors, facts = read_checkpoint(folder / CHECKPOINT)
    for name in (ROWS, PLANS):
        content = (folder / name).read_bytes()
        lines = content.splitlines(keepends=True)
        if name == ROWS and rng.random() < 0.8:
            content = b"".join(lines[: facts["step"]])
        facts["bytes"][name], facts["crc"][name] = len(content), zlib.crc32(content)
    write_checkpoint(folder / CHECKPOINT, tensors, facts)
    return ", resealed"


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["forkpoint"])


def write_checkpoint(path: Path, tensors: dict[str, torch.Tensor], facts: Any) -> None:
    """As forkpoint does, whatever the facts are."""
    path.unlink()
    text = json_mutations.dumps(facts)
    save_file(tensors, path, metadata={"forkpoint": text.encode("utf-8", "replace").decode()})


def _change_checkpoint(path: Path, kind: str, rng: random.Random) -> str:
    if kind == "header":
        return _change_header(path, rng)
    tensors, facts = read_checkpoint(path)
    if kind == "facts":
        new, what = json_mutations.mutate(facts, rng)
        write_checkpoint(path, tensors, new)
        return what
    name = rng.choice(sorted(tensors))
    found = tensors[name]
    how = rng.choice(
        ("drop", "rename", "shape", "dtype", "nan", "noise", "zero", "add", "negative", "side")
    )
    key = name
    if how in ("drop", "rename", "side"):
        del tensors[name]
        if how == "rename":
            key = f"{name}{rng.choice(('x', '/', '/0', '0'))}"
        if how == "side":
            key = rng.choice(("shared", "dense", "other")) + "/" + name.partition("/")[2]
    new = _changed_tensor(found, how, rng).contiguous()
    if how == "add":
        key = rng.choice(
            ("x", "shared/optimizer/0/x", "shared/optimizer/9999/step", "random/cuda:0", "")
        )
    if how != "drop":
        tensors[key] = new
    sealed = rng.random() < 0.85
    if sealed:
        facts["crc32"] = {
            n: zlib.crc32(t.reshape(-1).view(torch.uint8).numpy().data) for n, t in tensors.items()
        }
        facts["devices"] = {n: "cpu" for n in tensors if not n.startswith("random/")}
    write_checkpoint(path, tensors, facts)
    return f"{how} {name}{', resealed' if sealed else ''}"


def _changed_tensor(found: torch.Tensor, how: str, rng: random.Random) -> torch.Tensor:
    if how == "shape":
        return found.reshape(-1)[: max(1, found.numel() // 2)].clone()
    if how == "dtype":
        return found.to(rng.choice((torch.float64, torch.float16, torch.int64, torch.bool)))
    if how == "nan":
        return found * float("nan") if found.is_floating_point() else found + 1
    if how == "noise":
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        return torch.randint(0, 255, found.shape, generator=generator).to(found.dtype)
    if how == "zero":
        return torch.zeros_like(found)
    if how == "negative":
        return torch.full(found.shape, -1.0, dtype=torch.float64).to(found.dtype)
    return found.clone()


def _change_header(path: Path, rng: random.Random) -> str:
    """The part of a safetensors file that says where tensors lie."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    what = rng.choice(("length", "json", "json", "json"))
    if what == "length":
        wrong = rng.choice((0, 1, length - 1, length + 1, len(content), 2**40, 2**63, 2**64 - 1))
        path.write_bytes(struct.pack("<Q", wrong) + content[8:])
        return f"length {wrong}"
    new, what = json_mutations.mutate(header, rng)
    text = json_mutations.dumps(new).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    return what


def _change_lines(path: Path, rng: random.Random) -> str:
    lines = path.read_bytes().splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    how = rng.choice(("swap", "drop", "twice", "blank", "crlf", "joined", "garbage", "half"))
    if how == "swap":
        lines[one], lines[other] = lines[other], lines[one]
    elif how == "drop":
        del lines[one]
    elif how == "twice":
        lines.insert(other, lines[one])
    elif how == "blank":
        lines.insert(one, b"\n")
    elif how == "crlf":
        lines[one] = lines[one].replace(b"\n", b"\r\n")
    elif how == "joined":
        lines[one] = lines[one].rstrip(b"\n")
    elif how == "garbage":
        lines.insert(one, bytes(rng.randrange(256) for _ in range(40)) + b"\n")
    else:
        lines[one] = lines[one][: len(lines[one]) // 2] + b"\n"
    path.write_bytes(b"".join(lines))
    return f"{how} {one}"


def _change_bytes(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    how = rng.choice(
        ("flip", "cut", "insert", "empty", "missing", "bom", "utf16", "folder", "zeros", "append")
    )
    path.unlink()
    if how == "missing":
        return how
    if how == "folder":
        path.mkdir()
        return how
    if how == "flip":
        content[place] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del content[place:]
    elif how == "insert":
        content[place:place] = bytes(rng.randrange(256) for _ in range(4))
    elif how == "empty":
        content.clear()
    elif how == "bom":
        content[:0] = b"\xef\xbb\xbf"
    elif how == "utf16":
        content = bytearray(bytes(content).decode("latin-1").encode("utf-16"))
    elif how == "zeros":
        content[place : place + 64] = bytes(64)
    else:
        content += bytes(rng.randrange(256) for _ in range(40))
    path.write_bytes(bytes(content))
    return f"{how} at {place}"


# Trying -------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Counts over all cases."""

    cases: int = 0
    calls: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, 0)
    """Seconds of the slowest call, and its seed."""

    def report(self) -> dict[str, Any]:
        return {**vars(self), "codes": dict(self.codes), "kinds": dict(self.kinds)}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def try_one(
    bases: list[Base],
    seed: int,
    place: Path,
    tally: Tally,
    *,
    resume: bool = True,
    debug: tuple[str, ...] = (),
) -> None:
    """Change a copy of a folder, and let a report and a replay that resumes read it.

    resume: whether a replay reads it at all, which takes most of the time.
    """
    rng = random.Random(seed)
    base = rng.choice(bases)
    shutil.rmtree(base.folder, ignore_errors=True)
    shutil.copytree(base.folder.with_suffix(".kept"), base.folder)
    kind, what = change(base.folder, rng)
    before = contents(base.folder)
    page = place / "page.html"
    page.unlink(missing_ok=True)
    plots = ("--plots", str(place / "plots")) if resume and rng.random() < 0.02 else ()
    commands = [("report", str(base.folder), "--output", str(page), "--json", *plots)]
    if resume:
        commands.append((*base.arguments, "--json"))
    tally.cases += 1
    tally.kinds[kind] += 1
    for command in commands:
        begin = time.perf_counter()
        done = call(*command, *debug)
        tally.slowest = max(tally.slowest, (time.perf_counter() - begin, seed))
        tally.calls += 1
        tally.codes[f"{command[0]} {done.code}"] += 1
        faults = []
        if (
            done.code not in ALLOWED
            or "internal error" in done.err
            or ("Traceback" in done.err and not debug)
        ):
            faults.append(f"exit code {done.code}")
        if command[0] == "report" and done.code == 0:
            faults += faults_of_page(page.read_text(encoding="utf-8"))
        if done.code == 2:
            if not debug and (done.out or not done.err.startswith("error: ")):
                faults.append("a refusal is one message on stderr")
            if contents(base.folder) != before:
                faults.append("a refusal changed the folder")
        if debug:
            print(f"{' '.join(command)}\n{kind}: {what[:300]}\n{done.err}")
        for fault in faults:
            tally.failures.append(
                {
                    "seed": seed,
                    "what": f"{command[0]}, {base.name}, {kind}: {what[:200]}: {fault}",
                    "stderr": done.err[-3000:],
                }
            )
