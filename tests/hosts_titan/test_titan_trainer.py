"""torchtitan's Trainer on rollouts, beside the same Trainer that runs each rollout densely."""

import functools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_trainer import run
from processes import run_ranks
from scenarios_of_ranks import group
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.train import Trainer

from benchmarks.ranks.titan import models_on_cpus
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


@functools.cache
def register() -> None:
    spec = get_train_spec("qwen3")
    own = replace(
        spec,
        model_args={"tiny": TINY},
        build_dataloader_fn=NoData,
        build_tokenizer_fn=None,
        pipelining_fn=pipeline_llm,
    )
    register_train_spec("of_tests", own)


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
            logits = self.model_parts[0](padded[None])
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            logits = logits[0, : end - begin - 1]
            loss = F.cross_entropy(logits, wanted[1:], reduction="sum") / global_valid_tokens
            loss.backward()
            total += loss.detach()
        return total


Weights = dict[str, Tensor]


def trained(kind: type[Shared], *arguments: str) -> tuple[Weights, list[float]]:
    """Weights after the steps of a trainer, and losses of its log."""
    losses: list[float] = []

    class Logged(kind):  # type: ignore[misc, valid-type]
        def train_step(self, data: Any) -> None:
            self.metrics_processor.log = lambda step, mean, *_, **__: losses.append(mean)
            super().train_step(data)

    models_on_cpus()
    register()
    weights, trainer = run(Logged, *ARGUMENTS, *arguments)
    assert trainer.step == 3
    return weights, losses


def apart(found: Weights, wanted: Weights) -> float:
    pairs = [(weight, wanted[name]) for name, weight in found.items()]
    difference = sum(float((one - other).square().sum()) for one, other in pairs)
    return (difference / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5


def both(folder: str, shared: tuple[str, ...], dense: tuple[str, ...]) -> tuple[float, float]:
    """The distance of weights over their norm, and that of the losses."""
    found, logged = trained(Shared, f"--job.dump_folder={folder}", *shared)
    wanted, expected = trained(Dense, f"--job.dump_folder={folder}", *dense)
    assert len(logged) == 3
    return apart(found, wanted), max(abs(a - b) for a, b in zip(logged, expected, strict=True))


FULL = ("--activation_checkpoint.mode=full",)
TENSOR = ("--parallelism.tensor_parallel_degree=2",)
CONTEXT = ("--parallelism.context_parallel_degree=2",)
STAGES = ("--parallelism.pipeline_parallel_degree=2",)


@pytest.mark.parametrize(("ranks", "arguments"), [(1, FULL), (2, FULL), (2, TENSOR)])
def test_weights_after_steps(ranks: int, arguments: tuple[str, ...], tmp_path: Any) -> None:
    for weights, losses in run_ranks(ranks, both, str(tmp_path), arguments, arguments):
        assert weights < 1e-5 and losses < 1e-5, (weights, losses)


@pytest.mark.parametrize("arguments", [CONTEXT, STAGES])
def test_ranks_of_one_batch(
    arguments: tuple[str, ...], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside data ranks with the same rollouts: torchtitan's own context parallelism runs on no
    CPUs, and its pipelines take batches of equal lengths."""
    monkeypatch.setattr(Shared, "same", True)
    for weights, losses in run_ranks(2, both, str(tmp_path), arguments, ()):
        assert weights < 1e-5 and losses < 1e-5, (weights, losses)


def resumed(folder: str) -> dict[str, Any]:
    """Runs of 3 steps, and their last step from the checkpoint that another run has saved."""
    warnings.filterwarnings("ignore", "Detected an existing checkpoint", UserWarning)
    kept = ("--checkpoint.enable", "--checkpoint.interval=2", *TENSOR)
    found = {}
    for kind in (Shared, Dense):
        saved = f"--job.dump_folder={folder}/{kind.__name__}"
        found[kind], _ = trained(kind, saved, *kept)
    for kind in (Shared, Dense):
        saved = f"--job.dump_folder={folder}/{kind.__name__}"
        found[kind, "same"], _ = trained(kind, saved, *kept, "--checkpoint.load_step=2")
        other = Dense if kind is Shared else Shared
        found[kind, "other"], steps = trained(other, saved, *kept, "--checkpoint.load_step=2")
        assert len(steps) == 1
    return {
        "same": max(apart(found[kind, "same"], found[kind]) for kind in (Shared, Dense)) == 0,
        "apart": max(apart(found[kind, "other"], found[kind]) for kind in (Shared, Dense)),
    }


def test_checkpoints_resume_with_and_without_forkpoint(tmp_path: Any) -> None:
    for found in run_ranks(2, resumed, str(tmp_path)):
        assert found["same"] and found["apart"] < 1e-5, found
