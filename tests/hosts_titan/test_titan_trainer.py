"""torchtitan's Trainer on rollouts, beside the same Trainer that runs each rollout densely."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpu_trainer import run
from processes import run_ranks
from scenarios_of_ranks import group
from torch.nn import functional as F
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.train import Trainer

from forkpoint import Rollout
from forkpoint.integrations.titan import NoData, RolloutSteps
from forkpoint.losses import LogLikelihood

TINY = Qwen3ModelArgs(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48, vocab_size=61
)
ARGUMENTS = (
    "--model.name=of_tests",
    "--model.flavor=tiny",
    "--training.steps=3",
    "--training.seq_len=64",
    "--training.mixed_precision_param=float32",
    "--optimizer.eps=1e-3",
    "--optimizer.lr=1e-2",
    "--lr_scheduler.warmup_steps=0",
    "--metrics.log_freq=1",
    "--debug.seed=1",
)


def register() -> None:
    spec = get_train_spec("qwen3")
    own = replace(
        spec, model_args={"tiny": TINY}, build_dataloader_fn=NoData, build_tokenizer_fn=None
    )
    register_train_spec("of_tests", own)


class Shared(RolloutSteps, Trainer):
    loss = LogLikelihood()
    calls = 0

    def rollouts(self) -> list[Rollout]:
        self.calls += 1
        return group(10 * self.calls + dist.get_rank(), 4, 20, 9)


class Dense(Shared):
    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: Any):
        batch, total = input_dict["rollouts"], torch.zeros(())
        for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            ids = torch.tensor(batch.token_ids[begin:end].copy())
            wanted = torch.where(torch.tensor(batch.loss_mask[begin:end].copy()), ids, -100)
            logits = self.model_parts[0](ids[None, :-1])[0]
            loss = F.cross_entropy(logits, wanted[1:], reduction="sum") / global_valid_tokens
            loss.backward()
            total += loss.detach()
        return total


def both(folder: str, *arguments: str) -> tuple[float, float, int]:
    """The distance of weights over how far they have come, that of the losses, and steps."""
    register()
    logged: list[list[float]] = []
    found = []
    for kind in (Shared, Dense):
        losses: list[float] = []
        logged.append(losses)

        class Logged(kind):  # type: ignore[misc, valid-type]
            def train_step(self, data: Any, losses: list[float] = losses) -> None:
                self.metrics_processor.log = lambda step, mean, *_, **__: losses.append(mean)
                super().train_step(data)

        weights, trainer = run(Logged, *ARGUMENTS, f"--job.dump_folder={folder}", *arguments)
        found.append(torch.cat([w.flatten() for w in weights]))
        steps = trainer.step
    apart = float((found[0] - found[1]).norm() / found[1].norm())
    return apart, max(abs(a - b) for a, b in zip(*logged, strict=True)), steps


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_after_steps(ranks: int, tmp_path: Any) -> None:
    options = ("--activation_checkpoint.mode=full",)
    for apart, losses, steps in run_ranks(ranks, both, str(tmp_path), *options):
        assert apart < 1e-5 and losses < 1e-5 and steps == 3, (apart, losses, steps)
