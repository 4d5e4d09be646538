"""Small steps that are interrupted, and what must hold of everything afterwards."""

import atexit
import gc
import hashlib
import operator
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
from interrupt_ways import Attempt, codes_of
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from forkpoint import Config, Policy, Rollout, RolloutBatch, losses, wrap
from forkpoint.engine.staging import staging_for
from forkpoint.engine.transaction import ADDED, CLEARED, UNCHANGED, Transaction
from forkpoint.hosts import modules
from forkpoint.losses import Loss
from forkpoint.parallel.call import run_on_ranks
from forkpoint.step import run as step_run
from forkpoint.testing import ReadOnlyHook, tiny_model
from hybrids import tiny_hybrid
from integration.steps import model_state
from versions import checkpoint_blocks
from watched import watched

ACROSS = Config(sharing="tree", boundary="across", max_microbatch_tokens=8)
FORWARD_BACKWARD: CodeType = Policy.forward_backward.__code__
DEVICE = torch.device(os.environ.get("FORKPOINT_INTERRUPTS_DEVICE", "cpu"))
FOLDER = Path(tempfile.mkdtemp(prefix="interrupts-"))
atexit.register(FOLDER.rmdir)
CHUNK_BYTES = 4096
"""Bytes of host memory allocated at a time: tensors of these models take several of its blocks."""
Gradients = dict[str, Tensor | None]


RUNS = (step_run.run, run_on_ranks, Transaction.run)
LEAVING = (FORWARD_BACKWARD, *(function.__code__ for function in RUNS))


def small_batch() -> RolloutBatch:
    """One prompt, a fork below it, and a fork below that: microbatches A0, B0, B1, C0."""
    rng = np.random.default_rng(0)
    prompt, first = rng.integers(0, 61, 5).tolist(), rng.integers(0, 61, 4).tolist()
    tokens = [prompt + first + rng.integers(0, 61, n).tolist() for n in (3, 2)]
    tokens.append(prompt + rng.integers(0, 61, 4).tolist())
    return RolloutBatch(
        Rollout(
            ids,
            [at >= len(prompt) for at in range(len(ids))],
            advantage=float(n - 1) or 0.5,
            old_logprobs=-4 + 0.1 * rng.normal(size=len(ids)),
            reference_logprobs=-4 + 0.1 * rng.normal(size=len(ids)),
        )
        for n, ids in enumerate(tokens)
    )


