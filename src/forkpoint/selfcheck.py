"""Evidence that a model computes here what it computes by itself, on a small sample.

The lists of what is refused (`hosts.refusals`) name what is known to go wrong. A sample finds out
what they do not name. Three short sequences that share tokens, cut from the batch, run through the
stock model as its user would call it, and through forkpoint in microbatches that part at every
fork. Log-probs (a critic's values) must agree within what rounding does to this very model, which
is measured by a stock run whose embeddings are off by a rounding.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forkpoint.config import Config
from forkpoint.engine.engine import Engine
from forkpoint.engine.host import Host
from forkpoint.engine.rows import row_tokens
from forkpoint.errors import ForkpointError, UnsupportedError
from forkpoint.hosts.arguments import CONTEXT_ARGUMENT
from forkpoint.plan import Plan, make_plan
from forkpoint.rollouts import Rollout, RolloutBatch, short

WIDTH_TOKENS = 160
"""The longest sequence of a sample."""
LEAST_TOKENS = 8
"""Shorter rollouts are continued to this length."""
NOISE_FACTOR = 10.0
"""A difference may be this many times what one rounding of the embeddings does. Of 34 families with
random weights in four dtypes, 4 to 36 layers deep, the largest ratio seen is 3.9, most are 1."""
FLOOR_ROUNDINGS = 0.5
"""Roundings of a value's own size that are allowed in any case."""
CEILING_ROUNDINGS = 1e4
"""Roundings that are never allowed: what moves values by more is no rounding."""


@dataclass(frozen=True)
class Agreement:
    """Differences on a sample, in the units of the model's values (nats for log-probs)."""

    difference: float
    """Root mean square of the values here less the stock model's."""
    largest: float
    """The largest of these differences."""
    noise: float
    """Root mean square of what one rounding of the embeddings does to the stock model's values."""
    repeated: float
    """The same of the stock model run on one sequence at a time, and on all at once."""
    allowed: float
    """The most that `difference` and `repeated` may be."""
    dtype: str
    tokens: int
    where: str
    """The token of the largest difference, with both values."""


def self_check(host: Host, config: Config, batch: RolloutBatch, *, training: bool) -> Agreement:
    """Compare forkpoint with the stock model on a sample of a batch.

    Args:
        host: the model.
        config: its kernels are used.
        batch: the sample's tokens are taken from it.
        training: whether forwards record a graph, as those of a step do.

    Raises UnsupportedError where the two part, or where the stock model does not agree with itself.
    The message names the largest difference and the layer. Random generators are left as they were.
    """
    sampler = _Sampler(host, config, sample_of(batch), training)
    with _kept_random_state(host.device):
        # Microbatches come first: a stock forward may renew what a hook derives from parameters,
        # such as the weight of a head under weight normalisation, and so hide that these do not.
        shared = sampler.shared()
        found = sampler.compared(shared)
        if found.repeated > found.allowed:
            raise UnsupportedError(
                f"the model does not agree with itself: on a sample of {found.tokens} tokens its "
                f"{host.head} differ by {found.repeated:.3g} (root mean square) between sequences "
                f"run one at a time and all at once, where rounding in {found.dtype} explains at "
                f"most {found.allowed:.3g}. It draws random numbers, or mixes the sequences of a "
                "batch, so a shared token has no one value. Remove what does that (a hook, a "
                "random module), or call model.eval()."
            )
        if not found.difference <= found.allowed:  # NaN as well
            raise UnsupportedError(
                f"on a sample of {found.tokens} tokens forkpoint's {host.head} are not the "
                f"model's own: they differ by {found.difference:.3g} (root mean square), where "
                f"rounding in {found.dtype} explains at most {found.allowed:.3g}, and by "
                f"{found.largest:.3g} at {found.where}. Outputs part at {sampler.parting()}. "
                "Something changes what the model computes that forkpoint does not run, or runs "
                "differently, such as a patched function, a hook or a changed module. Undo it. "
                "If the difference is meant to be, Config(self_check=False) turns this check off."
            )
    return found


