"""Self-check: compares forkpoint with the model's own (stock) forward on a sample.

Before the first step, the second, and the first after a change of the model, three short sequences
run as microbatches that share tokens, and by the stock forward. If values differ by more than
rounding, the step is refused, because the model has code that forkpoint does not run, or runs
differently. The effect of rounding is measured: the stock forward runs again with embeddings that
are perturbed by one rounding.
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
"""Largest length of a sample's sequences."""
LEAST_TOKENS = 8
"""Least length of a sample's sequences. Shorter rollouts are extended."""
MOST_STATES = 64
"""Number of checked states of a model that are remembered. Training and evaluation are two
states."""
NOISE_FACTOR = 10.0
"""Allowed difference, relative to the effect of one rounding of the embeddings. For 34 families
with random weights in four dtypes and 4 to 36 layers, the largest ratio was 3.9, and most are 1."""
FLOOR_ROUNDINGS = 0.5
"""Difference that is always allowed, in roundings of a value in the model's dtype."""
FLOOR_VALUE_ROUNDINGS = 4.0
"""The same in roundings of the dtype of values, because each run rounds them a few times. In a
sample of few tokens, all of these may have the same sign while the rounded embeddings have no
effect."""
CEILING_ROUNDINGS = 1e4
"""Difference that is never allowed, in roundings of a value in the model's dtype."""
ELSEWHERE = 0.02
"""Fraction of choices of experts that may always differ."""
ELSEWHERE_FACTOR = 3.0
"""Allowed fraction, relative to the fraction that differs after one rounding of the embeddings."""


@dataclass(frozen=True)
class SampleComparison:
    """Differences on a sample, in the units of the model's values (nats for log-probs)."""

    head: str
    """Name of the values."""
    difference: float
    """Root mean square of differences between forkpoint's values and those of the stock forward."""
    largest: float
    """The largest of these differences."""
    repeated: float
    """The root mean square of differences between stock forwards of single sequences and of all at
    once."""
    allowed: float
    """Limit of `difference` and `repeated`."""
    elsewhere: float
    """Fraction of choices of experts that differ in the stock forward."""
    allowed_elsewhere: float
    """Limit of `elsewhere`."""
    tokens: int
    where: str
    """The token of the largest difference, with both values."""

    def fault(self) -> UnsupportedError | None:
        """The error if values or choices differ too much; None if the model passes."""
        sample = f"on a sample of {self.tokens} tokens"
        if self.repeated > self.allowed:
            return UnsupportedError(
                f"the model does not agree with itself: {sample} its {self.head} differ by "
                f"{self.repeated:.3g} (rms) between single and batched runs (allowed "
                f"{self.allowed:.3g}). Remove random or batch-mixing modules, or call model.eval()."
            )
        if self.elsewhere > self.allowed_elsewhere:
            return UnsupportedError(
                f"{sample} the unmodified model sends {self.elsewhere:.2%} of them to other "
                f"experts than forkpoint (allowed {self.allowed_elsewhere:.2%}). Remove patches "
                "and hooks of routers, or turn this check off with Config(self_check=False)."
            )
        if not self.difference <= self.allowed:  # NaN as well
            return UnsupportedError(
                f"{sample} forkpoint's {self.head} differ from the model's by "
                f"{self.difference:.3g} (rms, allowed {self.allowed:.3g}), {self.largest:.3g} at "
                f"{self.where}. Remove patches and hooks, or set Config(self_check=False)."
            )
        return None


class CheckedModel(NamedTuple):
    """A state of a model, with a version of its weights."""

    state: Hashable
    encodes: bool
    """Whether it runs media."""
    version: tuple[int, int]


class SampleChecks:
    """Records the self-checks of one model, which are due before its first step, its second, and
    the first after a change.

    Before the second step, weights have changed, so values that a hook derives from them are
    computed again.
    """

    def __init__(self) -> None:
        self._agreed: dict[Hashable, list[tuple[int, int]]] = {}
        """Versions of weights with which the model has passed, by state of the model."""
        self._steps: OptimizerSteps | None = None

    def is_due(self, model: CheckedModel) -> bool:
        """Whether a self-check is due on this rank."""
        versions = self._agreed.get(model[:2], [])
        return len(versions) < 2 and model.version not in versions

    def passed(self, model: CheckedModel) -> None:
        """Remember that the model has passed."""
        self._agreed.setdefault(model[:2], []).append(model.version)
        while len(self._agreed) > MOST_STATES:
            self._agreed.pop(next(iter(self._agreed)))

    def model(
        self, host: ModelHost, config: Config, fingerprint: int, *, training: bool, encodes: bool
    ) -> CheckedModel | None:
        """The model in its present state; None if self-checks are disabled."""
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
    """Compare values by forkpoint with those of the stock forward, on a sample from `batch`.

    The model must be prepared and not entered. `training`: whether forwards record a graph. Raises
    UnsupportedError if microbatches or the stock forward fail. The state of random number
    generators is restored.
    """
    mark = transaction.changes.mark
    _float32_convolutions.enter(transaction.changes)
    sample = sample_of(batch, host)
    comparison = StockComparison(transaction, host, config, sample, training)
    keep_random_state(host.device, transaction.changes)
    # Microbatches run first. A stock forward may update values that a hook derives from parameters,
    # such as a head's weight under weight normalisation, and so hide that microbatches do not
    # update them.
    found = comparison.compared(comparison.shared())
    transaction.changes.undo(mark)
    return found