@dataclass(eq=False)
class Case:
    """A policy, and a call of it that is interrupted."""

    name: str
    model: nn.Module
    policy: Policy
    loss: Loss
    accumulated: bool = False
    """Whether there are gradients before the step."""
    calls: str = "forward_backward"
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A context of the user's around the call, which is not interrupted itself."""
    batch: RolloutBatch = field(default_factory=small_batch)

    def __post_init__(self) -> None:
        self.parameters = dict(self.model.named_parameters())
        self.clear()
        generator = torch.Generator().manual_seed(1)
        self.earlier: Gradients = {
            name: torch.randn(p.shape, generator=generator, device="cpu").to(p)
            if self.accumulated and p.requires_grad
            else None
            for name, p in self.parameters.items()
        }
        self.plan = self.policy.plan(self.batch, self.loss)
        with self.around():
            for _ in range(2):  # what is made at first use is made
                self.clear()
                self.run()
            self.alone = self.gradients()
            self.reset()
            self.before = self.gradients()
            self.run()
        self.complete = self.gradients()
        self.result = self._result()
        self.reset()

    def call(self) -> None:
        """The call that is interrupted, within `around`."""
        if not isinstance(self.loss, FailingLoss):
            return self.run()
        self.loss.backwards = 0
        try:
            return self.run()
        finally:
            self.loss.backwards = None

    def run(self) -> None:
        """The same, where nothing is to fail."""
        if self.calls == "score":
            self.scores = self.policy.score(self.batch, entropy=True, plan=self.plan)
        elif self.calls == "verify":
            self.report = self.policy.verify(self.batch, self.loss)
        else:
            self.policy.forward_backward(self.batch, self.loss, plan=self.plan)

    def clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def reset(self) -> None:
        """Gradients as before the step."""
        self.objects = {}
        for name, parameter in self.parameters.items():
            earlier = self.earlier[name]
            parameter.grad = self.objects[name] = None if earlier is None else earlier.clone()

    def gradients(self) -> Gradients:
        return {n: None if p.grad is None else p.grad.clone() for n, p in self.parameters.items()}

    def state(self) -> dict[str, Any]:
        """All that no step may change, whatever ends it."""
        staging = self.policy.model_state.staging
        return {
            "modules": model_state(self.model),
            "parameters": {
                name: (id(p), p._version, p.requires_grad, p.data_ptr(), _hooks(p))
                for name, p in self.parameters.items()
            },
            "thread": thread_state(),
            "collections": gc.get_threshold(),
            "walk": modules._walks.get(),
            "staging": None if staging is None else staging.used_bytes,
            "float": vars(torch.Tensor).get("float"),
            "torch of models": [
                vars(sys.modules[name]).get("torch")
                for name in {type(m).__module__ for m in self.model.modules()}
            ],
        }

    def _result(self) -> list[Tensor]:
        return [self.scores.logprobs, self.scores.entropies] if self.calls == "score" else []

    def faults(self, attempt: Attempt, kinds: set[type], state: dict, last: object) -> list[str]:
        """Faults after the call was interrupted. `last` is `policy.last_step` before it."""
        found = self._gradient_faults(attempt, last)
        if isinstance(self.loss, FailingLoss):
            kinds = kinds | {self.loss.error}
        if attempt.error is not None and type(attempt.error) not in kinds:
            found.append(f"{attempt.error!r} in place of the exception")
        now = self.state()
        found += [
            f"{key} changed{_difference(state[key], now[key])}"
            for key in state
            if state[key] != now[key]
        ]
        return found

    def _gradient_faults(self, attempt: Attempt, last: object) -> list[str]:
        is_before = self._equal(self.before) and all(
            p.grad is self.objects[name] for name, p in self.parameters.items()
        )
        is_complete, is_none = self._equal(self.complete), self._equal({})
        notes = _notes(attempt.error)
        if not notes and attempt.error is not None:
            # A second exception, while the first is already put back and has its note.
            notes = _notes(attempt.error.__context__)
        step = self.policy.last_step
        wrong = [] if is_before else ["gradients changed"]
        if self.calls != "forward_backward":
            self.outcome = "unchanged"
            wrong += [f"notes {notes}"] if notes else []
            return wrong + ([] if step is last else ["last_step changed"])
        if step is last:
            self.outcome = "not begun"
            return wrong + ([] if notes in ([], [UNCHANGED]) else [f"notes {notes}"])
        assert step is not None
        self.outcome = step.gradients
        given = {"unchanged": is_before, "cleared": is_none, "added": is_complete}
        expected = {"unchanged": [UNCHANGED], "cleared": [CLEARED], "added": [ADDED]}
        wrong = []
        if not given.get(step.gradients, False):
            held = [name for name, holds in given.items() if holds]
            wrong.append(f"last_step says {step.gradients}, gradients are {held or 'partial'}")
        kept = self.policy.config.restore_grads or not self.accumulated
        if step.gradients == "cleared" and kept:
            wrong.append("gradients cleared that could have been put back")
        # No note can be put on what is raised once the call has returned, or as it is left.
        inside = attempt.error is not None and FORWARD_BACKWARD in attempt.codes
        left = inside and attempt.leaving and attempt.codes[-1] in LEAVING
        if inside and not left and notes != expected.get(step.gradients):
            wrong.append(f"last_step says {step.gradients}, notes are {notes}")
        # An error of the step itself may have left the call right before the interrupt came.
        context = None if attempt.error is None else attempt.error.__context__
        failed = context is not None and FORWARD_BACKWARD in codes_of(context.__traceback__)
        if not inside and not failed and step.gradients != "added":
            wrong.append("the call returned, but its gradients were not added")
        return wrong

    def next_step_faults(self, state: dict, held: list[Attempt]) -> list[str]:
        """Whether the next call gives what it gives otherwise, bit for bit.

        held: what is held of the interrupt, which is let go while that call runs: generators that
            were left suspended, if any, would then change the state of the call.
        """
        self.clear()
        found = []
        try:
            with self.around(), watched(lambda _: held.clear()):
                self.run()
                now = self.state()
                if now["thread"] != state["thread"]:
                    found.append("after the next step: " + _difference(state, now))
        except Exception as error:
            return [f"the next step raised {error!r:.200}"]
        finally:
            held.clear()
        found += [] if self._equal(self.alone) else ["the next step's gradients differ"]
        same = all(map(torch.equal, self._result(), self.result))
        return found + ([] if same else ["the next scores differ"])

    def _equal(self, wanted: Gradients) -> bool:
        return all(_same(p.grad, wanted.get(n)) for n, p in self.parameters.items())


