"""Options and data of TRL's trainers that are not allowed. TRL is not needed."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bad_inputs.kind import Kind
from forkpoint import wrap
from forkpoint.errors import ConfigError
from forkpoint.integrations.trl import heads, shared_trainer
from forkpoint.integrations.trl.arrivals import Arrivals
from forkpoint.integrations.trl.calls import HeadAnswer, PackedRows, Rows, capturing
from forkpoint.integrations.trl.options import check_options
from forkpoint.integrations.trl.trainers import _SharedTrainer
from forkpoint.parallel.topology import ALL_PLACES
from forkpoint.testing import tiny_model


class GRPOConfig(SimpleNamespace):
    """A configuration of TRL, as far as the checks read one."""

    optim: str = "adamw_torch_fused"
    router_aux_loss_coef: float | None = None


class GRPOTrainer(SimpleNamespace):
    """A trainer, likewise."""

    is_deepspeed_enabled: bool = False
    is_fsdp_enabled: bool = False
    aux_loss_enabled: bool = False
    accelerator: Any = SimpleNamespace(num_processes=2)
    model: Any = torch.nn.Identity()
    sharing: Any = SimpleNamespace(context_ranks=1)


def checked(**options: Any) -> Callable[[], object]:
    return lambda: check_options(GRPOTrainer, GRPOConfig(**options))


def with_images_for_text() -> object:
    ids = torch.ones(1, 4, dtype=torch.int64)
    given = {"input_ids": ids, "labels": ids, "pixel_values": torch.zeros(1, 3, 4, 4)}
    return capturing(tiny_model("qwen3"))(**given, fused_lm_head=True)


def with_a_cut_image() -> object:
    ids = torch.ones(1, 6, dtype=torch.int64)
    images = {"pixel_values": torch.zeros(32, 8), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    types = torch.tensor([[0, 1, 1, 1, 1, 1]])
    given = {"input_ids": ids, "labels": ids, "mm_token_type_ids": types, **images}
    return capturing(nn.Identity())(**given, fused_lm_head=True)


def arrived(then: Callable[[Arrivals, torch.Tensor, nn.Parameter], object]) -> Callable[[], object]:
    """Call `then` with values and what arrives at them, and with a parameter."""

    def call() -> object:
        parameter = nn.Parameter(torch.ones(()))
        arrivals = Arrivals([("weight", parameter)], lambda: None)
        (loss,) = arrivals.at(torch.ones(()))
        return then(arrivals, loss, parameter)

    return call


def changed(arrivals: Arrivals, _: torch.Tensor, parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(2)
    arrivals.check_weights()


def newer_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(__version__="1.17.0"))  # type: ignore[arg-type]


def other_head() -> object:
    ids = torch.tensor([[5, 7, 9]])
    rows = Rows(ids, present=ids > 0, scored=ids > 5)
    model: Any = lambda **_: HeadAnswer(torch.full((1, 2), -1.0))  # noqa: E731
    trainer = SimpleNamespace(accelerator=SimpleNamespace(gather=lambda told: told))
    policy = wrap(tiny_model("llama", dtype=torch.float32))
    answer = HeadAnswer(torch.full((1, 2), -2.0))
    return heads.HeadChecks().check(trainer, policy, model, rows, 0.9, lambda *_: answer)


def called(**arguments: Any) -> Callable[[], object]:
    ids = torch.tensor([[5, 7, 9]])
    return lambda: Rows.of_call({"input_ids": ids, "labels": ids, **arguments}, None)


def packed() -> object:
    ids = torch.tensor([[0, 7, 9]])
    rows = Rows(ids, present=ids > 0, scored=ids > 0)
    return PackedRows([rows], temperature=1.0, places=ALL_PLACES)


def trainers_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {name: type(name, (), {}) for name in ("GRPOTrainer", "RLOOTrainer", "DPOTrainer")}
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(**kinds))  # type: ignore[arg-type]


TRL = (
    Kind(
        call=checked(activation_offloading=True),
        message="GRPOConfig has activation_offloading=True, which forkpoint's GRPOTrainer does",
    ),
    Kind(
        call=with_images_for_text,
        message="the trainer gives images to a Qwen3ForCausalLM; forkpoint's trainers take those",
    ),
    Kind(
        call=with_a_cut_image,
        message="the trainer's rows have 5 tokens of images, and 2 images or tiles of a size of 32",
    ),
    Kind(
        prepare=newer_trl,
        call=other_head,
        message="TRL's log_probs differ from forkpoint's by 1 (rms), more than rounding explains",
    ),
    Kind(
        call=arrived(lambda _, loss, __: loss.backward(create_graph=True)),
        message="the backward of this loss was called with create_graph, and gradients of",
    ),
    Kind(
        call=arrived(changed),
        message="weights have changed between compute_loss and the last backward of its optimizer",
    ),
    Kind(
        prepare=trainers_of_trl,
        call=lambda: shared_trainer(type("KTOTrainer", (), {})),
        message="KTOTrainer is not TRL's GRPOTrainer, RLOOTrainer or DPOTrainer, nor a subclass",
    ),
    Kind(
        error=ConfigError,
        call=lambda: _SharedTrainer(forkpoint={"sharing": "tree"}),  # type: ignore[arg-type]
        message="forkpoint is {'sharing': 'tree'} of type dict;",
    ),
    Kind(
        call=called(labels=torch.tensor([[5, 8, 9]])),
        message="the trainer's labels are other tokens than its input_ids;",
    ),
    Kind(call=packed, message="a row has a trained token and no token before it:"),
    Kind(
        call=lambda: capturing(None)(input_ids=torch.tensor([[5, 7]])),
        message="the trainer's loss calls its model for other outputs than log-probs (arguments",
    ),
)
