"""torchtitan's Trainer on rollouts, beside the same Trainer that runs each rollout densely."""

import warnings
from typing import Any

import pytest
import torch
from cpu_trainer import run
from processes import run_ranks
from scenarios_of_ranks import group
from titan_models import V03
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torchtitan.train import Trainer

from forkpoint import Rollout
from forkpoint.integrations.titan import RolloutSteps
from forkpoint.losses import GRPO, LogLikelihood


class Shared(RolloutSteps, Trainer):
    loss = LogLikelihood()
    same = False
    """Whether all ranks have the same rollouts."""

    def rollouts(self) -> list[Rollout]:
        return group(10 * self.step + (0 if self.same else self.data_rank), 4, 20, 9)


class Dense(Shared):
    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: Any):
        batch, total = input_dict["rollouts"], torch.zeros(())
        for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            ids = torch.tensor(batch.token_ids[begin:end].copy())
            wanted = torch.where(torch.tensor(batch.loss_mask[begin:end].copy()), ids, -100)
            padded = F.pad(
                ids[:-1], (0, (end - begin - 1) % 2)
            )  # tensor parallelism takes even ones
            self.model_parts[0]._skip_lm_head = False  # as 0.3's loss in chunks sets it
            logits = self.model_parts[0](padded[None])
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            logits = logits[0, : end - begin - 1]
            if isinstance(self.loss, GRPO):  # on-policy
                logprobs = -F.cross_entropy(logits, wanted[1:], reduction="none")
                ratios = (logprobs - logprobs.detach()).exp()[wanted[1:] != -100]
                terms = -float(batch.advantages[begin]) * ratios
            else:
                terms = F.cross_entropy(logits, wanted[1:], reduction="none")
            loss = terms.sum() / global_valid_tokens
            loss.backward()
            total += loss.detach()
        return total


Weights = dict[str, Tensor]


def trained(kind: type[Shared], folder: str, **options: Any) -> tuple[Weights, list[float]]:
    """Weights after the steps of a trainer, and losses of its log."""
    losses: list[float] = []

    class Logged(kind):  # type: ignore[misc, valid-type]
        def train_step(self, data: Any) -> None:
            self.metrics_processor.log = lambda step, mean, *_, **__: losses.append(mean)
            super().train_step(data)

    weights, trainer = run(Logged, folder, **options)
    assert trainer.step == 3
    return weights, losses


def apart(found: Weights, wanted: Weights) -> float:
    pairs = [(weight, wanted[name]) for name, weight in found.items()]
    difference = sum(float((one - other).square().sum()) for one, other in pairs)
    return (difference / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5


def both(folder: str, shared: dict[str, Any], dense: dict[str, Any]) -> tuple[float, float]:
    """The distance of weights over their norm, and that of the losses."""
    found, logged = trained(Shared, folder, **shared)
    wanted, expected = trained(Dense, folder, **dense)
    assert len(logged) == 3
    return apart(found, wanted), max(abs(a - b) for a, b in zip(logged, expected, strict=True))


FULL, TENSOR, STAGES = {"checkpoint": "full"}, {"tp": 2}, {"pp": 2}


@pytest.mark.parametrize(("ranks", "options"), [(1, FULL), (2, FULL), (2, TENSOR)])
def test_weights_after_steps(ranks: int, options: dict[str, Any], tmp_path: Any) -> None:
    for weights, losses in run_ranks(ranks, both, str(tmp_path), options, options):
        assert weights < 1e-5 and losses < 1e-5, (weights, losses)


def test_losses_of_advantages(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shared, "loss", GRPO())
    for weights, losses in run_ranks(2, both, str(tmp_path), {}, {}):
        assert weights < 1e-5 and losses < 1e-5, (weights, losses)


# 0.3's own context parallelism is refused.
@pytest.mark.parametrize("options", [STAGES] if V03 else [STAGES, {"cp": 2}])
def test_ranks_of_one_batch(
    options: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside data ranks with the same rollouts: torchtitan's own context parallelism runs on no
    CPUs, and its pipelines take batches of equal lengths."""
    monkeypatch.setattr(Shared, "same", True)
    for weights, losses in run_ranks(2, both, str(tmp_path), options, {}):
        assert weights < 1e-5 and losses < 1e-5, (weights, losses)


def resumed(folder: str) -> dict[str, Any]:
    """Runs of 3 steps, and their last step from the checkpoint that another run has saved."""
    warnings.filterwarnings("ignore", "Detected an existing checkpoint", UserWarning)
    # Of 0.3's schedulers, which call get_lr where they load.
    warnings.filterwarnings("ignore", "To get the last learning rate", UserWarning)
    found = {}
    for kind in (Shared, Dense):
        found[kind], _ = trained(kind, f"{folder}/{kind.__name__}", keep=True, **TENSOR)
    for kind in (Shared, Dense):
        saved = f"{folder}/{kind.__name__}"
        given = {"keep": True, "load_step": 2, **TENSOR}
        found[kind, "same"], _ = trained(kind, saved, **given)
        other = Dense if kind is Shared else Shared
        found[kind, "other"], steps = trained(other, saved, **given)
        assert len(steps) == 1
    return {
        "same": max(apart(found[kind, "same"], found[kind]) for kind in (Shared, Dense)) == 0,
        "apart": max(apart(found[kind, "other"], found[kind]) for kind in (Shared, Dense)),
    }


def test_checkpoints_resume_with_and_without_forkpoint(tmp_path: Any) -> None:
    for found in run_ranks(2, resumed, str(tmp_path), limit_s=240):
        assert found["same"] and found["apart"] < 1e-5, found
