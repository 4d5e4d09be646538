"""An update and old log-probs through verl's workers: its own FSDP2 engine beside forkpoint's."""

import gc
import shutil
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline, Seconds
from benchmarks.shapes import SCALE_TINY, make_group, sizes_of
from benchmarks.steps import verl_workers as verl
from benchmarks.steps.cells import cell_row
from benchmarks.steps.options import Layers, check_at_least_one, device_for
from benchmarks.steps.plain_loop import distance
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import RolloutBatch

AT_LEAST = 3.0
"""How many times faster than verl's own engine an update is to be."""
OF_BOUND = 0.9
"""Of the counted bound over the same engine without sharing."""
SMALL_LAYERS = 2
WARM_UPDATES = 2
EXACT = 1e-5
"""Of gradients and metrics in float32, as far apart as orders of sums are."""
Choice = tuple[str, str, float]
"""An attention, a head, and the seconds of an update with them."""
OWN_ERROR = 1.1
"""Times the error of verl's own engine in bfloat16."""


@dataclass
class Side:
    """Seconds of one engine: of log-probs, of updates, and of the optimizer in these."""

    score_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    score_peak: int = 0
    update_peak: int = 0
    scale: float = 1.0
    """Of the update's forwards and backwards, from the rollouts that ran to all."""
    score_scale: float = 1.0
    note: str = ""
    logprobs: torch.Tensor | None = None

    @property
    def update_ms(self) -> float:
        own = median(self.optimizer_s)
        return ((median(self.update_s) - own) * self.scale + own) * 1e3

    @property
    def score_ms(self) -> float:
        return median(self.score_s) * self.score_scale * 1e3


@dataclass(frozen=True, kw_only=True)
class VerlUpdate(Benchmark):
    """Time an update and old log-probs of a group through verl's workers, stock and forkpoint's.

    The first is forward, backward and AdamW on 32 responses to 8,192 tokens. Gradients and metrics
    are compared first, at a small size.

    Attributes:
        shape: Whose sizes the model has.
        layers: Give the model fewer layers than its shape has.
        model_dtype: Of weights, gradients and AdamW's states; verl's default is fp32.
        checkpointing: Whether blocks keep only their inputs (full), as verl's default has it.
        sample: How many of the rollouts engines without sharing run; what they take is scaled by
            counted FLOPs. 0 runs all.
        repeats: Updates of each side that are timed, after two that are not: the first compiles,
            and the second allocates what compiled code needs.
        no_comparison: Leave the small comparison out.
        max_seconds: Start no measurement after so many seconds, and list the missing ones.
        tiny: A tiny model and lengths divided by 64, on a CPU as well.
    """

    NAME: ClassVar[str] = "verl"

    shape: Literal["qwen3-8b", "qwen3-4b", "qwen3-1.7b"] = "qwen3-8b"
    layers: Layers = None
    model_dtype: Literal["bf16", "fp32"] = "bf16"
    checkpointing: Literal["full", "none"] = "full"
    sample: int = 4
    repeats: Count = 1
    no_comparison: Flag = False
    max_seconds: Seconds = 190.0
    tiny: Flag = False

    def check(self) -> None:
        check_at_least_one("layers", self.layers)
        if not 0 <= self.sample <= 32:
            raise ConfigError(f"sample is {self.sample}; it takes a whole number from 0 to 32.")

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        device = device_for(self.NAME, tiny=self.tiny)
        work = tempfile.mkdtemp()
        try:
            with verl.quiet():
                verl.start(device)
                yield from _Run(self, Path(work), device, deadline).rows()
        finally:
            shutil.rmtree(work, ignore_errors=True)


