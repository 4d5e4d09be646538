"""Fixtures for tests of several folders."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

# An unchanged commit passes every time: examples are drawn from a fixed seed.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="K/N: the K-th of N parts of the tests, from 1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one part of the tests; a test is in the same part whatever else is collected."""
    which, parts = map(int, config.getoption("part").split("/"))
    sorted_out: tuple[list[pytest.Item], list[pytest.Item]] = ([], [])
    for item in items:
        sorted_out[crc32(item.nodeid.encode()) % parts == which - 1].append(item)
    if parts > 1:
        config.hook.pytest_deselected(items=sorted_out[0])
        items[:] = sorted_out[1]


def pytest_collection_finish() -> None:
    """Leave what is there by now, modules and thousands of tests, out of garbage collections.

    They would look at it again and again, which takes a tenth of the time of all tests. A test that
    freezes more leaves it frozen.
    """
    gc.collect()
    gc.freeze()


SHARED_DATA = Path(__file__).parents[1].parent / "shared" / "data"


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch.empty and its like return NaN, those inside of torch's own kernels too."""
    import torch
    from torch.utils import deterministic

    assert deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Where a file of real rollouts lies; the test is skipped where it is missing."""

    def find(name: str) -> Path:
        path = SHARED_DATA / name
        if not path.is_file():
            pytest.skip(f"{path} is missing: this test reads real rollouts from there")
        return path

    return find


@pytest.fixture
def without_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a model is refused by name."""
    monkeypatch.setattr("forkpoint.hosts.host.ModelHost._check_model", lambda self: None)
    for name in ("check_random", "check_parameter_hooks"):
        monkeypatch.setattr(f"forkpoint.hosts.refusals.{name}", lambda *_: None)
    name = "forkpoint.hosts.transformers.refusals.check_checkpointing"
    monkeypatch.setattr(name, lambda *_, **__: None)


@pytest.fixture
def without_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample runs before a step, for tests that count what runs."""
    monkeypatch.setattr("forkpoint.step.self_check.SampleChecks.is_due", lambda *_: False)


@pytest.fixture
def graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled blocks are traced and differentiated as ever, and no code is generated for them.

    Inductor takes ten times as long as everything before it.
    """
    import torch

    compiler = torch.compile

    def traced(function: Callable[..., Any], *, dynamic: bool, options: Any) -> Callable[..., Any]:
        return compiler(function, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", traced)


@pytest.fixture(autouse=True)
def no_gpu_is_measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies of tests plan by nominal prices on GPUs as well."""
    if any(request.node.get_closest_marker(mark) for mark in ("gpu", "multi_gpu")):
        monkeypatch.setattr("forkpoint.step.calibrate.automatic.MEASURED", set())


@pytest.fixture(autouse=True)
def no_list_is_left() -> Iterator[None]:
    """No step leaves its lists of modules in force."""
    yield
    import sys

    modules = sys.modules.get("forkpoint.hosts.modules")
    assert modules is None or modules._walks.get() is None, "a step has left its lists in force"