class _Float32Convolutions:
    """Prevents cuDNN from rounding inputs of float32 convolutions to TF32, as it does by default.

    Some of its algorithms do this, and it chooses algorithms by the size of a batch. The setting is
    one of the process, and several threads may check models at once: the last one restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[object] = set()
        self._before = ""
        self._settings: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]

    def enter(self, changes: Changes) -> None:
        """Set the precision until the changes are undone."""
        user = object()
        changes.later(self._leave, user)
        with self._lock:
            if not self._users:
                self._before = self._settings.fp32_precision
            self._users.add(user)
            self._settings.fp32_precision = "ieee"

    def _leave(self, user: object) -> None:
        with self._lock:
            if self._users == {user}:
                self._settings.fp32_precision = self._before
            self._users.discard(user)


_float32_convolutions = _Float32Convolutions()


def sample_of(batch: RolloutBatch, host: ModelHost) -> RolloutBatch:
    """Make a sample from a batch: three sequences of one length. All share the first half, and two
    share three quarters.

    Without media, the length is a multiple of `Topology.length_multiple`.

    Tokens that all share are not trained, so that their microbatch ends without a head, as prompts
    do. All others are trained. If the batch has media, each sequence has one after its first token.
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
    # A batch with one distinct token: 0 and 1 give two.
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
    at = np.ones(medium.tokens, np.int64)  # positions of placeholders
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
    """Runs of one sample of n sequences of W tokens. Values are [n, W], with 0 at first tokens."""

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
        """Make the feature that records the experts of the first run and forces them in later ones;
        None for a model without routers.

        Without `record`, the stock forward is forced to choose them until the changes are undone.
        """
        if self.routes is None:
            return None
        self.run = RouteReplay(
            self.routes, len(self.routers), self.host.device, self.plan, record=record
        )
        if not record:
            force_routers(self.routers, self.run.choose, self.changes)
        return self.run

    def shared(self) -> Tensor:
        """Compute values by forkpoint."""
        mark = self.changes.mark
        run = self.routed(record=True)
        engine = Engine(
            self.host, self.config, self.transaction, self.plan, self.sample, replay=run
        )
        try:
            # Forced routers would be compiled again in each layer, only for the sample.
            result = engine.score(entropy=False, graph=self.training, compiled=run is None)
        except (ForkpointError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self.host.topology.lockstep:
                raise  # other ranks wait within their microbatches
            self.changes.undo(mark)
            self.run = None
            self.stock(self.ids_NW)  # raises the model's own error, if any
            remedy = (
                "Remove hooks and patches that read arguments or outputs which forkpoint does not "
                "pass."
            )
            for name, parameter in self.host.named_parameters():
                if parameter.is_inference():  # torch cannot save them for a backward
                    remedy = (
                        f"{name} was made under torch.inference_mode: make or load the model "
                        "outside of it."
                    )
                    break
            raise UnsupportedError(
                f"microbatches of a sample raised {type(error).__name__}: {short(str(error))}. The "
                f"unmodified model runs the sample without an error. {remedy}"
            ) from error
        self.changes.undo(mark)
        if self.routes is not None:
            self.routes.join(self.host.topology.places)
        return result.per_token[self.host.head].view(self.ids_NW.shape)

    def stock(self, ids_NW: Tensor, begin: int = 0) -> Tensor:
        """Compute values by the stock forward. `begin`: position of the first token in the
        sample."""
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
        """Compare `shared`, the values by forkpoint, with several stock forwards."""
        mark, width = self.changes.mark, self.ids_NW.shape[1]
        run = self.routed()
        alone = [self.stock(ids_W[None], i * width) for i, ids_W in enumerate(self.ids_NW)]
        stock = torch.cat(alone)
        self.changes.undo(mark)
        together = self._held_stock()
        # With the same random numbers as the previous run, so that only rounding differs.
        rounded = self._held_stock(rounded=True)
        elsewhere, elsewhere_rounded = (x.routes.elsewhere if x else 0.0 for x in (run, self.run))
        finite = stock.isfinite() & together.isfinite() & rounded.isfinite()
        # If the model itself overflows, nothing can be compared.
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
            tokens=int(there.sum()),
            where=f"token {token} of a sequence ({float(shared[sequence, token]):.6g} here, "
            f"{float(stock[sequence, token]):.6g} by the model itself)",
        )

    def _held_stock(self, *, rounded: bool = False) -> Tensor:
        """Compute values by a stock forward of all sequences, and restore the state of random
        number generators."""
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
    """Relative size of one rounding in the model's dtype."""
    return torch.finfo(host.rounding_dtype).eps


def allowed_difference(host: ModelHost, noise: float, size: float) -> float:
    """Largest difference that rounding explains for values of this size, as root mean squares.

    noise: effect of one rounding of the embeddings.
    """
    eps = _rounding(host)
    last = torch.finfo(host.loss_dtype).eps / eps
    one = eps * max(1.0, size)
    floor = max(FLOOR_ROUNDINGS, FLOOR_VALUE_ROUNDINGS * last) * one
    return min(max(NOISE_FACTOR * noise, floor), CEILING_ROUNDINGS * one)


def keep_random_state(device: torch.device, changes: Changes) -> None:
    """Restore the present state of the global random number generators when the changes are
    undone."""
    changes.later(torch.set_rng_state, torch.get_rng_state())
    changes.later(random.setstate, random.getstate())
    changes.later(np.random.set_state, np.random.get_state())  # noqa: NPY002
    if device.type == "cuda":
        changes.later(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)


def round_embeddings(host: ModelHost, changes: Changes) -> None:
    """Perturb the embeddings by random relative errors of up to one rounding, until the changes are
    undone."""
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
