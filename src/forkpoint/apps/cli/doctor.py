"""`forkpoint doctor`: what this installation has, and whether it computes right."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
    """Show versions, devices and kernels, and check a tiny model's gradients here.

    The exit code is 1 if the check fails.

    Attributes:
        json: Print one line of JSON and nothing else.
    """

    json: Flag = False

    def run(self) -> int:
        out = Output(json_only=self.json)
        with out.waiting("looking around"):
            from forkpoint.apps.environment import devices, versions
            from forkpoint.hosts.transformers.families import FAMILIES
            from forkpoint.ops.attention import KERNELS
            from forkpoint.ops.delta_rule import DELTA_KERNELS

            families = {name: family.model_class for name, family in FAMILIES.items()}
            names = [entry["device"] for entry in devices()]
            asked = {"softcap": 0.0, "window": 0}
            kernels = list_kernels(KERNELS, names, **asked)
            delta_kernels = list_kernels(DELTA_KERNELS, names)
        with out.waiting("checking gradients with eager blocks"):
            eager = self_test(compile_blocks=False)
        with out.waiting("checking gradients with compiled blocks"):
            compiled = self_test(compile_blocks=True)
        passed = eager.report.passed and compiled.report.passed
        installed = [(name, version or "not installed") for name, version in versions().items()]
        out.show(
            table("versions", installed),
            table("devices", [(d["device"], _describe(d)) for d in devices()]),
            table(f"attention kernels, head dim {HEAD_DIM}", _kernel_rows(kernels)),
            table(f"delta-rule kernels, head dim {HEAD_DIM}", _kernel_rows(delta_kernels)),
            table("model families", families.items()),
            *(f"self-test: {test}" for test in (eager, compiled)),
            *_compiled_by_default(),
        )
        for test in (eager, compiled):
            if not test.report.passed:
                out.show(test.report.table(width=out.width))
        compiled_test = {**compiled.report.to_dict(), "compiler_failure": compiled.failure}
        out.result(
            {
                "command": "doctor",
                "passed": passed,
                "versions": versions(),
                "devices": devices(),
                "kernels": kernels,
                "delta_rule_kernels": delta_kernels,
                "families": families,
                "self_test": eager.report.to_dict(),
                "compiled_self_test": compiled_test,
            }
        )
        return 0 if passed else 1


def list_kernels(
    kernels: Sequence[Any], devices: Iterable[str], **asked: Any
) -> list[dict[str, Any]]:
    """Of every kernel on every device and dtype, whether auto takes it and why it cannot serve."""
    import torch

    found: list[dict[str, Any]] = []
    for device in devices:
        for name in DTYPES:
            where = torch.device(device), getattr(torch, name), HEAD_DIM, HEAD_DIM
            taken = False
            for kernel in kernels:
                refusal = kernel.refusal(*where, deterministic=False, **asked)
                found.append(
                    {
                        "device": device,
                        "dtype": name,
                        "kernel": kernel.name,
                        "auto": refusal is None and not taken,
                        "refusal": refusal,
                    }
                )
                taken = taken or refusal is None
    return found


@dataclass(frozen=True)
class SelfTest:
    """A comparison of a tiny model's gradients, shared and dense."""

    blocks: str
    """"eager blocks" or "compiled blocks"."""
    report: "VerifyReport"
    failure: str | None
    """The compiler's error, where it failed and blocks ran eagerly instead."""

    def __str__(self) -> str:
        verdict = "passed" if self.report.passed else "FAILED"
        text = (
            f"{verdict} with {self.blocks} ({self.report.dtype}); a tiny model's gradients, shared "
            f"and dense, differ by {self.report.shared_error:.1e} of their norm (allowed "
            f"{self.report.allowed:.0e})"
        )
        if self.failure is None:
            return text
        return (
            f"{text}. The compiler failed here ({self.failure}), so blocks ran eagerly, as they do "
            "in steps; without compilation steps take longer"
        )


def self_test(*, compile_blocks: bool) -> SelfTest:
    """Gradients of a tiny model, shared and dense, on the best device here.

    In float64 with eager blocks; in float32 with compiled ones, for those of float64 models are
    not compiled on CUDA.
    """
    import torch

    from forkpoint.config import Config
    from forkpoint.losses import GRPO
    from forkpoint.rollouts.batch import RolloutBatch
    from forkpoint.testing import tiny_model
    from forkpoint.wrapping import wrap

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny_model("qwen3", dtype=torch.float32 if compile_blocks else torch.float64)
    model.to(device)  # pyright: ignore[reportArgumentType]  (a decorator of transformers)
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
    policy.host.compiling.announced = True  # the command says itself what it is doing
    report = policy.verify(RolloutBatch(rollouts), GRPO())
    blocks = "compiled blocks" if compile_blocks else "eager blocks"
    return SelfTest(blocks, report, policy.host.compiling.failure)


def _compiled_by_default() -> list[str]:
    """Whose blocks are compiled on the best device here, and why others' are not."""
    import torch

    from forkpoint.engine.compiling import Compiling

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines: dict[str, list[str]] = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        reason = Compiling(None).reason_for_eager(device, dtype)
        text = "compiled" if reason is None else f"eager, because {reason}"
        lines.setdefault(text, []).append(str(dtype).removeprefix("torch."))
    return [f"blocks of {', '.join(names)} models: {text}" for text, names in lines.items()]


def _kernel_rows(kernels: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [
        (
            f"{kernel['device']} {kernel['dtype']}",
            kernel["kernel"],
            kernel["refusal"] or ("serves; auto takes it" if kernel["auto"] else "serves"),
        )
        for kernel in kernels
    ]


def _describe(device: dict[str, Any]) -> str:
    if "capability" not in device:
        return f"{device['name']}, {device['threads']} threads"
    memory = format_bytes(device["memory_bytes"])
    return f"{device['name']}, capability {device['capability']}, {memory}"
