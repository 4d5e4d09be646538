"""Measures rows and steps of a model with few layers: times, saved bytes and peak bytes."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forkpoint.config import Config
from forkpoint.engine.changes import Changes
from forkpoint.engine.engine import Engine, PassResult
from forkpoint.engine.microbatches import CacheView, PreparedMicrobatches
from forkpoint.engine.offload import storage_id
from forkpoint.engine.prefix_cache import PrefixCache
from forkpoint.engine.transaction import Transaction
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.modules import forget_lists
from forkpoint.losses import GRPO
from forkpoint.losses.views import batch_denominators
from forkpoint.plan import make_plan
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.step.calibrate.clock import MOST_HOST_RATIO, Clock, Times

HEAD_TOKENS = 1024
COLD = 2
LONGEST_STEADY = 8
LEAST_REPEATS = 2
"""Timed runs of each sample of the host, also if the time is up."""


class StepTimes(NamedTuple):
    """Least milliseconds of a short step of two microbatches, in which the device waits for the
    host."""

    reader: tuple[float, float]
    """Forward and backward of the microbatch that reads the other."""
    outside: float
    """Time outside of the microbatches."""
    prompt_block: tuple[float, float] = (0.0, 0.0)
    """Host time of a block of the microbatch that is read, forward and backward."""
    reader_block: tuple[float, float] = (0.0, 0.0)
    """Host time of a block of the microbatch that reads it, forward and backward."""
    tokens: int = 0
    """Number of tokens of all rollouts."""


class BlockTimes:
    """Records when the host begins the forward and the backward of each block.

    A block's time by the difference of two models' times would contain the noise of all other work
    of the host: 0.4 to 1.2 ms were found for one block in two runs on one machine.
    """

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._passes: tuple[list[list[float]], list[list[float]]] = [], []
        """For each forward and for each backward: times at which the blocks begin."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context manager that records each forward, and its backward, once the host is entered."""
        enter = self._host.enter

        def entered(changes: Changes, *, compiled: bool = True) -> None:
            enter(changes, compiled=compiled)
            for index, block in enumerate(self._host.blocks):
                changes.replace_forward(block, partial(self._block, index, block.forward))

        vars(self._host)["enter"] = entered
        try:
            yield
        finally:
            del vars(self._host)["enter"]

    def _block(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._note(0, index == 0)
        hidden = args[0] if args else kwargs["hidden_states"]
        # The backward of the block before this one begins where that of this block ends. A hook of
        # the tensor would be part of what is compiled.
        is_last = index == len(self._host.blocks) - 1
        if hidden.grad_fn is not None:
            hidden.grad_fn.register_prehook(lambda _: self._note(1, is_last))
        return forward(*args, **kwargs)

    def _note(self, way: int, is_first: bool) -> None:
        if is_first:
            self._passes[way].append([])
        self._passes[way][-1].append(time.perf_counter() * 1e3)

    def least(self, of_forward: slice, of_backward: slice) -> tuple[float, float]:
        """Mean over blocks of the least time over these passes; 0 for a model of one block. Other
        load of the host only adds time.

        The first blocks of a forward are left out if there are others: the first also makes the
        tables of the microbatch, and the next ones find cold caches. With 28 blocks on a CPU they
        take 0.74, 0.38, 0.34, 0.33, 0.32 and then 0.31 ms.
        """
        count = len(self._host.blocks)
        if count == 1:
            return 0.0, 0.0
        forward = np.diff(np.array(self._passes[0][of_forward]))[:, min(COLD, count - 2) :]
        backward = np.diff(np.array(self._passes[1][of_backward]))
        return float(forward.min(axis=0).mean()), float(backward.min(axis=0).mean())


class HostRow:
    """A microbatch that runs forward and backward."""

    def __init__(self, host: ModelHost, batch: RolloutBatch, config: Config) -> None:
        self._host = host
        self._blocks = BlockTimes(host)
        self._forward = _prepared(host, batch, config)

    def run(self) -> None:
        """Run it, and wait for the device."""
        with self._blocks.recorded(), self._host.entered():
            loss = self._forward().sum()
            loss.backward()
        float(loss.detach())  # waits for the device

    @property
    def block_ms(self) -> tuple[float, float]:
        """Least host time of a block, forward and backward."""
        return self._blocks.least(slice(1, None), slice(1, None))


class HostStep:
    """A step of two microbatches: a prompt, and responses that read it."""

    def __init__(self, host: ModelHost, batch: RolloutBatch, config: Config) -> None:
        self._host, self._batch, self._config = host, batch, config
        self._plan = make_plan(batch, host.shape, config)
        self._counts = batch_denominators(batch)
        self._blocks = BlockTimes(host)
        self._ms: list[list[float]] = []

    def run(self) -> None:
        """Run it, and wait for the device."""
        forget_lists()  # lists of modules are made in a step, unless it runs within another
        begin = time.perf_counter()
        with self._blocks.recorded():
            result = Transaction(self._host.device).run(self._work)
        float(result.loss)  # waits for the device
        whole_ms = (time.perf_counter() - begin) * 1e3
        self._ms.append([*result.event_ms, whole_ms - sum(result.event_ms)])
        forget_lists()  # they would keep the model alive until the end of that step

    def _work(self, transaction: Transaction) -> PassResult:
        self._host.prepare(transaction.changes)
        self._host.check(self._batch, training=True)
        engine = Engine(self._host, self._config, transaction, self._plan, self._batch)
        return engine.forward_backward(GRPO(), self._counts, 1.0)

    @property
    def times(self) -> StepTimes:
        """Least times of all runs but the first."""
        # In turn: the forwards of the prompt and of the reader, the backwards of reader and prompt.
        _, reader, reader_back, _, outside = np.array(self._ms[1:]).min(axis=0).tolist()
        return StepTimes(
            (reader, reader_back),
            outside,
            prompt_block=self._blocks.least(slice(2, None, 2), slice(3, None, 2)),
            reader_block=self._blocks.least(slice(3, None, 2), slice(2, None, 2)),
            tokens=self._plan.logical_tokens,
        )


Sample = HostRow | HostStep
"""Work of the host that is timed each time it runs. The first run is not counted."""


@dataclass
class Rows:
    """Measures rows of models on one device."""

    clock: Clock
    kernel: str
    vocab: int
    segment_tokens: int
    """Number of tokens of a segment of a row. The time of a block is that of a row less its
    attention, which `Parts.causal` measures in launches that fill the device. Short segments have
    little attention. The attention of one segment of 8,192 tokens does not fill the device, and
    would take longer than what is subtracted."""

    def num_segments(self, tokens: int) -> int:
        """Number of segments of a row."""
        return max(1, tokens // self.segment_tokens)

    def row_ms(self, host: ModelHost, tokens: int) -> Times:
        """Time the forward and backward of a row with one labelled token a segment."""
        run = self._row(host, tokens, labelled=1)
        with host.entered():
            return self.clock.times(run, lambda logprobs: logprobs.sum().backward())

    def host_row(
        self,
        host: ModelHost,
        prompt: int,
        response: int,
        count: int = 1,
        *,
        shares: bool = False,
        forks: int = 1,
    ) -> HostRow:
        """One microbatch of `count` responses to a prompt. `shares`: whether shared tokens run
        once, which takes an additional launch for each of `forks`."""
        config = Config(
            sharing="group" if shares else "none",
            boundary="within",
            max_microbatch_tokens=count * (prompt + response),
            checkpointing="none",
            attention_kernel=self.kernel,
        )
        return HostRow(host, self._group(prompt, response, count, forks), config)

    def host_step(self, host: ModelHost, prompt: int, response: int, count: int = 2) -> HostStep:
        """A step of a prompt of `prompt` tokens, and `count` responses to it."""
        config = Config(
            sharing="group", boundary="across", checkpointing="none", attention_kernel=self.kernel
        )
        return HostStep(host, self._group(prompt, response, count), config)

    def in_turn(
        self,
        samples: Mapping[str, Sample],
        left: Callable[[], float],
        *,
        optional: Collection[str] = (),
    ) -> set[str]:
        """Run all samples repeatedly, in turn. Returns the names of those that the model supports.

        The speed of a host changes within seconds. The difference of two times would contain these
        changes if one were measured after the other.

        left: seconds until the time is up. A further run must end by then.
        optional: names of samples that the model may refuse.
        """
        ran, took = set(samples), 0.0
        for repeat in range(1 + 2 * self.clock.repeats):
            if repeat > LEAST_REPEATS and left() <= took:
                break
            begin = time.perf_counter()
            for name in [n for n in samples if n in ran]:
                try:
                    samples[name].run()
                except UnsupportedError:
                    if name not in optional:
                        raise
                    ran.remove(name)
            took = time.perf_counter() - begin
            self.clock.seconds += took * bool(repeat)
        return ran

    def steady_share(self, host: ModelHost, tokens: int, alone: Times) -> float:
        """Ratio of a row's time within a step to that after matrix products: `Clock.steady_share`.

        The row has up to LONGEST_STEADY times as many tokens if the host is slow and memory
        suffices. Few layers of a small model take the device less time than the host needs outside
        of them: on an H200 the host took 13.6 ms for 8,192 tokens of three layers of Qwen3-0.6B,
        and the device 7.3 ms.

        alone: times of a row of `tokens`.
        """
        # Rotary frequencies may not allow a longer row.
        with suppress(torch.OutOfMemoryError, UnsupportedError):
            longest = LONGEST_STEADY * tokens
            while alone.waits_for_host and tokens < longest:
                # The host takes hardly longer for a longer row.
                longer = max(2, 1 << math.ceil(math.log2(alone.host_ratio / MOST_HOST_RATIO)))
                tokens = min(longer * tokens, longest)
                alone = self.row_ms(host, tokens)
            run = self._row(host, tokens, labelled=1)
            with host.entered():
                return self.clock.steady_share(
                    run, lambda logprobs: logprobs.sum().backward(), alone
                )
        return 1.0

    def kept_bytes(
        self, hosts: Mapping[int, ModelHost], tokens: int, policy: str
    ) -> tuple[float, float]:
        """Saved bytes per token of a block, and of the rest of a row, from models of two depths."""
        few, more = sorted(hosts)
        total = {n: self._saved_bytes(host, tokens, policy) for n, host in hosts.items()}
        block = (total[more] - total[few]) / (more - few)
        return block / tokens, max(total[few] - few * block, 0.0) / tokens

    def _saved_bytes(self, host: ModelHost, tokens: int, policy: str) -> int:
        """Bytes of storages that autograd saves for a row, without parameters."""
        held = {storage_id(p) for _, p in host.named_parameters()}
        run = self._row(host, tokens, labelled=1, checkpointing=policy)
        kept: dict[int, Tensor] = {}

        def pack(x: Tensor) -> Tensor:
            if x.device == self.clock.device and storage_id(x) not in held:
                kept.setdefault(storage_id(x), x)
            return x

        with host.entered():
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                logprobs = run()
            nbytes = sum(x.untyped_storage().nbytes() for x in kept.values())
            logprobs.sum().backward()
        return nbytes

    def working_bytes(self, host: ModelHost, sizes: list[int]) -> tuple[float, float]:
        """Peak memory of a backward in addition to saved bytes: per row and per token; 0 on a
        CPU."""
        if self.clock.kind != "cuda":
            return 0.0, 0.0
        found = []
        for tokens in sizes[-2:]:
            labelled = max(1, min(tokens, HEAD_TOKENS) // self.num_segments(tokens))
            run = self._row(host, tokens, labelled=labelled)
            with host.entered():
                logprobs = run()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                logprobs.sum().backward()
                torch.cuda.synchronize()
                found.append(torch.cuda.max_memory_allocated() - before)
        token = max(0.0, (found[1] - found[0]) / (sizes[-1] - sizes[-2]))
        return max(0.0, found[0] - token * sizes[-2]), token

    def _group(self, prompt: int, response: int, count: int, forks: int = 1) -> RolloutBatch:
        """Rollouts of one prompt. They diverge from the first rollout at the first token of the
        response or, with several `forks`, at one of the tokens before it."""
        ids = np.random.default_rng(0).integers(0, self.vocab, (count, prompt + response))
        for row in range(1, count):
            shared = prompt - (row - 1) % forks
            ids[row, :shared], ids[row, shared] = ids[0, :shared], ids[0, shared] - row
        ids %= self.vocab
        mask = np.arange(prompt + response) >= prompt
        return RolloutBatch([Rollout(row, mask, 1.0, group_id="g") for row in ids])

    def _row(
        self, host: ModelHost, tokens: int, *, labelled: int, checkpointing: str = "none"
    ) -> Callable[[], Tensor]:
        """The forward of a row of `tokens` in segments. `labelled`: number of the last tokens of
        each."""
        rng, count = np.random.default_rng(0), self.num_segments(tokens)
        rollouts = []
        for part in np.array_split(np.arange(tokens), count):
            ids = rng.integers(0, self.vocab, len(part) + 1)
            mask = np.arange(len(part) + 1) > len(part) - labelled
            rollouts.append(Rollout(ids, mask, 1.0))
        config = Config(
            sharing="none",
            boundary="within",
            max_microbatch_tokens=tokens,
            checkpointing=checkpointing,  # type: ignore[arg-type]
            attention_kernel=self.kernel,
        )
        return _prepared(host, RolloutBatch(rollouts), config)


def _prepared(host: ModelHost, batch: RolloutBatch, config: Config) -> Callable[[], Tensor]:
    """The forward of the only microbatch of a plan, which returns log-probs."""
    plan = make_plan(batch, host.shape, config)
    (inputs,) = PreparedMicrobatches(plan, batch, host.device)
    forward = plan.program.instructions[0]

    def run() -> Tensor:
        state = CacheView(plan, inputs.microbatch, PrefixCache(0, gradients=True))
        outputs = host.forward(forward, inputs, state, config)
        return outputs.per_token["logprobs"]

    return run
