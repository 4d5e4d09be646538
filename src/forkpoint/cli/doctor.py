"""`forkpoint doctor`: what this installation has, and whether it computes right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from forkpoint.cli.options import Flag
from forkpoint.cli.output import Output
from forkpoint.synthetic import synthetic_rollouts

if TYPE_CHECKING:
    from forkpoint.verify import VerifyReport

DTYPES = ("bfloat16", "float32")
HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show versions, devices and kernels, and check a tiny model's gradients here.

    The exit code is 1 if the check fails.

    Attributes:
        json: Print only the JSON line.
    """

    json: Flag = False

    def run(self) -> int:
        out = Output(json_only=self.json)
        with out.waiting("looking around"):
            from forkpoint.environment import devices, versions
            from forkpoint.hosts.families import FAMILIES

            families = {name: family.model_class for name, family in FAMILIES.items()}
            kernels = list_kernels([entry["device"] for entry in devices()])
            delta_kernels = list_delta_kernels([entry["device"] for entry in devices()])
            report = self_test()
        out.show(
            _table("versions", versions().items()),
            _table("devices", [(d["device"], _about(d)) for d in devices()]),
            *(
                _table(
                    f"{of} kernels, head dim {HEAD_DIM}",
                    [
                        (f"{k['device']} {k['dtype']}", k["kernel"], k["refusal"] or _role(k))
                        for k in listed
                    ],
                )
                for of, listed in (("attention", kernels), ("delta-rule", delta_kernels))
            ),
            _table("model families", families.items()),
            f"self-test: {'passed' if report.passed else 'FAILED'}; a tiny model's gradients, "
            f"shared and dense, differ by {report.shared_error:.1e} of their norm (allowed "
            f"{report.allowed:.0e})",
        )
        if not report.passed:
            out.show(report.table(width=out.width))
        out.result(
            {
                "command": "doctor",
                "passed": report.passed,
                "versions": versions(),
                "devices": devices(),
                "kernels": kernels,
                "delta_rule_kernels": delta_kernels,
                "families": families,
                "self_test": report.to_dict(),
            }
        )
        return 0 if report.passed else 1


def list_kernels(devices: list[str]) -> list[dict[str, Any]]:
    """Every attention kernel on every device and dtype."""
    from forkpoint.ops.attention import KERNELS

    asked = {"softcap": 0.0, "window": 0, "deterministic": False}
    return _listed(KERNELS, devices, asked)


def list_delta_kernels(devices: list[str]) -> list[dict[str, Any]]:
    """The same of the gated delta rule's."""
    from forkpoint.ops.delta_rule import DELTA_KERNELS

    return _listed(DELTA_KERNELS, devices, {"deterministic": False})


def _listed(
    kernels: Sequence[Any], devices: list[str], asked: dict[str, Any]
) -> list[dict[str, Any]]:
    """Whether auto takes each of these, and why it cannot serve."""
    import torch

    found: list[dict[str, Any]] = []
    for device in devices:
        for name in DTYPES:
            taken = False
            for kernel in kernels:
                refusal = kernel.refusal(
                    torch.device(device), getattr(torch, name), HEAD_DIM, HEAD_DIM, **asked
                )
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


def self_test() -> "VerifyReport":
    """Gradients of a tiny float64 model, shared and dense, on the best device here."""
    import torch

    from forkpoint.config import Config
    from forkpoint.losses import GRPO
    from forkpoint.policy import wrap
    from forkpoint.rollouts import RolloutBatch
    from forkpoint.testing import tiny_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny_model("qwen3", dtype=torch.float64)
    model.to(device)  # pyright: ignore[reportArgumentType]  (a decorator of transformers)
    rollouts = synthetic_rollouts(
        groups=2,
        rollouts_per_group=4,
        prompt_tokens=24,
        system_tokens=8,
        response_tokens=8,
        vocab_size=model.config.vocab_size,
    )
    policy = wrap(model, Config(sharing="tree", boundary="across"))
    return policy.verify(RolloutBatch(rollouts), GRPO())


def _role(kernel: dict[str, Any]) -> str:
    return "serves; auto takes it" if kernel["auto"] else "serves"


def _about(device: dict[str, Any]) -> str:
    if "capability" not in device:
        return f"{device['name']}, {device['threads']} threads"
    gib = device["memory_bytes"] / 2**30
    return f"{device['name']}, capability {device['capability']}, {gib:.1f} GiB"


def _table(title: str, rows: Any) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for row in rows:
        table.add_row(*("not installed" if cell is None else str(cell) for cell in row))
    return table