class _Run:
    """One run of the benchmark."""

    def __init__(
        self, options: VerlUpdate, work: Path, device: torch.device, deadline: Deadline
    ) -> None:
        self.options, self.work, self.device, self.deadline = options, work, device, deadline
        self.cuda = cuda = device.type == "cuda"
        self.shape = f"tiny {options.shape}" if options.tiny else options.shape
        self.sizes = sizes_of(options.shape, tiny=options.tiny, layers=options.layers)
        self.model_dtype = "fp32" if options.tiny else options.model_dtype
        self.checkpoints = options.checkpointing == "full"
        scale = SCALE_TINY if options.tiny else 1
        drawn = np.random.default_rng(42).integers(131, 2049, 32)
        self.lengths = [max(2, int(r) // scale) for r in drawn]
        self.prompt = 8192 // scale
        self.folder = verl.save_configuration(self.sizes, work)
        self.batch = self._group(self.prompt, self.lengths)
        order = np.argsort(self.lengths)
        count = options.sample or len(order)
        # Evenly spread over lengths.
        places = (np.arange(count) + 0.5) * len(order) / count
        self.chosen = sorted(int(order[int(n)]) for n in places)
        self.some = self.batch.select(self.chosen)
        self.case = (
            f"{self.shape} {self.model_dtype}, {'' if self.checkpoints else 'not '}"
            f"checkpointed, P={self.prompt} N=32 R~U(131,2048), one {'GPU' if cuda else 'CPU'}"
        )
        self.row = partial(cell_row, VerlUpdate.NAME, self.case)

    def _group(self, prompt: int, lengths: list[int]) -> RolloutBatch:
        return make_group(prompt, lengths, vocab=self.sizes["vocab_size"])

    def rows(self) -> Iterator[ResultRow]:
        if not self.options.no_comparison:
            yield from self._comparison()
        if self.deadline.over("forkpoint's engine"):
            return
        worker = self._worker("forkpoint")
        engine = worker.engine
        shared = yield from self._side(worker, "shared", self.batch)
        plan = engine.last_plan
        bound, forward = plan.bound, _forward_bound(plan)
        yield self.row("computed tokens", plan.computed_tokens, "tokens")
        yield self.row("given tokens", plan.logical_tokens, "tokens")
        engine.policy = engine.policy.with_config(sharing="none")
        whole, some = engine.policy.plan(self.batch), engine.policy.plan(self.some)
        scales = (
            whole.dense.step_flops(whole.shape) / some.dense.step_flops(some.shape),
            whole.dense.forward_flops(whole.shape) / some.dense.forward_flops(some.shape),
        )
        plain = None
        if not self.deadline.over("sharing none"):
            plain = yield from self._side(worker, "sharing none", self.some, scales)
            yield from self._faster(shared, plain, "sharing none", bound, forward)
        del engine, worker
        self._free()
        if self.deadline.over("verl's own engine"):
            return
        stock = yield from self._stock(scales)
        if stock is not None:
            yield from self._faster(shared, stock, "stock", bound, forward)
        if stock is not None and stock.logprobs is not None and shared.logprobs is not None:
            theirs = stock.logprobs
            ours = shared.logprobs[self.chosen][:, : theirs.shape[1]]
            apart = (ours - theirs).abs()[theirs != 0].mean()
            yield self.row(
                "log-probs apart from stock",
                float(apart),
                "nats",
                note="mean over the sample's responses, before any update",
            )

    def _worker(self, vendor: verl.Vendor) -> Any:
        return verl.make_worker(
            vendor,
            self.folder,
            model_dtype=self.model_dtype,
            compute_dtype="bf16" if self.cuda else "fp32",
            checkpointing=self.checkpoints,
            optimizer_bytes_per_parameter=4 if self.model_dtype == "bf16" else 8,
        )

    def _free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _side(
        self,
        worker: Any,
        name: str,
        batch: RolloutBatch,
        scales: tuple[float, float] = (1.0, 1.0),
        *,
        note: str = "",
        fused: bool = False,
    ) -> Generator[ResultRow, None, Side]:
        """The rows of one engine, and what it took."""
        side = Side(scale=scales[0], score_scale=scales[1])
        notes = [note] if note else []
        if len(batch) < len(self.batch):
            notes.append(
                f"{len(batch)} of 32 rollouts, times {scales[0]:.2f} by counted FLOPs "
                f"(log-probs {scales[1]:.2f})"
            )
        side.note = "; ".join(notes)
        clock = verl.StepClock(worker.engine, self.cuda)
        for number in range(1 + self.options.repeats):
            seconds, peak, found = self._score(worker, batch, fused)
            if number == 0:
                side.logprobs = found
            else:
                side.score_s.append(seconds)
                side.score_peak = max(side.score_peak, peak)
        assert side.logprobs is not None
        fields = _fields(batch, side.logprobs)
        for number in range(WARM_UPDATES + self.options.repeats):
            seconds, peak = self._update(worker, batch, fields, fused)
            side.update_peak = max(side.update_peak, peak)
            if number >= WARM_UPDATES:
                side.update_s.append(seconds)
        side.optimizer_s = clock.seconds[-self.options.repeats :]
        row = partial(self.row, note=side.note or None)
        yield row(f"{name} update", side.update_ms, "ms")
        yield row(f"{name} optimizer step", median(side.optimizer_s) * 1e3, "ms")
        yield row(f"{name} log-probs", side.score_ms, "ms")
        if self.cuda:
            yield row(f"{name} update peak", side.update_peak, "bytes")
            yield row(f"{name} log-probs peak", side.score_peak, "bytes")
        return side

    def _score(
        self, worker: Any, batch: RolloutBatch, fused: bool = False
    ) -> tuple[float, int, torch.Tensor]:
        """Seconds, peak and log-probs of a pass with entropies, as verl's trainer asks for it."""
        told = {"calculate_entropy": True, "compute_loss": False, "use_fused_kernels": fused}
        data = verl.mini_batch(batch, {}, **told)
        shown = verl.mini_batch(batch, {})
        self._reset_peak()
        begin = verl.now(self.cuda)
        output = worker.infer_batch(data)
        seconds = verl.now(self.cuda) - begin
        return seconds, self._peak(), verl.padded_logprobs(output, shown)

    def _update(
        self, worker: Any, batch: RolloutBatch, fields: dict[str, torch.Tensor], fused: bool = False
    ) -> tuple[float, int]:
        """Seconds and peak of one update, with the optimizer's step."""
        data = _training(batch, fields, fused)
        self._reset_peak()
        begin = verl.now(self.cuda)
        worker.train_mini_batch(data)
        return verl.now(self.cuda) - begin, self._peak()

    def _reset_peak(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else 0

    def _stock(self, scales: tuple[float, float]) -> Generator[ResultRow, None, Side | None]:
        """verl's own engine with the attention and the head that are fastest for it here."""
        worker = self._worker("none")
        one = self.some.select([len(self.some) // 2])
        best: Choice | None = None
        attentions = verl.attentions(self.device)
        for attention in attentions:
            best = yield from self._tried(worker, one, attention, "use_fused_kernels torch", best)
        heads = [head for head in verl.HEADS if head != "use_fused_kernels torch"]
        for head in heads if self.cuda else heads[:1]:
            attention = best[0] if best is not None else attentions[0]
            best = yield from self._tried(worker, one, attention, head, best)
        if best is None:
            return None
        attention, head, _ = best
        fused = verl.use_head(worker, head)
        note = f"{attention}, {head}; use_remove_padding, one row a micro-batch"
        with verl.attention(worker, attention):
            return (
                yield from self._side(worker, "stock", self.some, scales, note=note, fused=fused)
            )

    def _tried(
        self,
        worker: Any,
        one: RolloutBatch,
        attention: str,
        head: str,
        best: Choice | None,
    ) -> Generator[ResultRow, None, Choice | None]:
        """One update of one rollout, the second of two; the faster of it and the best."""
        what = f"stock, 1 rollout, {attention}, {head}"
        if self.deadline.over(what):
            return best
        fused = verl.use_head(worker, head)
        fields = _fields(one, torch.full((1, len(one.rollouts[0].token_ids)), -10.0))
        try:
            with verl.attention(worker, attention):
                seconds = [self._update(worker, one, fields, fused)[0] for _ in range(2)][1]
        except Exception as error:  # what verl or torch cannot do here
            self._free()
            told = f"{type(error).__name__}: {error}".replace("\n", " ")[:160]
            yield self.row(f"{what}: does not run", 1.0, "1", note=told)
            return best
        yield self.row(what, seconds * 1e3, "ms")
        if best is None or seconds < best[2]:
            return attention, head, seconds
        return best

    def _faster(
        self, shared: Side, other: Side, name: str, bound: float, forward: float
    ) -> Iterator[ResultRow]:
        """Ratios over another side, and how they stand to what is asked for."""
        update = other.update_ms / shared.update_ms
        # None leaves rollouts out, for verl's metrics read log-probs of all.
        row = partial(self.row, baseline=name, baseline_leaves_out=False, note=other.note or None)
        yield row("update faster", update, "x", bound=bound)
        yield row("log-probs faster", other.score_ms / shared.score_ms, "x", bound=forward)
        measured = self.cuda and not self.options.tiny
        if name == "stock":
            limit = 1 / AT_LEAST if measured else None
            yield row("share of the other's update", 1 / update, "1", bar=limit)
        else:
            limit = 1 / OF_BOUND if measured else None
            yield row("bound over what was measured", bound / update, "1", bound=bound, bar=limit)

    def _comparison(self) -> Iterator[ResultRow]:
        """Gradients and metrics of an update at a small size, in float32 and as measured."""
        folder = verl.save_configuration(
            self.sizes | {"num_hidden_layers": SMALL_LAYERS}, self.work
        )
        batch = self._group(96, [40, 7, 25, 64])
        row = partial(cell_row, VerlUpdate.NAME, f"{self.shape}, {SMALL_LAYERS} layers, P=96 N=4")
        made = partial(_gradients, folder, batch, self.checkpoints)
        exact, told = made("none", "fp32", False)
        found, ours = made("forkpoint", "fp32", False)
        device = exact[0].device
        yield row("gradients apart, float32", distance(found, exact, device), "1", bar=EXACT)
        worst = max(abs(ours[n] - told[n]) / max(1.0, abs(told[n])) for n in told)
        yield row("metrics apart, float32", worst, "1", bar=EXACT, note=", ".join(sorted(told)))
        del found
        self._free()
        if not self.cuda:
            return
        stock, _ = made("none", "bf16", True)
        theirs = distance(stock, exact, device)
        del stock
        self._free()
        found, _ = made("forkpoint", "bf16", True)
        own = distance(found, exact, device)
        del found, exact
        self._free()
        yield row("stock's error, bfloat16", theirs, "1", baseline="stock, float32")
        yield row("forkpoint's error, bfloat16", own, "1", baseline="stock, float32")
        yield row("error over stock's", own / theirs, "1", baseline="stock", bar=OWN_ERROR)


def _gradients(
    folder: Path,
    batch: RolloutBatch,
    checkpointing: bool,
    vendor: verl.Vendor,
    dtype: str,
    compiled: bool,
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Gradients that the optimizer is given, and metrics of the update; the weights are float32."""
    worker = verl.make_worker(
        vendor,
        folder,
        model_dtype="fp32",
        compute_dtype=dtype,
        checkpointing=checkpointing,
        compile_blocks=compiled,
    )
    module, kept = worker.engine.module, []

    def keep() -> float:
        grads = [p.grad for p in module.parameters()]
        kept.extend(getattr(g, "to_local", lambda g=g: g)().clone() for g in grads)
        return step()

    step, worker.engine.optimizer_step = worker.engine.optimizer_step, keep
    width = max(len(r.token_ids) for r in batch)
    noise = torch.randn(len(batch), width, generator=torch.Generator().manual_seed(1))
    fields = _fields(batch, -10.0 + 0.3 * noise)
    return kept, verl.metrics(worker.train_mini_batch(_training(batch, fields, False)))


def _fields(batch: RolloutBatch, old_logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors that verl's loss reads besides tokens, of responses [N, longest or more]."""
    count, width = old_logprobs.shape
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randn(count, 1, generator=generator).expand(-1, width).contiguous()
    apart = 0.1 * torch.randn(count, width, generator=generator)
    return {
        "old_log_probs": old_logprobs,
        "ref_log_prob": old_logprobs + apart,
        "advantages": drawn,
    }


def _training(batch: RolloutBatch, fields: dict[str, torch.Tensor], fused: bool) -> Any:
    return verl.mini_batch(
        batch,
        fields,
        calculate_entropy=False,
        use_fused_kernels=fused,
        mini_batch_size=len(batch),
        epochs=1,
        seed=7,
        dataloader_kwargs={"shuffle": False},
    )


def _forward_bound(plan: Any) -> float:
    """The counted bound of a pass without gradients."""
    return plan.dense.forward_flops(plan.shape) / plan.shared.forward_flops(plan.shape)
