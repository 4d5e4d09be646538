"""Which kernel of the gated delta rule serves, why others do not, and what to do about it."""

import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType

import numpy as np
import pytest
import torch

from forkpoint import UnsupportedError
from forkpoint.ops.choice import Asked
from forkpoint.ops.delta_rule import (
    DeltaKernel,
    chunked,
    fla,
    gated_delta_rule,
    kernel,
    operator,
    select_delta_kernel,
)
from forkpoint.ops.recurrence import StateTable
from forkpoint.tree import Level, StateLayout


def test_the_default_on_a_cpu() -> None:
    asked = Asked(torch.device("cpu"), torch.float64, 6, 5)
    assert select_delta_kernel("auto", asked).name == "chunked"
    with pytest.raises(UnsupportedError, match=r"no delta-rule kernel 'quick'; .*'fla', 'chunked'"):
        select_delta_kernel("quick", asked)
    with pytest.raises(UnsupportedError, match="'fla' cannot serve: it runs on cuda, not on cpu"):
        select_delta_kernel("fla", asked)


def test_tensors_beyond_32_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Asked] = []

    def select(name: str, each: Asked) -> DeltaKernel:
        asked.append(each)
        return chunked.KERNEL

    monkeypatch.setattr(operator, "select_delta_kernel", select)
    lengths = np.array([5, 1])
    zeros = np.zeros(2, np.int64)
    level = Level(np.array([0, 5]), lengths, zeros - 1, zeros[:0], final=False)
    table = StateTable(StateLayout((level,), zeros[:0]))
    q, v, g = torch.ones(6, 1, 4), torch.ones(6, 2, 8), torch.zeros(6, 2)
    # Values have 96 elements, and states of two chunks 128.
    for most, is_large in ((128, True), (129, False)):
        monkeypatch.setattr(kernel, "MOST_ELEMENTS", most)
        gated_delta_rule(q, q, v, g, g, table=table)
        assert asked.pop().is_large == is_large
    few = torch.ones(640, 2, 8)
    for most, is_large in ((640 * 16, True), (640 * 16 + 1, False)):
        monkeypatch.setattr(kernel, "MOST_ELEMENTS", most)
        assert kernel.is_large(few, key_dim=4, sequences=1) == is_large
    large = Asked(torch.device("cuda"), torch.bfloat16, 128, 128, is_large=True)
    refused(fla.KERNEL.refuses(large), "fewer than 2,147,483,648 elements")
    refused(fla.KERNEL.refuses(large._replace(is_large=False)), None)


