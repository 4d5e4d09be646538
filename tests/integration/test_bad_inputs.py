"""Every kind of bad input, in the library or on the command line; the table is in bad_inputs/."""

import re
from pathlib import Path

import pytest
from bad_inputs import KINDS, TOPICS, Kind
from bad_inputs.kind import QUIET, stock_files
from commands import Shell

from forkpoint import errors
from forkpoint.engine.transaction import ADDED, CLEARED, UNCHANGED

ROOT = Path(__file__).parents[2]

pytestmark = QUIET
IN_LIBRARY = [name for name, kind in KINDS.items() if kind.call]
ON_COMMAND_LINE = [name for name, kind in KINDS.items() if kind.argv]


@pytest.fixture
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kind:
    """The kind of that name, with its files in the present folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    found = KINDS[request.param]
    stock_files()
    if found.prepare:
        found.prepare(monkeypatch)
    return found


@pytest.mark.parametrize("kind", IN_LIBRARY, indirect=True)
def test_the_library_refuses(kind: Kind) -> None:
    assert kind.call is not None
    with pytest.raises(errors.ForkpointError) as caught:
        kind.call()
    # What a reader raises besides is of a public class.
    kinds = [e for e in type(caught.value).__mro__ if e.__module__ == errors.__name__]
    assert kinds[0] is kind.error
    assert kind.message in str(caught.value)


IN_BOTH = [name for name in ON_COMMAND_LINE if KINDS[name].call]
# Errors of the library are printed by the same lines of code: every 16th shows it.
ARGUMENTS = [
    *((name, ()) for name in ON_COMMAND_LINE if name not in IN_BOTH),
    *((name, ()) for name in IN_BOTH[::16]),
    *((name, ("--json",)) for name in ON_COMMAND_LINE[::16]),
]


@pytest.mark.parametrize(("kind", "more"), ARGUMENTS, indirect=["kind"])
def test_the_command_line_refuses(
    kind: Kind, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A defect would be raised here: `main` catches errors of users alone."""
    done = Shell(capsys)(*kind.argv, *more)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ") and kind.message in done.err


def test_every_class_of_errors_is_met() -> None:
    assert len(KINDS) == sum(map(len, TOPICS.values())), "two messages begin alike"
    classes = {e for e in vars(errors).values() if isinstance(e, type)} - {errors.ForkpointError}
    # Traces are those of test_traces.py.
    assert {kind.error for kind in KINDS.values()} == classes - {errors.TraceError}


PAGE = "".join(
    (ROOT / "docs" / "reference" / f"{page}.md").read_text(encoding="utf-8")
    for page in ("errors", "errors-models")
)


def test_messages_and_classes_on_the_page_of_errors_are_raised() -> None:
    raised = {" ".join(k.message.split()): f"`{k.error.__name__}`" for k in KINDS.values()}
    entries = re.findall(r"```text\n(.*?)```\n(`\w+`): ", PAGE, re.DOTALL)
    assert len(entries) == PAGE.count("```text") > 20
    for message, error in entries:
        assert raised.get(" ".join(message.split())) == error, message


def test_the_page_has_the_classes_and_the_notes_of_failed_steps() -> None:
    assert set(re.findall(r"^\| `(\w+Error)` \|", PAGE, re.MULTILINE)) == {
        name for name, e in vars(errors).items() if isinstance(e, type)
    } - {"ForkpointError"}
    notes = re.findall(r"^\| (\w.*?) \| `\w+` \|", PAGE, re.MULTILINE)[-3:]
    for note, text in zip(notes, (UNCHANGED, CLEARED, ADDED), strict=True):
        assert note in text