def sample_of(batch: RolloutBatch) -> RolloutBatch:
    """Three sequences of one length, cut from a batch: two share three quarters, all share half.

    The tokens that all share are not trained, so that their microbatch ends without a head as
    prompts do; all others are.
    """
    longest = int(np.argmax(batch.lengths))
    trunk = batch.token_ids[batch.offsets[longest] : batch.offsets[longest + 1]]
    width = min(len(trunk), WIDTH_TOKENS)
    if width < LEAST_TOKENS:
        trunk, width = np.resize(trunk, LEAST_TOKENS), LEAST_TOKENS
    known = np.unique(batch.token_ids)
    # A text of one token only: with 0 and 1 there are two.
    known = known if len(known) > 1 else np.array([0, 1])
    sequences = [trunk[:width]]
    for fork, donor in ((width * 3 // 4, -1), (width // 2, 0)):
        tail = np.resize(batch.token_ids[:: -1 if donor else 1], width - fork)
        if tail[0] == trunk[fork]:
            tail[0] = known[known != trunk[fork]][0]
        sequences.append(np.concatenate([trunk[:fork], tail]))
    mask = np.arange(width) > width // 2
    return RolloutBatch(Rollout(ids, mask, 0.0) for ids in sequences)


class _Sampler:
    """Runs of one sample: n sequences of W tokens, values [n, W] of which the first is 0."""

    def __init__(self, host: Host, config: Config, sample: RolloutBatch, training: bool) -> None:
        self.host = host
        self.config = config
        self.sample = sample
        self.training = training
        ids = sample.token_ids.reshape(len(sample), -1)
        self.ids_NW: Tensor = torch.as_tensor(ids.copy(), device=host.device)
        self.trained_NW: Tensor = torch.as_tensor(
            sample.loss_mask.reshape(ids.shape).copy(), device=host.device
        )
        self.dtype: torch.dtype = compute_dtype(host.model, host.device)
        # Norms of float64 models are computed in float32, as transformers writes them.
        widest = torch.promote_types(self.dtype, torch.float32) == torch.float64
        self.eps: float = torch.finfo(torch.float32 if widest else self.dtype).eps
        most = max(4, ids.shape[1] // 2)
        forced = Config(sharing="tree", boundary="across_rows", max_row_tokens=most)
        self.plan: Plan = make_plan(sample, host.shape, forced)

    def shared(self) -> Tensor:
        """Values by forkpoint."""
        engine = Engine(self.host, self.config)
        try:
            result = engine.score(self.plan, self.sample, entropy=False, graph=self.training)
        except (ForkpointError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self.stock(self.ids_NW)  # raises what the model raises by itself
            raise UnsupportedError(
                f"microbatches of a sample raised {type(error).__name__}: {short(str(error))}. The "
                "model by itself runs them, so something in it expects what forkpoint does not "
                "give it, such as a hook that reads the causal model's outputs. Remove that."
            ) from error
        return result.per_token[self.host.head].view(self.ids_NW.shape)

    def stock(self, ids_NW: Tensor) -> Tensor:
        """Values by the model's own forward."""
        dtype = self.host.loss_dtype
        with torch.no_grad():
            logits = self.host.model(input_ids=ids_NW, use_cache=False, return_dict=True).logits
        if self.host.head == "values":
            return nn.functional.pad(logits[:, :-1, 0].to(dtype), (1, 0))
        rows = zip(logits[:, :-1], ids_NW[:, 1:], strict=True)
        logprobs = [
            row.to(dtype).log_softmax(-1).gather(-1, labels[:, None])[:, 0] for row, labels in rows
        ]
        return nn.functional.pad(torch.stack(logprobs), (1, 0))

    def alone(self) -> Tensor:
        """Values by the model's own forward, one sequence at a time."""
        return torch.cat([self.stock(self.ids_NW[i : i + 1]) for i in range(len(self.ids_NW))])

    def compared(self, shared: Tensor) -> Agreement:
        """Differences between `shared`, the stock model, and runs of the stock model."""
        stock = self.alone()
        with _kept_random_state(self.host.device):
            together = self.stock(self.ids_NW)
        # With the same random numbers as the run before: what they do is no rounding.
        with _kept_random_state(self.host.device), _rounded_embeddings(self.host.model, self.eps):
            rounded = self.stock(self.ids_NW)
        finite = stock.isfinite() & together.isfinite() & rounded.isfinite()
        # Where the model itself overflows there is nothing to compare.
        there = self.trained_NW & finite
        if not bool(there.any()):
            there = self.trained_NW
            stock, together, rounded, shared = (torch.zeros_like(x) for x in [stock] * 4)
        noise = _rms((rounded - together)[there])
        size = self.eps * max(1.0, _rms(stock[there]))
        allowed = max(NOISE_FACTOR * noise, FLOOR_ROUNDINGS * size)
        difference = torch.where(there, (shared - stock).abs(), 0)
        difference = difference.nan_to_num(torch.inf, torch.inf)
        sequence, token = divmod(int(difference.argmax()), self.ids_NW.shape[1])
        return Agreement(
            difference=_rms(difference[there]),
            largest=float(difference.max()),
            noise=noise,
            repeated=_rms((together - stock)[there]),
            allowed=min(allowed, CEILING_ROUNDINGS * size),
            dtype=str(self.dtype).removeprefix("torch."),
            tokens=int(there.sum()),
            where=f"token {token} of a sequence ({float(shared[sequence, token]):.6g} here, "
            f"{float(stock[sequence, token]):.6g} by the model itself)",
        )

    def parting(self) -> str:
        """The first place in the decoder whose outputs differ by more than rounding."""
        flat: dict[int, Tensor] = {}
        here: dict[int, Tensor] = {}
        noisy: dict[int, Tensor] = {}

        def store(found: dict[int, Tensor], block: int, x: Tensor, _: dict[str, Any]) -> None:
            found[block] = x.detach().flatten(0, 1).double()

        def place(found: dict[int, Tensor], block: int, x: Tensor, kwargs: dict[str, Any]) -> None:
            row = kwargs[CONTEXT_ARGUMENT].inputs.row
            tokens, real = row_tokens(self.plan, self.sample, row)
            x_TC = x.detach().flatten(0, 1).double()
            all_TC = found.setdefault(
                block, x_TC.new_full((self.ids_NW.numel(), x_TC.shape[1]), torch.nan)
            )
            slots = torch.as_tensor(real, device=x_TC.device)
            all_TC[torch.as_tensor(tokens[real], device=x_TC.device)] = x_TC[slots]

        blocks = self.host.blocks
        with watched_blocks(blocks, partial(place, here)):
            self.shared()
        with watched_blocks(blocks, partial(store, flat)):
            self.stock(self.ids_NW)
        with (
            watched_blocks(blocks, partial(store, noisy)),
            _rounded_embeddings(self.host.model, self.eps),
        ):
            self.stock(self.ids_NW)
        for block in sorted(here):
            known = ~here[block].isnan().any(-1)
            size, rounding = _rms(flat[block]), _rms(noisy[block] - flat[block])
            found = _rms((here[block] - flat[block])[known])
            if not found <= max(NOISE_FACTOR * rounding, self.eps * size):
                if block < 0:
                    return "the input of the first layer (the embeddings)"
                return (
                    f"layer {block} of {len(blocks)} (counted from 0), whose output differs by "
                    f"{found / (size or 1):.3g} of its size"
                )
        return "the head: all layers' outputs agree"


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@contextmanager
def _kept_random_state(device: torch.device) -> Iterator[None]:
    """After it the global random generators are as they were."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


def compute_dtype(model: nn.Module, device: torch.device) -> torch.dtype:
    """The dtype a step computes in: the narrowest of the parameters, or autocast's, if narrower."""
    dtypes = {p.dtype for p in model.parameters()}
    # Autocast leaves float64 alone.
    if torch.is_autocast_enabled(device.type) and dtypes != {torch.float64}:
        dtypes.add(torch.get_autocast_dtype(device.type))
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


@contextmanager
def watched_blocks(
    blocks: nn.ModuleList, see: Callable[[int, Tensor, dict[str, Any]], None]
) -> Iterator[None]:
    """Within it `see` gets each block's index (-1 for the first's input), tensor and arguments."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(-1, args[0] if args else kwargs["hidden_states"], kwargs)

    def after(index: int, _: nn.Module, __: Any, kwargs: dict[str, Any], output: Any) -> None:
        see(index, output if isinstance(output, Tensor) else output[0], kwargs)

    with ExitStack() as stack:
        handle = blocks[0].register_forward_pre_hook(before, with_kwargs=True)
        stack.callback(handle.remove)
        for index, block in enumerate(blocks):
            handle = block.register_forward_hook(partial(after, index), with_kwargs=True)
            stack.callback(handle.remove)
        yield


@contextmanager
def _rounded_embeddings(model: nn.Module, eps: float) -> Iterator[None]:
    """Within it the embeddings are off by up to `eps` of their size, at random."""
    generator = torch.Generator().manual_seed(0)

    def off(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return (output.double() * (1 + eps * noise.to(output.device))).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(off)  # type: ignore[operator]
    try:
        yield
    finally:
        handle.remove()