class Machine:
    """Surroundings that fla.KERNEL sees: Hopper with all it needs, unless changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chip: tuple[int, int] = (9, 0)
        self.nvcc: bool = True
        self.distributions = {"fla-core": "0.6.0", "triton": "3.6.0", "tilelang": "0.1.15"}
        self.packages = {"fla", "triton", "tilelang"}
        for switch in ("FLA_TILELANG", "FLA_FLASH_QLA", "FLA_DISABLE_BACKEND_DISPATCH"):
            monkeypatch.delenv(switch, raising=False)
        found = self.packages
        monkeypatch.setattr(fla, "find_spec", lambda name: name if name in found else None)
        monkeypatch.setattr(metadata, "version", self._version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.chip)
        monkeypatch.setattr(fla, "_has_nvcc", lambda: self.nvcc)

    def _version(self, name: str) -> str:
        if name not in self.distributions:
            raise metadata.PackageNotFoundError(name)
        return self.distributions[name]

    def refusal(self) -> str | None:
        return fla.KERNEL.refuses_device(torch.device("cuda"))


def refused(found: str | None, reason: str | None) -> None:
    assert found is None if reason is None else reason in (found or "")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    select_delta_kernel.cache_clear()
    yield Machine(monkeypatch)
    select_delta_kernel.cache_clear()


OFF, ON = {"FLA_TILELANG": "0"}, {"FLA_TILELANG": "1"}
DISPATCH = {"FLA_DISABLE_BACKEND_DISPATCH": "1"}


@pytest.mark.parametrize(
    ("chip", "changes", "environment", "refusal"),
    [
        ((9, 0), {}, {}, None),
        ((9, 0), {"triton": "3.3.1", "tilelang": None}, {}, None),
        ((9, 0), {"triton": "3.4.0", "tilelang": None}, {}, "wrong gradients"),
        ((9, 0), {"triton": "3.7.0", "tilelang": None}, {}, "3.7.1 or newer"),
        ((9, 0), {"triton": "3.7.0"}, {}, None),
        ((9, 0), {"triton": "3.7.0", "tilelang": "0.1.9"}, {}, "0.1.9"),
        ((8, 0), {"tilelang": "0.1.9"}, {}, None),
        ((8, 0), {"nvcc": None}, {}, None),
        ((9, 0), {"triton": "3.7.1rc1", "tilelang": None}, {}, "3.7.1rc1"),
        ((9, 0), {"triton": "3.7.1", "tilelang": None}, {}, None),
        ((10, 0), {"triton": "3.7.1"}, {}, "10.0"),
        ((9, 0), {"nvcc": None}, {}, "CUDA_HOME"),
        ((9, 0), {"nvcc": None, "triton": "3.7.1"}, {}, None),
        ((9, 0), {"nvcc": None}, OFF, "unset FLA_TILELANG"),
        ((9, 0), {"nvcc": None}, OFF | DISPATCH, "unset FLA_DISABLE_BACKEND_DISPATCH"),
        # flash-linear-attention calls a tilelang that is asked for on other chips as well.
        ((9, 0), {}, ON, None),
        ((8, 0), {}, ON, "unset FLA_TILELANG"),
        ((9, 0), {"triton": "3.3.1", "tilelang": "0.1.9"}, ON, "tilelang 0.1.9"),
        ((9, 0), {"flash_qla": "0"}, {}, "FLA_FLASH_QLA=0"),
        ((9, 0), {"flash_qla": "0"}, {"FLA_FLASH_QLA": "0"}, None),
    ],
)
def test_where_fla_is_refused(
    chip: tuple[int, int],
    changes: dict[str, str | None],
    environment: dict[str, str],
    refusal: str | None,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By versions of packages, None where one is missing, and by variables."""
    machine.chip, machine.nvcc = chip, "nvcc" not in changes
    for name, version in changes.items():
        if version is None:
            machine.packages.discard(name)
        else:
            machine.packages.add(name)
            machine.distributions[name] = version
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refused(machine.refusal(), refusal)


def test_a_package_that_says_nothing_of_nvcc_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.utils", ModuleType("fla.utils"))
    assert fla._has_nvcc()


def test_fla_is_refused_where_it_cannot_serve(machine: Machine) -> None:
    asked = Asked(torch.device("cuda"), torch.bfloat16, 128, 128)
    refused(fla.KERNEL.refusal(asked._replace(head_dim=512)), "not 512")
    refused(fla.KERNEL.refusal(asked._replace(deterministic=True)), "not deterministic")
    machine.distributions["fla-core"] = "0.5.1"
    refused(fla.KERNEL.refusal(asked), "0.5.1 has not been shown exact")
    machine.packages.clear()
    refused(fla.KERNEL.refusal(asked), "pip install 'forkpoint[fla]'")


@pytest.mark.parametrize(
    ("installed", "refusal"),
    [
        ({"fla-core": "0.6.0", "triton": "3.7.1"}, None),
        ({"fla-core": "0.6.0", "pytorch-triton": "3.8.0+git1234"}, None),
        ({"flash-linear-attention": "0.2.1", "triton": "3.7.1"}, "0.2.1 has not been shown exact"),
        ({"fla-core": "0.6.0rc1", "triton": "3.7.1"}, "0.6.0rc1 has not been shown exact"),
        ({"triton": "3.7.1"}, "flash-linear-attention can be imported but is no installed package"),
        ({"fla-core": "0.6.0"}, "triton can be imported but is no installed package"),
    ],
    ids=str,
)
def test_versions_are_those_of_whatever_holds_the_kernels(
    installed: dict[str, str], refusal: str | None, machine: Machine
) -> None:
    machine.distributions = installed
    machine.packages.remove("tilelang")
    refused(machine.refusal(), refusal)


def test_a_slower_kernel_is_told_of(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    asked = Asked(torch.device("cuda"), torch.bfloat16, 128, 128)
    assert select_delta_kernel("auto", asked).name == "fla" and not caplog.records
    machine.nvcc = False
    select_delta_kernel.cache_clear()
    for _ in range(2):
        assert select_delta_kernel("auto", asked).name == "chunked"
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.name == "forkpoint"
    assert "'chunked' runs instead of the faster 'fla', because Triton 3.6.0" in record.message
    caplog.clear()
    select_delta_kernel("chunked", asked)
    select_delta_kernel("auto", asked._replace(device=torch.device("cpu")))
    assert not caplog.records, "who names it, and who has no CUDA device, knows"
