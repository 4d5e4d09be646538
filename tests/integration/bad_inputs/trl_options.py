"""Options and data of TRL's trainers that are not allowed. TRL is not needed."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bad_inputs.kind import Kind
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.integrations.trl import shared_trainer
from forkpoint.integrations.trl.options import check_options
from forkpoint.integrations.trl.rows import PackedRows, Rows
from forkpoint.integrations.trl.stand_ins import Recorder
from forkpoint.integrations.trl.trainers import _SharedTrainer


class GRPOConfig(SimpleNamespace):
    """A configuration of TRL, as far as the checks read one."""

    optim: str = "adamw_torch_fused"
    router_aux_loss_coef: float | None = None


class GRPOTrainer(SimpleNamespace):
    """A trainer, likewise."""

    is_deepspeed_enabled: bool = False
    aux_loss_enabled: bool = False
    accelerator: Any = SimpleNamespace(num_processes=2)
    model: Any = torch.nn.Identity()


def checked(*, options: dict[str, Any] | None = None, **trainer: Any) -> Callable[[], object]:
    return lambda: check_options(GRPOTrainer(args=GRPOConfig(**(options or {})), **trainer))


def called(**arguments: Any) -> Callable[[], object]:
    ids = torch.tensor([[5, 7, 9]])
    return lambda: Rows.of_call({"input_ids": ids, "labels": ids, **arguments})


def packed() -> object:
    ids = torch.tensor([[0, 7, 9]])
    rows = Rows(ids, present=ids > 0, scored=ids > 0)
    return PackedRows([rows], temperature=1.0)


def trainers_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {name: type(name, (), {}) for name in ("GRPOTrainer", "RLOOTrainer", "DPOTrainer")}
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(**kinds))  # type: ignore[arg-type]


TRL = (
    Kind(
        name="An option of TRL that forkpoint's trainers do not take",
        error=UnsupportedError,
        call=checked(options={"activation_offloading": True}),
        message="GRPOConfig has activation_offloading=True, which forkpoint's GRPOTrainer does not "
        "take: activations are offloaded by forkpoint itself: pass forkpoint=Config("
        "activations='offload').",
        means="Before training starts. Other options are refused likewise; "
        "[trl.md](trl.md#options) has them.",
        remedy="Do as the message says, or use TRL's own trainer.",
    ),
    Kind(
        name="Images in TRL",
        error=UnsupportedError,
        call=checked(_is_vlm=True),
        message="GRPOTrainer was given images or a processor for them, which forkpoint does not "
        "compute yet: train a language model on text.",
        means="Log-probs of text that follows images have not been shown exact.",
        remedy="Use TRL's own trainer.",
    ),
    Kind(
        name="A trainer of TRL that does not share",
        error=UnsupportedError,
        prepare=trainers_of_trl,
        call=lambda: shared_trainer(type("KTOTrainer", (), {})),
        message="KTOTrainer is no GRPOTrainer, RLOOTrainer or DPOTrainer of TRL and no subclass of "
        "one. KTO, whose second forward has other rows, and the experimental asynchronous GRPO, "
        "which packs its rows itself, are not supported yet; nor is anything else. Use these "
        "trainers as they are.",
        means="`shared_trainer` takes classes whose loss asks the model for log-probs as those do.",
        remedy="Use TRL's own trainer.",
    ),
    Kind(
        name="Options of forkpoint that are no Config",
        error=ConfigError,
        call=lambda: _SharedTrainer(forkpoint={"sharing": "tree"}),  # type: ignore[arg-type]
        message="forkpoint is {'sharing': 'tree'} of type dict; it takes a forkpoint.Config, such "
        "as Config(sharing='tree'), or None.",
        means="A misspelt option would be silent otherwise.",
        remedy="Give a Config.",
    ),
    Kind(
        name="A keep_groups that is neither True nor False",
        error=ConfigError,
        call=lambda: _SharedTrainer(keep_groups="yes"),  # type: ignore[arg-type]
        message="keep_groups is 'yes'; allowed are True, False, None.",
        means="None is False, with a warning where that costs sharing.",
        remedy="Give one of them.",
    ),
    Kind(
        name="A loss in TRL that gives its model more than text",
        error=UnsupportedError,
        call=called(position_ids=torch.tensor([[0, 1, 2]])),
        message="the trainer gives its model position_ids, which forkpoint's trainers do not take: "
        "input_ids, attention_mask and labels are allowed. Rows without padding are not "
        "supported: set padding_free=False.",
        means="What is computed depends on it.",
        remedy="Do as the message says.",
    ),
    Kind(
        name="A loss in TRL of other tokens than the model's",
        error=UnsupportedError,
        call=called(labels=torch.tensor([[5, 8, 9]])),
        message="the trainer's labels are other tokens than its input_ids; log-probs of the tokens "
        "themselves are what forkpoint computes. Use a loss of these.",
        means="Shared tokens are scored by what follows them in each rollout.",
        remedy="Use a loss of the tokens themselves.",
    ),
    Kind(
        name="An empty prompt in TRL",
        error=UnsupportedError,
        call=packed,
        message="a row has a trained token and no token before it: its prompt is empty, so that "
        "TRL predicts the token from padding. Give every prompt at least one token, such as the "
        "tokenizer's bos_token.",
        means="What padding predicts is no property of the rollout.",
        remedy="Let prompts begin with a token.",
    ),
    Kind(
        name="A loss in TRL that calls its model for something else",
        error=UnsupportedError,
        call=lambda: Recorder(None)(input_ids=torch.tensor([[5, 7]])),
        message="the trainer's loss calls its model for something else than log-probs (arguments "
        "input_ids), which forkpoint does not compute in a training step. Use a loss of log-probs "
        "and entropies, or the trainer of TRL itself.",
        means="Shared steps compute log-probs, entropies and numbers of their distributions.",
        remedy="Use TRL's own trainer for such a loss.",
    ),
)
