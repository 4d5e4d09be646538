"""Help that fits a screen of 80 columns and 24 lines. Imports no torch.

`--help-all` shows every option, from the docstrings of the commands.
"""

from dataclasses import dataclass
from textwrap import wrap

WIDTH = 79
_INDENT = 2


@dataclass(frozen=True)
class Page:
    """Help of one command."""

    usage: str
    """Arguments, as they follow its name."""
    about: str
    rows: tuple[tuple[str, str], ...]
    """Arguments and what they mean: those that most runs need."""
    example: str

    def text(self, name: str) -> str:
        """The page as it is printed, of lines of at most `WIDTH` characters."""
        rows = (
            *self.rows,
            ("--json", "print one line of JSON and nothing else"),
            ("--help-all", "every option, with its default"),
        )
        return "\n".join(
            [
                f"usage: forkpoint {name} {self.usage}",
                "",
                *wrap(self.about, WIDTH),
                "",
                *columns(rows),
                "",
                f"example: {self.example}",
            ]
        )


def columns(rows: tuple[tuple[str, str], ...]) -> list[str]:
    """Two columns, the second one broken where it is longer than the line."""
    left = max(len(name) for name, _ in rows) + _INDENT
    lines: list[str] = []
    for name, text in rows:
        first, *others = wrap(text, WIDTH - _INDENT - left)
        lines.append(f"{'':{_INDENT}}{name:{left}}{first}")
        lines += [f"{'':{_INDENT + left}}{other}" for other in others]
    return lines


_FILE = ("FILE", "rollouts of a trainer or of forkpoint, or a trace's folder")
_RUNS = ("--model M", "a transformers model's folder, or a config.json for random weights")
_LOSS = ("--loss NAME", "grpo; or ppo, dapo, dr_grpo, gspo, sft, dpo, ...")
_DTYPE = ("--dtype NAME", "float32, bfloat16 or float64")
_BUDGET = ("--memory-budget SIZE", "most memory of activations, such as 40GB")

