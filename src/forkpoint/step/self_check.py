"""Self-check: the model on a sample by forkpoint, and by its own stock forward.

Before the first step, the second, and the first after a change of the model, three short sequences
run as microbatches that share tokens, and as the stock model runs them. Values that differ by more
than rounding refuse the step: something changes what the model computes that forkpoint does not
run, or runs differently. The effect of rounding is measured: the stock model runs once more with
embeddings that are off by a rounding.
"""

import random
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forkpoint.config import Config
from forkpoint.engine.changes import Changes
from forkpoint.engine.engine import Engine
from forkpoint.engine.host import FoundRouter
from forkpoint.engine.route_replay import RouteReplay, Routes
from forkpoint.engine.transaction import Transaction
from forkpoint.errors import ForkpointError, UnsupportedError
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.modules import add_hook
from forkpoint.hosts.routers import force_routers
from forkpoint.plan import Plan, make_plan
from forkpoint.rollouts.batch import Rollout, RolloutBatch, short
from forkpoint.rollouts.media import KINDS
from forkpoint.step.weight_changes import OptimizerSteps

WIDTH_TOKENS = 160
"""The longest sequence of a sample."""
LEAST_TOKENS = 8
"""Shorter rollouts are continued to this length."""
MOST_STATES = 64
"""States of a model, such as training and evaluation, that are remembered as checked."""
NOISE_FACTOR = 10.0
"""A difference may be this many times what one rounding of the embeddings does. Of 34 families with
random weights in four dtypes, 4 to 36 layers deep, the largest ratio seen is 3.9, most are 1."""
FLOOR_ROUNDINGS = 0.5
"""Roundings, in the dtype that the model computes in, of a value's size that are allowed in any
case."""
FLOOR_VALUE_ROUNDINGS = 4.0
"""The same in the dtype of the values, to which each of the two runs rounds them a few times. In a
sample of few tokens all of these may fall on one side while the rounded embeddings move nothing."""
CEILING_ROUNDINGS = 1e4
"""Roundings that are never allowed: what moves values by more is no rounding."""
ELSEWHERE = 0.02
"""The part of a mixture's choices of experts that may differ in any case."""
ELSEWHERE_FACTOR = 3.0
"""And so many times the part that differs by one rounding of the embeddings."""


@dataclass(frozen=True)
class SampleComparison:
    """Differences on a sample, in the units of the model's values (nats for log-probs)."""

    head: str
    """Name of the values."""
    difference: float
    """Root mean square of the values here less the stock model's."""
    largest: float
    """The largest of these differences."""
    repeated: float
    """The same of the stock model run on one sequence at a time, and on all at once."""
    allowed: float
    """The most that `difference` and `repeated` may be."""
    elsewhere: float
    """The part of a mixture's choices of experts that the stock model makes otherwise."""
    allowed_elsewhere: float
    """The most that `elsewhere` may be."""
    dtype: str
    tokens: int
    where: str
    """The token of the largest difference, with both values."""

    def fault(self) -> UnsupportedError | None:
        """Error for refused steps: the two differ, or runs of the stock model differ; else None."""
        sample = f"on a sample of {self.tokens} tokens"
        if self.repeated > self.allowed:
            return UnsupportedError(
                f"the model does not agree with itself: {sample} its {self.head} differ by "
                f"{self.repeated:.3g} (rms) between single and batched runs (allowed "
                f"{self.allowed:.3g}). Remove random or batch-mixing modules, or call model.eval()."
            )
        if self.elsewhere > self.allowed_elsewhere:
            return UnsupportedError(
                f"{sample} the stock model sends {self.elsewhere:.2%} of them to other experts "
                f"than forkpoint (allowed {self.allowed_elsewhere:.2%}). Remove patches and hooks "
                "of routers, or turn this check off with Config(self_check=False)."
            )
        if not self.difference <= self.allowed:  # NaN as well
            return UnsupportedError(
                f"{sample} forkpoint's {self.head} differ from the model's by "
                f"{self.difference:.3g} (rms, allowed {self.allowed:.3g}), {self.largest:.3g} at "
                f"{self.where}. Remove patches and hooks, or set Config(self_check=False)."
            )
        return None


class CheckedModel(NamedTuple):
    """A model in one state, with one version of its weights."""

    state: Hashable
    encodes: bool
    """Whether it is run with media."""
    version: tuple[int, int]


