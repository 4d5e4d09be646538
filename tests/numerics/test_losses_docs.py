"""The table of docs/reference/losses.md is what the classes say of themselves."""

import inspect
from pathlib import Path

import pytest
from losses_by_loops import batch_for, evaluate, make_logprobs

from forkpoint import losses
from forkpoint.losses.views import batch_denominators

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "losses.md"
HEADER = "| loss | decomposition | divided by | needs | weights | arguments |"
COMMON = ("kl", "kl_estimator", "entropy")
REQUIRED = {"max_tokens": 8}


def loss_classes():
    """Every loss of the package with its names, bases left out."""
    names = {}
    for name in losses.__all__:
        value = getattr(losses, name)
        bases = (losses.Loss, losses.FunctionLoss, losses.PolicyLoss)
        if isinstance(value, type) and issubclass(value, losses.Loss) and value not in bases:
            names.setdefault(value, []).append(name)
    return {cls: sorted(own, key=lambda n: n != cls.__name__) for cls, own in names.items()}


def make(cls, **arguments):
    parameters = inspect.signature(cls).parameters
    return cls(**{n: v for n, v in REQUIRED.items() if n in parameters}, **arguments)


def divisors(cls):
    """Which denominators the loss is divided by, seen by doubling them one at a time."""
    loss = make(cls)
    batch = batch_for(loss)
    counts = vars(batch_denominators(batch))
    logprobs_T = make_logprobs(batch)
    before, _ = evaluate(loss, batch, logprobs_T)
    found = []
    for name in counts:
        doubled = losses.Denominators(**{**counts, name: 2 * counts[name]})
        after, _ = evaluate(loss, batch, logprobs_T, denominators=doubled)
        if after != before:
            assert after == pytest.approx(before / 2)
            found.append(name)
    return found


def needs(cls):
    always = make(cls).needs
    cells = [f"`{name}`" for name in always]
    if "kl" in inspect.signature(cls).parameters:
        cells += [f"`{name}` with `kl`" for name in make(cls, kl=0.1).needs if name not in always]
    return ", ".join(cells)


def arguments(cls):
    """Its own first, what it inherits last, what all policy losses have left out."""
    parameters = inspect.signature(cls).parameters.values()
    inherited = inspect.signature(losses.PolicyLoss).parameters
    ordered = sorted(parameters, key=lambda p: p.name in inherited)
    shown = [p for p in ordered if not (issubclass(cls, losses.PolicyLoss) and p.name in COMMON)]
    return ", ".join(
        f"`{p.name}`" if p.default is p.empty else f"`{p.name}={p.default!r}`" for p in shown
    )


def row(cls, names):
    cells = (
        ", ".join(f"`{name}`" for name in names),
        cls.decomposition,
        ", ".join(divisors(cls)),
        needs(cls),
        "yes" if cls.takes_weights else "refused",
        arguments(cls),
    )
    return "| " + " | ".join(cells) + " |"


def test_the_table_is_what_the_classes_say():
    expected = {row(cls, names) for cls, names in loss_classes().items()}
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    below = lines[lines.index(HEADER) + 2 :]
    found = below[: next(n for n, line in enumerate(below) if not line.startswith("|"))]
    missing, wrong = expected - set(found), set(found) - expected
    assert not missing and not wrong, "docs/reference/losses.md lacks\n{}\nand has\n{}".format(
        "\n".join(sorted(missing)), "\n".join(sorted(wrong))
    )
    assert len(found) == len(set(found))