PAGES: dict[str, Page] = {
    "demo": Page(
        usage="[OPTIONS]",
        about="Watch GRPO learn on a CPU, each gradient taken shared and dense and compared. "
        "A tiny model with random weights is trained; nothing is downloaded.",
        rows=(
            ("--steps N", "how many optimizer steps (40)"),
            ("--groups N", "prompts of a step (4)"),
            ("--rollouts-per-group N", "responses to each prompt (16)"),
            ("--prompt-tokens N", "tokens of a prompt (1024)"),
            ("--response-tokens N", "tokens of a response (24)"),
            ("--output DIR", "the folder of the plot and its rows (demo-output)"),
        ),
        example="forkpoint demo --steps 10",
    ),
    "plan": Page(
        usage="FILE [OPTIONS]",
        about="Show what would run for a file of rollouts, and what sharing saves. Runs no model: "
        "needs neither weights nor a GPU.",
        rows=(
            _FILE,
            ("--model M", "a name, folder or config.json: counts FLOPs, predicts memory"),
            ("--details", "the whole plan, with its tables and its tree"),
            ("--loss NAME", "the loss it is for: gspo, dpo and simpo couple tokens"),
            ("--ranks N", "the step on N data-parallel ranks, by how rollouts are placed"),
            ("--batch-rollouts N", "a batch is N rollouts (the whole file)"),
            ("--sharing NAME", "auto, none (ordinary training), group or tree"),
            ("--boundary NAME", "auto, within, across or mixed"),
            _BUDGET,
            _DTYPE,
            ("--limit N", "read only the first N rollouts"),
        ),
        example="forkpoint plan rollouts.jsonl --model Qwen/Qwen3-8B",
    ),
    "replay": Page(
        usage="FILE --model M [OPTIONS]",
        about="Train a model for some steps on a file of rollouts or a trace, and measure it.",
        rows=(
            _FILE,
            _RUNS,
            ("--steps N", "how many optimizer steps (4)"),
            ("--groups-per-step N", "groups that make a step's batch (1)"),
            ("--baseline dense", "train a copy without sharing beside it, and compare"),
            _LOSS,
            ("--lr RATE", "learning rate of AdamW (1e-5)"),
            ("--output DIR", "keep rows and a checkpoint, for forkpoint report"),
            ("--resume", "go on with the replay in the output folder"),
            _BUDGET,
            _DTYPE,
        ),
        example="forkpoint replay rollouts.jsonl --model ./qwen3 --baseline dense",
    ),
    "report": Page(
        usage="INPUT... [OPTIONS]",
        about="Make one HTML page of replays or of rollouts: what was shared, when it ran, how "
        "far it drifted. The page needs no network and no other file. Runs no model.",
        rows=(
            (
                "INPUT",
                "a folder that forkpoint replay --output wrote, a file of rollouts, or the folder "
                "of a trace",
            ),
            ("--output FILE", "the page (report.html); replaces what was there"),
            ("--plots DIR", "a folder for the figures as PNG and SVG"),
            (
                "--model M",
                "for rollouts: a name (Qwen/Qwen3-8B), a folder or a config.json; counts FLOPs and "
                "bytes",
            ),
            ("--limit N", "read only the first N rollouts of a file"),
        ),
        example="forkpoint report run --output run.html",
    ),
    "verify": Page(
        usage="FILE --model M [OPTIONS]",
        about="Check on your model and rollouts that shared gradients are as exact as dense "
        "training's, of every parameter, sharing within microbatches and across them. Takes "
        "memory for a second model. The exit code is 1 if they are not, 3 if nothing can be "
        "shared.",
        rows=(
            _FILE,
            _RUNS,
            ("--limit-groups N", "compare the first N groups (1)"),
            _LOSS,
            ("--sharing NAME", "auto, none, group or tree"),
            ("--boundary NAME", "auto, within, across or mixed"),
            _BUDGET,
            _DTYPE,
            ("--device NAME", "auto, cpu or cuda"),
        ),
        example="forkpoint verify rollouts.jsonl --model ./qwen3 --dtype bfloat16",
    ),
    "calibrate": Page(
        usage="--model M [OPTIONS]",
        about="Measure this device with a model's shape, so that plans are priced in "
        "milliseconds. Takes under two minutes. Weights are random, and layers few.",
        rows=(
            ("--model M", "a transformers model's folder, or its config.json"),
            ("--output FILE", "the file to write (where policies look for it)"),
            _DTYPE,
            ("--device NAME", "auto, cpu or cuda"),
            ("--blocks NAME", "auto, compiled or eager, as in training"),
            ("--max-seconds S", "begin no longer measurements after that (110)"),
        ),
        example="forkpoint calibrate --model ./qwen3 --dtype bfloat16",
    ),
    "doctor": Page(
        usage="[OPTIONS]",
        about="Show versions, devices and kernels, and check a tiny model's gradients on this "
        "machine. The exit code is 1 if the check fails.",
        rows=(),
        example="forkpoint doctor",
    ),
}

TOP = """\
usage: forkpoint COMMAND [OPTIONS]

Train language models on rollouts that share tokens, computing every shared
token once. Rollouts are prompts with sampled responses; the responses to one
prompt form a group and share its tokens.

{commands}

Begin with `forkpoint demo`, then `forkpoint plan FILE` on your own rollouts.

{options}

exit codes: 0 done, 1 a check failed, 2 an error in what was given,
3 nothing to verify, 70 a defect of forkpoint, 130 interrupted"""

_ABOUT = (
    ("demo", "watch GRPO learn on a CPU, with nothing to prepare"),
    ("plan", "show what would run for a file of rollouts, and what that saves"),
    ("verify", "check shared gradients against dense on your model"),
    ("replay", "train for some steps on a file of rollouts, and measure it"),
    ("report", "make one HTML page of replays or rollouts"),
    ("calibrate", "measure this device, so that plans are priced in milliseconds"),
    ("doctor", "show versions, devices and kernels, and check a tiny model"),
)
OF_EVERY_COMMAND = (
    ("--help, --help-all", "a screen of help, of a command too; every option"),
    ("--color auto|always|never", "colour verdicts (auto: on a terminal)"),
    ("--debug", "show the traceback of an error"),
)


def overview() -> str:
    """Help of `forkpoint` itself."""
    options = (("--version", "the version, and nothing else"), *OF_EVERY_COMMAND)
    return TOP.format(commands="\n".join(columns(_ABOUT)), options="\n".join(columns(options)))