class SampleChecks:
    """Self-checks of one model: before its first step, its second, and the first after a change.

    At the second step weights have moved: values that a hook derives from them are then renewed.
    """

    def __init__(self) -> None:
        self._agreed: dict[Hashable, list[tuple[int, int]]] = {}
        """By state of the model: at which versions of its weights its sample has agreed."""
        self._steps: OptimizerSteps | None = None

    def is_due(self, model: CheckedModel) -> bool:
        """Whether the model is to be compared on this rank."""
        versions = self._agreed.get(model[:2], [])
        return len(versions) < 2 and model.version not in versions

    def passed(self, model: CheckedModel) -> None:
        """Remember that a sample of the model has agreed."""
        self._agreed.setdefault(model[:2], []).append(model.version)
        while len(self._agreed) > MOST_STATES:
            self._agreed.pop(next(iter(self._agreed)))

    def model(
        self, host: ModelHost, config: Config, fingerprint: int, *, training: bool, encodes: bool
    ) -> CheckedModel | None:
        """A model in its present state; None if it is never compared."""
        if not config.self_check:
            return None
        kind = host.device.type
        state = (
            fingerprint,
            training,
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            config.attention_kernel,
            config.recurrence_kernel,
        )
        weights = [p for _, p in host.named_parameters() if not p.is_inference()]
        if self._steps is None:
            self._steps = OptimizerSteps(weights)
        version = sum(p._version for p in weights), self._steps.count
        return CheckedModel(state, encodes, version)


def self_check(
    transaction: Transaction,
    host: ModelHost,
    config: Config,
    batch: RolloutBatch,
    *,
    training: bool,
) -> SampleComparison:
    """Compare values of a sample, cut from `batch`, by forkpoint with those of the stock model.

    In the transaction the model is prepared and not entered. `training`: whether forwards record a
    graph. Raises UnsupportedError if one of the two fails. Random generators are left as they were.
    """
    mark = transaction.changes.mark
    _convolve_in_float32(transaction.changes)
    sample = sample_of(batch, host)
    comparison = StockComparison(transaction, host, config, sample, training)
    keep_random_state(host.device, transaction.changes)
    # Microbatches come first: a stock forward may renew what a hook derives from parameters,
    # such as the weight of a head under weight normalisation, and so hide that these do not.
    found = comparison.compared(comparison.shared())
    transaction.changes.undo(mark)
    return found


def _convolve_in_float32(changes: Changes) -> None:
    """Let cuDNN round no input of a float32 convolution to TF32, which it does by default.

    It does so in some of its algorithms, and chooses these by the size of a batch.
    """
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    changes.later(setattr, convolutions, "fp32_precision", convolutions.fp32_precision)
    convolutions.fp32_precision = "ieee"