def _notes(error: BaseException | None) -> list[str]:
    return [n for n in getattr(error, "__notes__", ()) if n.startswith("forkpoint: ")]


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    return x is y if x is None or y is None else torch.equal(x, y)


def _hooks(parameter: nn.Parameter) -> tuple[int, int]:
    return len(parameter._backward_hooks or ()), len(parameter._post_accumulate_grad_hooks or ())


def _difference(before: Any, after: Any) -> str:
    """Where two of the states differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            if before.get(key) != after.get(key):
                return f" at {key}{_difference(before.get(key), after.get(key))}"
    return f": {before!s:.80} is now {after!s:.80}"


def thread_state() -> dict[str, Any]:
    """torch's state of this thread, and of the process's generators."""
    nesting = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)
    cuda = None
    if DEVICE.type == "cuda":
        cuda = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
    return {
        "cuda": cuda,
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (
            *(torch.is_autocast_enabled(kind) for kind in ("cpu", DEVICE.type)),
            *(torch.get_autocast_dtype(kind) for kind in ("cpu", DEVICE.type)),
            torch.is_autocast_cache_enabled(),
            tuple(map(operator.call, nesting)),
        ),
        "saved tensors hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "compiler": getattr(torch._dynamo.config, "nested_graph_breaks", None),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    }


def live_tensors() -> int:
    """Tensors with data that Python knows of, once what nobody refers to is gone; on CUDA bytes."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    kinds = map(type, gc.get_objects())
    return sum(issubclass(kind, Tensor) and kind is not FakeTensor for kind in kinds)


def squared(outputs: losses.LossOutputs, batch: losses.LossBatch) -> Tensor:
    """A loss of which nothing is known, so that log-probs come first, in a pass of their own."""
    return outputs.logprobs.square().sum()


class Failure(Exception):
    """An error of the step itself."""


class FailingLoss(Loss):
    """Beside this loss the second backward of the model raises, while `backwards` counts them."""

    decomposition = "token"
    needs = ("reference_logprobs",)

    def __init__(self, error: type[Exception]) -> None:
        self.error = error
        self.backwards: int | None = None
        self.reached: Callable[[], object] = int
        """Called right before the error is raised."""

    def __call__(self, outputs: losses.LossOutputs, batch: losses.LossBatch) -> Tensor:
        return losses.GRPO(kl=0.1)(outputs, batch)

    def watch(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """A forward hook of a module that every microbatch runs."""
        if self.backwards is not None and output.requires_grad:
            output.register_hook(self._fail)

    def _fail(self, _: Tensor) -> None:
        if self.backwards is not None:
            self.backwards += 1
            if self.backwards == 2:
                self.reached()
                raise self.error("on purpose")


def small_model(family: str = "qwen3", **changes: Any) -> Any:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24}
    return tiny_model(family, dtype=torch.float32, **{**sizes, **changes}).train()


def make_case(
    name: str,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    *,
    case: Any = None,
    chunk_bytes: int | None = None,
    **options: Any,
) -> Case:
    """`chunk_bytes`: host memory taken at a time; None leaves the device's."""
    model = small_model() if model is None else model
    if DEVICE.type == "cuda":
        double = next(model.parameters()).dtype == torch.float64
        model = model.to(DEVICE, torch.float64 if double else torch.bfloat16)
    if isinstance(loss, FailingLoss):
        model.get_submodule("model.layers.0").register_forward_hook(ReadOnlyHook(loss.watch))
    policy = wrap(model, replace(ACROSS, **{"compile_blocks": False, **options}))
    if chunk_bytes is not None:
        policy.model_state.staging = staging = staging_for(DEVICE)
        staging.transfers.chunk_bytes, staging.transfers.least_bytes = chunk_bytes, 0
    return Case(name, model, policy, loss or losses.GRPO(kl=0.1), **(case or {}))


