"""`forkpoint doctor`: shows versions, devices and kernels, and checks gradients."""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from forkpoint.apps.cli.options import Flag
from forkpoint.apps.cli.output import Output, table
from forkpoint.rollouts.synthetic import synthetic_rollouts
from forkpoint.units import format_bytes

if TYPE_CHECKING:
    from forkpoint.verify.comparison import VerifyReport

DTYPES = ("bfloat16", "float32")
HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show versions, devices and kernels, and check gradients of a tiny model on this machine.

    The exit code is 1 if the check fails.

    Attributes:
        quick: Check only eager blocks. Compiling blocks takes most of the time.
        json: Print one line of JSON and nothing else.
    """

    quick: Flag = False
    json: Flag = False

    def run(self) -> int:
        out = Output(json_only=self.json)
        with out.waiting("reading versions and devices"):
            from forkpoint.device import versions
            from forkpoint.hosts.transformers.families import FAMILIES, MULTIMODAL
            from forkpoint.ops.attention import KERNELS
            from forkpoint.ops.delta_rule import DELTA_KERNELS

            found = {"versions": versions(), "devices": devices()}
            families = {**FAMILIES, **MULTIMODAL}
            found["families"] = {n: family.model_class for n, family in families.items()}
            names = [entry["device"] for entry in found["devices"]]
            kernels = {
                "kernels": list_kernels(KERNELS, names),
                "delta_rule_kernels": list_kernels(DELTA_KERNELS, names),
            }
        out.show(
            table("versions", [(n, v or "not installed") for n, v in found["versions"].items()]),
            table("devices", [(d["device"], _describe(d)) for d in found["devices"]]),
            table("model families", found["families"].items()),
            *(table(f"{name}, head dim {HEAD_DIM}", _rows(of)) for name, of in kernels.items()),
        )
        tests: dict[str, dict[str, Any]] = {}
        for blocks in ("eager",) if self.quick else ("eager", "compiled"):
            with out.waiting(f"checking gradients with {blocks} blocks"):
                report, failure = self_test(compile_blocks=blocks == "compiled")
            nearest = report.nearest
            out.show(
                f"self-test: {'passed' if report.passed else 'FAILED'} with {blocks} blocks "
                f"({report.dtype}); a tiny model's gradients, shared and dense, differ by "
                f"{nearest.shared_error:.1e} of their norm (allowed {nearest.allowed:.0e})"
            )
            if not report.passed:
                out.show(report.table(width=out.width))
            if failure is not None:
                out.show(f"The compiler failed ({failure}), so steps run blocks eagerly.")
            tests[blocks] = {**report.to_dict(), "compiler_failure": failure}
        passed = all(test["passed"] for test in tests.values())
        out.result(
            {"command": "doctor", "passed": passed, **found, **kernels}
            | {"self_test": tests["eager"], "compiled_self_test": tests.get("compiled")}
        )
        return 0 if passed else 1


def list_kernels(kernels: Sequence[Any], devices: Iterable[str]) -> list[dict[str, Any]]:
    """List all kernels for each device and dtype, with the kernel that auto takes, and reasons for
    kernels that cannot run."""
    import torch

    from forkpoint.ops.choice import Asked

    found: list[dict[str, Any]] = []
    for device, dtype in product(devices, DTYPES):
        asked = Asked(torch.device(device), getattr(torch, dtype), HEAD_DIM, HEAD_DIM)
        taken = False
        for kernel in kernels:
            refusal = kernel.refusal(asked)
            row = {"device": device, "dtype": dtype, "kernel": kernel.name, "refusal": refusal}
            found.append({**row, "auto": refusal is None and not taken})
            taken = taken or refusal is None
    return found


def devices() -> list[dict[str, Any]]:
    """The CPU and every CUDA device."""
    import torch

    cpu = {"device": "cpu", "name": platform.machine(), "threads": torch.get_num_threads()}
    found: list[dict[str, Any]] = [cpu]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return found


def self_test(*, compile_blocks: bool) -> "tuple[VerifyReport, str | None]":
    """Compare shared and dense gradients of a tiny model, on the best device of this machine.

    The dtype is float64, or float32 for compiled blocks on CUDA, where float64 models are not
    compiled.

    Returns:
        The comparison, and the error of the compiler if it failed, else None.
    """
    import torch

    from forkpoint.config import Config
    from forkpoint.losses import GRPO
    from forkpoint.rollouts.batch import RolloutBatch
    from forkpoint.testing import tiny_model
    from forkpoint.wrapping import wrap

    cuda = torch.cuda.is_available()
    single = compile_blocks and cuda
    # A block with few kernels, because the C++ compiler takes two seconds for each kernel on a CPU.
    model = tiny_model("llama", dtype=torch.float32 if single else torch.float64)
    model.to("cuda" if cuda else "cpu")  # pyright: ignore[reportArgumentType]  (a decorator of transformers)
    rollouts = synthetic_rollouts(
        groups=2,
        rollouts_per_group=4,
        prompt_tokens=24,
        system_tokens=8,
        response_tokens=8,
        vocab_size=model.config.vocab_size,
    )
    config = Config(sharing="tree", boundary="across", compile_blocks=compile_blocks)
    policy = wrap(model, config)
    policy.host.compiling.announced = True  # the command shows its own progress
    report = policy.verify(RolloutBatch(rollouts), GRPO())
    return report, policy.host.compiling.failure


def _rows(kernels: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    serves = {True: "runs; auto takes it", False: "runs"}
    return [
        (f"{k['device']} {k['dtype']}", k["kernel"], k["refusal"] or serves[k["auto"]])
        for k in kernels
    ]


def _describe(device: dict[str, Any]) -> str:
    if "capability" not in device:
        return f"{device['name']}, {device['threads']} threads"
    memory = format_bytes(device["memory_bytes"])
    return f"{device['name']}, capability {device['capability']}, {memory}"