def sample_of(batch: RolloutBatch, host: ModelHost) -> RolloutBatch:
    """Three sequences of one length, cut from a batch: two share three quarters, all share half.

    Of text alone the length is a multiple of what the host's ranks divide it by.

    The tokens that all share are not trained, so that their microbatch ends without a head as
    prompts do; all others are. Of a batch with media all have one, behind their first token.
    """
    every, begins = batch.token_ids, batch.offsets
    if batch.media_of is not None:
        text = batch.media_of < 0
        begins = np.concatenate([[0], np.cumsum(text)])[begins]
        every = every[text]
    longest = int(np.argmax(np.diff(begins)))
    shared_prompt = every[begins[longest] : begins[longest + 1]]
    width = max(min(len(shared_prompt), WIDTH_TOKENS), LEAST_TOKENS)
    width += -width % host.topology.length_multiple
    if width > len(shared_prompt):
        shared_prompt = np.resize(shared_prompt, width)
    known = np.unique(every)
    # A text of one token only: with 0 and 1 there are two.
    known = known if len(known) > 1 else np.array([0, 1])
    sequences = [shared_prompt[:width]]
    for fork, donor in ((width * 3 // 4, -1), (width // 2, 0)):
        tail = np.resize(every[:: -1 if donor else 1], width - fork)
        if tail[0] == shared_prompt[fork]:
            tail[0] = known[known != shared_prompt[fork]][0]
        sequences.append(np.concatenate([shared_prompt[:fork], tail]))
    mask = np.arange(width) > width // 2
    if not batch.media:
        return RolloutBatch(Rollout(ids, mask, 0.0) for ids in sequences)
    medium = host.entry.encoder.sample(batch.media)
    assert batch.media_of is not None
    number = next(n for n, other in enumerate(batch.media) if other.kind == medium.kind)
    token = batch.token_ids[batch.media_of == number][0]
    at = np.ones(medium.tokens, np.int64)  # where placeholders go
    types = np.insert(np.zeros(width, np.int64), at, KINDS.index(medium.kind) + 1)
    mask = np.insert(mask, at, False)
    return RolloutBatch(
        Rollout(np.insert(ids, at, token), mask, 0.0, media=(medium,), media_types=types)
        for ids in sequences
    )


# Runs of a sample
# ------------------------------------------------------------


@dataclass(eq=False)
class StockComparison:
    """Runs of one sample: n sequences of W tokens, values [n, W] with zeros first."""

    transaction: Transaction
    host: ModelHost
    config: Config
    sample: RolloutBatch
    training: bool

    def __post_init__(self) -> None:
        host, sample = self.host, self.sample
        self.changes: Changes = self.transaction.changes
        ids = sample.token_ids.reshape(len(sample), -1)
        self.ids_NW: Tensor = torch.as_tensor(ids.copy(), device=host.device)
        self.trained_NW: Tensor = torch.as_tensor(
            sample.loss_mask.reshape(ids.shape).copy(), device=host.device
        )
        self.dtype: torch.dtype = host.rounding_dtype
        most = max(4, ids.shape[1] // 2)
        forced = Config(sharing="tree", boundary="across", max_microbatch_tokens=most)
        shape = host.shape
        self.plan: Plan = make_plan(
            sample,
            shape,
            forced,
            capabilities=host.capabilities(shape),
            uses_temperature=host.head == "logprobs",
        )
        host.allow_stock(self.changes)
        self.routers: Sequence[FoundRouter] = host.routers.found
        self.routes: Routes | None = Routes.to_record(sample) if self.routers else None
        self.run: RouteReplay | None = None

    def routed(self, *, record: bool = False) -> RouteReplay | None:
        """The experts of the first run, which records them; None if they cannot be forced.

        Unless it records them, the stock model is forced to choose them until the changes are
        undone.
        """
        if self.routes is None:
            return None
        self.run = RouteReplay(
            self.routes,
            len(self.routers),
            self.host.device,
            self.plan,
            self.sample,
            record=record,
        )
        if not record:
            force_routers(self.routers, self.run.choose, self.changes)
        return self.run

    def shared(self) -> Tensor:
        """Values by forkpoint."""
        mark = self.changes.mark
        run = self.routed(record=True)
        engine = Engine(
            self.host, self.config, self.transaction, self.plan, self.sample, replay=run
        )
        try:
            # Routers that are forced would be compiled anew, layer by layer, for the sample.
            result = engine.score(entropy=False, graph=self.training, compiled=run is None)
        except (ForkpointError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self.host.topology.lockstep:
                raise  # other ranks wait within their microbatches
            self.changes.undo(mark)
            self.run = None
            self.stock(self.ids_NW)  # raises what the model raises by itself
            raise UnsupportedError(
                f"microbatches of a sample raised {type(error).__name__}: {short(str(error))}. The "
                "stock model runs them. Remove hooks and patches that read arguments or outputs "
                "which forkpoint does not pass."
            ) from error
        self.changes.undo(mark)
        if self.routes is not None:
            self.routes.join(self.host.topology.places)
        return result.per_token[self.host.head].view(self.ids_NW.shape)

    def stock(self, ids_NW: Tensor, begin: int = 0) -> Tensor:
        """Values by the model's own forward, of sequences from the sample's token `begin` on."""
        dtype = self.host.loss_dtype
        if self.run is not None:
            self.run.at(np.arange(begin, begin + ids_NW.numel()))
        first = begin // self.ids_NW.shape[1]
        with torch.no_grad():
            shown = self.sample.shown(range(first, first + len(ids_NW)))
            logits = self.host.stock(ids_NW, shown)
        if self.host.head == "values":
            return nn.functional.pad(logits[:, :-1, 0].to(dtype), (1, 0))
        sequences = zip(logits[:, :-1], ids_NW[:, 1:], strict=True)
        logprobs = [
            logits_WV.to(dtype).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
            for logits_WV, labels in sequences
        ]
        return nn.functional.pad(torch.stack(logprobs), (1, 0))

    def compared(self, shared: Tensor) -> SampleComparison:
        """Differences between `shared`, the stock model, and runs of the stock model."""
        mark, width = self.changes.mark, self.ids_NW.shape[1]
        run = self.routed()
        alone = [self.stock(ids_W[None], i * width) for i, ids_W in enumerate(self.ids_NW)]
        stock = torch.cat(alone)
        self.changes.undo(mark)
        together = self._held_stock()
        # With the same random numbers as the run before: what they do is no rounding.
        rounded = self._held_stock(rounded=True)
        elsewhere, elsewhere_rounded = (x.routes.elsewhere if x else 0.0 for x in (run, self.run))
        finite = stock.isfinite() & together.isfinite() & rounded.isfinite()
        # If the model itself overflows there is nothing to compare.
        there = self.trained_NW & finite
        if not bool(there.any()):
            there = self.trained_NW
            stock, together, rounded, shared = (torch.zeros_like(x) for x in [stock] * 4)
        noise = rms((rounded - together)[there])
        difference = torch.where(there, (shared - stock).abs(), 0)
        difference = difference.nan_to_num(torch.inf, torch.inf)
        sequence, token = divmod(int(difference.argmax()), width)
        return SampleComparison(
            head=self.host.head,
            difference=rms(difference[there]),
            largest=float(difference.max()),
            repeated=rms((together - stock)[there]),
            allowed=allowed_difference(self.host, noise, rms(stock[there])),
            elsewhere=elsewhere,
            allowed_elsewhere=ELSEWHERE + ELSEWHERE_FACTOR * elsewhere_rounded,
            dtype=str(self.dtype).removeprefix("torch."),
            tokens=int(there.sum()),
            where=f"token {token} of a sequence ({float(shared[sequence, token]):.6g} here, "
            f"{float(stock[sequence, token]):.6g} by the model itself)",
        )

    def _held_stock(self, *, rounded: bool = False) -> Tensor:
        """Values by the model's own forward of all at once, with the random numbers kept."""
        mark = self.changes.mark
        keep_random_state(self.host.device, self.changes)
        if rounded:
            round_embeddings(self.host, self.changes)
        self.routed()
        found = self.stock(self.ids_NW)
        self.changes.undo(mark)
        return found


def rms(values: Tensor) -> float:
    """The root of the mean square, in float64."""
    return float(values.double().square().mean().sqrt())


def _rounding(host: ModelHost) -> float:
    """One rounding of the dtype that a model computes in."""
    return torch.finfo(host.rounding_dtype).eps


def allowed_difference(host: ModelHost, noise: float, size: float) -> float:
    """The difference of values of this size that rounding explains, as root mean squares.

    noise: what one rounding of the embeddings does.
    """
    eps = _rounding(host)
    last = torch.finfo(host.loss_dtype).eps / eps
    one = eps * max(1.0, size)
    floor = max(FLOOR_ROUNDINGS, FLOOR_VALUE_ROUNDINGS * last) * one
    return min(max(NOISE_FACTOR * noise, floor), CEILING_ROUNDINGS * one)


def keep_random_state(device: torch.device, changes: Changes) -> None:
    """Return to the present state of the global random generators once the changes are undone."""
    changes.later(torch.set_rng_state, torch.get_rng_state())
    changes.later(random.setstate, random.getstate())
    changes.later(np.random.set_state, np.random.get_state())  # noqa: NPY002
    if device.type == "cuda":
        changes.later(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)


def round_embeddings(host: ModelHost, changes: Changes) -> None:
    """Let the embeddings be off by up to one rounding of their size, at random."""
    generator, eps = torch.Generator("cpu").manual_seed(0), _rounding(host)
    own = threading.get_ident()

    def off(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        if threading.get_ident() != own:
            return output
        here = output.to_local() if isinstance(output, DTensor) else output
        noise = torch.rand(here.shape, generator=generator, dtype=torch.float64, device="cpu")
        factor = 1 + eps * (2 * noise.to(here.device) - 1)
        found = (here.double() * factor).to(here.dtype)
        if isinstance(output, DTensor):
            mesh, placements = output.device_mesh, output.placements
            return DTensor.from_local(found, mesh, placements, run_check=False)
        return found

    add_hook(changes, host.entry.embeddings._forward_hooks, off)
