"""docs/errors.md, made of the table."""

from textwrap import fill

from transformers import __version__

from bad_inputs import TOPICS, Kind
from bad_inputs.kind import FAMILY_CLASSES, FAMILY_NAMES
from forkpoint import errors
from forkpoint.plan import MODELS

CLASSES: dict[type[errors.ForkpointError] | None, str] = {
    getattr(errors, name): name
    for name in (
        *("RolloutError", "TraceError", "ConfigError", "ArgumentError", "PlanError"),
        *("UnsupportedError", "RankError"),
    )
}

HEAD = """\
# Errors

The kinds of bad input and of set-ups that forkpoint refuses: the message, why it is refused, and
what to do. The values in the messages are those of an example. `make errors-page` writes this page
from the cases that the tests provoke (`tests/integration/bad_inputs/`), so that each message stands
here as it is raised.

All classes are a `forkpoint.ForkpointError` and a `ValueError`:

| class | what it says | topics |
|---|---|---|
"""

TAIL = """\
On the command line a message follows `error: ` on stderr, stdout is empty, and the exit status is
2, with `--json` too. Any other exception is a defect of forkpoint: one line that begins with
`internal error` and says what to report, and exit status 70. `--debug` shows the traceback.

A refusal changes nothing: it comes before anything runs, or the step's gradients are taken back.
Errors that come from elsewhere while a step runs (out of memory, an error in a loss of your own, an
interrupt) pass through as they are. Every exception that leaves a step which has begun to run has
exactly one of these notes, and `policy.last_step.gradients` says the same in one word:

| note | `last_step.gradients` | what to do |
|---|---|---|
"""

NOTES = {
    "this step failed; .grad is as it was before it, and the step may be tried again": (
        "unchanged",
        "try again, with smaller rows where memory ran out",
    ),
    "every .grad is None, and an accumulated step must be redone from its start": (
        "cleared",
        "begin the accumulation again; `Config(restore_grads=True)` keeps earlier gradients, for "
        "the memory of a copy",
    ),
    "this exception arrived after the step had succeeded": (
        "added",
        "go on as after a step that returned: its whole gradient is in `.grad`",
    ),
}


def page() -> str:
    """The whole page."""
    text = HEAD
    for error, name in CLASSES.items():
        assert error is not None and error.__doc__ is not None
        topics = [t for t, kinds in TOPICS.items() if any(k.error is error for k in kinds)]
        links = ", ".join(f"[{topic}](#{topic.lower().replace(' ', '-')})" for topic in topics)
        says = error.__doc__.partition(".")[0]
        text += f"| `{name}` | {says[0].lower()}{says[1:]} | {links} |\n"
    text += f"\n{TAIL}"
    for note, (gradients, what) in NOTES.items():
        text += f"| {note} | `{gradients}` | {what} |\n"
    for topic, kinds in TOPICS.items():
        text += f"\n## {topic}\n"
        text += "".join(_entry(kind) for kind in kinds)
    return text


def _entry(kind: Kind) -> str:
    where = f"`{CLASSES[kind.error]}`."
    prose = fill(f"{where} {kind.means} **Remedy:** {kind.remedy}", 100, break_long_words=False)
    message = "\n".join(
        fill(line, 96, subsequent_indent="", break_long_words=False, break_on_hyphens=False)
        for line in _shown(kind.message).splitlines()
    )
    return f"\n### {kind.name}\n\n```text\n{message}\n```\n\n{prose}\n"


def _shown(message: str) -> str:
    """The message without what grows with every family, and without versions."""
    for names in (FAMILY_NAMES, FAMILY_CLASSES, ", ".join(MODELS)):
        message = message.replace(names, f"{names.partition(',')[0]}, ...")
    return message.replace(f"({__version__})", "(...)")