def small_lora() -> nn.Module:
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=2, target_modules="all-linear", init_lora_weights=False
    )
    torch.manual_seed(2)
    return get_peft_model(small_model(), config)  # type: ignore[arg-type]


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast(DEVICE.type, torch.bfloat16)


def _same_tensor(tensor: Tensor) -> Tensor:
    return tensor


def _keeping_hooks() -> AbstractContextManager[Any]:
    # The same two functions each time: the state of the thread is compared between runs.
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, _same_tensor)


def deeper_model() -> nn.Module:
    return small_model(num_hidden_layers=2)


def checkpointed_model() -> nn.Module:
    model = deeper_model()
    checkpoint_blocks(model, use_reentrant=False)
    return model


def frozen_experts() -> nn.Module:
    """Of two layers with experts the second trains."""
    model = small_model(
        "qwen3_moe",
        num_hidden_layers=2,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        experts_implementation="eager",
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name and "embed" not in name)
    return model


def small_hybrid(family: str) -> nn.Module:
    return tiny_hybrid(family, kinds=("linear_attention", "full_attention"), dtype=torch.float32)


ACCUMULATED: dict[str, Any] = {"accumulated": True}
SUMS: dict[str, Any] = {"grad_accumulation_dtype": "float32"}
CASES: dict[str, Callable[[str], Case]] = {
    "plain": make_case,
    "accumulated": lambda n: make_case(n, case=ACCUMULATED),
    "restoring": lambda n: make_case(n, case=ACCUMULATED, restore_grads=True),
    "sums": lambda n: make_case(n, **SUMS),
    "sums-accumulated": lambda n: make_case(n, small_model().bfloat16(), case=ACCUMULATED, **SUMS),
    "sums-restoring": lambda n: make_case(n, case=ACCUMULATED, restore_grads=True, **SUMS),
    "lora": lambda n: make_case(n, small_lora(), case=ACCUMULATED),
    "recompute": lambda n: make_case(n, activations="recompute"),
    "offload": lambda n: make_case(n, deeper_model(), activations="offload", case=ACCUMULATED),
    "full": lambda n: make_case(n, deeper_model(), checkpointing="full", activations="offload"),
    "host-cache": lambda n: make_case(n, deeper_model(), prefix_cache="host", case=ACCUMULATED),
    "files": lambda n: make_case(
        n,
        deeper_model(),
        chunk_bytes=CHUNK_BYTES,
        activations="offload",
        prefix_cache="host",
        host_memory=3 * CHUNK_BYTES,
        offload_folder=FOLDER,
    ),
    "experts": lambda n: make_case(n, frozen_experts(), activations="offload", case=ACCUMULATED),
    "checkpointed": lambda n: make_case(n, checkpointed_model(), case=ACCUMULATED),
    "two-pass": lambda n: make_case(n, loss=losses.base.as_loss(squared), case=ACCUMULATED),
    "autocast": lambda n: make_case(n, case={"around": _autocast}),
    "hooks": lambda n: make_case(n, checkpointing="full", case={"around": _keeping_hooks}),
    "delta-rule": lambda n: make_case(n, small_hybrid("qwen3_next")),
    "mamba": lambda n: make_case(n, small_hybrid("granitemoehybrid"), case=ACCUMULATED),
    "score": lambda n: make_case(n, case={"calls": "score", **ACCUMULATED}),
    "verify": lambda n: make_case(
        n, small_model().double(), case={"calls": "verify", **ACCUMULATED}
    ),
    "failing": lambda n: make_case(n, loss=FailingLoss(Failure), case=ACCUMULATED),
    "out-of-memory": lambda n: make_case(
        n, loss=FailingLoss(torch.OutOfMemoryError), activations="offload", checkpointing="full"
    ),
    "out-of-memory-host-cache": lambda n: make_case(
        n,
        deeper_model(),
        FailingLoss(torch.OutOfMemoryError),
        prefix_cache="host",
        checkpointing="full",
    ),
    "compiled": lambda n: make_case(n, compile_blocks=True, case=ACCUMULATED),
}
