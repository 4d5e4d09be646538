"""Statistics of routers over the rollouts of a batch, while a plan runs each of their tokens once.

Choices of a segment's tokens are counted in the first pass that runs them. A token of N rollouts
counts N times, as in ordinary training. A load-balancing loss is a sum over experts of a count
times a sum of probabilities. Counts have no gradient. So once they are known, each token
contributes a linear term: its probabilities times weights that depend only on its segment. A
microbatch's backward starts from the sum of these terms.
"""

import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forkpoint.device import on_device
from forkpoint.engine.feature import Feature, Links, Root
from forkpoint.engine.host import Host, RouterSet
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.parallel.ranks import group_leaders
from forkpoint.parallel.statistics import RouterEnd, StatisticsOfRanks
from forkpoint.parallel.step import RankStep
from forkpoint.parallel.topology import Places
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import BACKWARD, SCORE, Instruction
from forkpoint.plan.routing import paths
from forkpoint.tree.forest import Forest, IntArray


@dataclass(frozen=True, eq=False)
class ExpertCounts:
    """Counts of choices of each expert, by layer with a router and by segment of a plan."""

    by_segment_LSE: Tensor
    """int64 [L, S, E], each token once."""
    rollouts: int
    forest: Forest
    of_ranks: RouterEnd | None = None
    """Counts of all ranks; None for counts of this rank only."""

    @property
    def logical_LE(self) -> Tensor:
        """int64 [L, E], over all ranks: a token counts once for each of its rollouts."""
        counts = self.by_segment_LSE
        if self.of_ranks is not None:
            return self.of_ranks.logical_LE.to(counts.device)
        return (counts * on_device(self.forest.multiplicity, counts.device)[:, None]).sum(1)

    @property
    def computed_LE(self) -> Tensor:
        """int64 [L, E], over all ranks: a token counts as often as plans run it."""
        if self.of_ranks is not None:
            return self.of_ranks.computed_LE.to(self.by_segment_LSE.device)
        return self.by_segment_LSE.sum(1)

    @property
    def by_rollout_NLE(self) -> Tensor:
        """int64 [N, L, E]: counts of each rollout of this rank."""
        counts = self.by_segment_LSE
        rollout, segment = (on_device(x, counts.device) for x in paths(self.forest))
        found = counts.new_zeros(self.rollouts, counts.shape[0], counts.shape[2])
        return found.index_add_(0, rollout, counts.transpose(0, 1)[segment])


@dataclass(frozen=True, eq=False)
class RouterTerms:
    """Coefficients of a router loss, and the scope of its statistics."""

    load_balancing: float
    z: float
    parts: IntArray
    """int64 [N], the statistic that each rollout is part of, from 0."""
    given: Tensor | None = None
    """The caller's `router_counts`, of the same tokens and weights: int64 [L, E] for a single
    statistic, or [N, L, E]."""


class RouterOutputs:
    """Logits and choices of every router in one forward.

    Between `begin` and `end` each router calls `note`. Other calls are ignored: those of blocks
    that a backward runs again, and those of other threads.
    """

    def __init__(self, layers: int) -> None:
        """`layers`: how many routers the model has."""
        self.by_layer: dict[int, tuple[Tensor, Tensor]] = {}
        """Logits [T, E], with their graph, and experts chosen, int64 [T, k]."""
        self._layers = layers
        self._thread: int | None = None

    @property
    def open(self) -> bool:
        """Whether a forward has begun that has not ended."""
        return self._thread is not None

    def begin(self) -> None:
        """Begin a forward in this thread."""
        self.by_layer.clear()
        self._thread = threading.get_ident()

    def note(self, layer: int, logits_TE: Tensor, chosen_Tk: Tensor) -> None:
        """Record the outputs of a router. `layer`: its index among the layers with routers."""
        if self._thread == threading.get_ident():
            assert layer not in self.by_layer, "a router ran twice in one forward"
            flat_TE = logits_TE.reshape(-1, logits_TE.shape[-1])
            self.by_layer[layer] = flat_TE, chosen_Tk.detach().reshape(len(flat_TE), -1)

    def end(self) -> None:
        """End the forward.

        Raises UnsupportedError if some router has not run.
        """
        self._thread = None
        if len(self.by_layer) != self._layers:
            raise UnsupportedError(
                f"{len(self.by_layer)} of the model's {self._layers} routers ran in a forward, so "
                "that their statistics are not those of training. Leave router= and "
                "expert_counts= out."
            )

    def take(self) -> list[Tensor]:
        """Return the logits of all layers, and drop them here."""
        found = [self.by_layer[layer][0] for layer in sorted(self.by_layer)]
        self.by_layer.clear()
        return found


class Routing(Feature):
    """Counts the experts that routers choose in one step, and computes the router loss.

    The host gives outputs of routers to `outputs.note`.
    """

    def __init__(
        self,
        plan: Plan,
        host: Host,
        routers: RouterSet,
        terms: RouterTerms,
        of_ranks: StatisticsOfRanks | None = None,
        *,
        sums: bool = False,
    ) -> None:
        """`routers`: routers of the host. `of_ranks`: None on a single process. `sums`: whether
        passes without backwards compute the loss."""
        self.plan = plan
        # Counts cover all places, and after the first pass all layers. Sums of probabilities and
        # the loss are this rank's parts until they are read.
        self.places: Places = host.topology.places
        self.links: Links = host.links
        self.terms = terms
        self.of_ranks = of_ranks
        self.outputs: RouterOutputs = RouterOutputs(len(routers.found))
        self.sums: bool = sums
        device, self._dtype = host.device, host.loss_dtype
        self._device = device
        self.loss: Tensor = torch.zeros((), dtype=self._dtype, device=device)
        """This rank's loss over the backwards that have begun."""
        self._layers, self._first, experts = routers.layers, routers.first, routers.experts
        segments = len(plan.forest)
        self._counts_LSE: Tensor = torch.zeros(
            (self._layers, segments, experts), dtype=torch.int64, device=device
        )
        self._joined = False
        """Whether counts cover the layers of all stages."""
        self._probability_SE: Tensor = self._counts_LSE.new_zeros(
            segments, experts, dtype=torch.float64
        )
        self._z_S: Tensor = self._probability_SE.new_zeros(segments)
        self._counted: set[int] = set()
        self._chosen = 0
        """Number of experts of a token."""
        self._segment_of: dict[int, Tensor] = {}
        self._weights: tuple[Tensor, Tensor] | None = None
        rollout, segment = paths(plan.forest)
        by_segment = np.argsort(segment, kind="stable")
        segment, part = segment[by_segment], terms.parts[rollout[by_segment]]
        self._part, self._segment = (on_device(x, device) for x in (part, segment))
        """For each pair of a segment and a rollout through it: indices of the statistic and the
        segment."""
        self._statistics = int(terms.parts.max(initial=-1)) + 1
        lengths = plan.forest.length[segment]
        tokens = np.bincount(part, weights=lengths, minlength=self._statistics)
        self._tokens_of_part = tokens.astype(np.int64)
        if of_ranks is not None and of_ranks.tokens is not None:
            self._statistics, self._tokens_of_part = 1, np.array([of_ranks.tokens])
        self._mean_over: int = self._statistics if of_ranks is None else of_ranks.statistics
        """Number of statistics whose mean is the loss."""
        self._summed_PE: Tensor | None = None
        """Counts of all ranks, if the step needs them."""

    def counts(self, end: RouterEnd | None = None) -> ExpertCounts:
        """Counts of all tokens that have run on this rank or, with `end`, on all ranks."""
        return ExpertCounts(self._counts_LSE, self.plan.rollouts, self.plan.forest, end)

    def gather(self, ranks: RankStep) -> None:
        """Add up the counts of all ranks, if the step needs these. Collective.

        Called after the pass of scores, if there is one.
        """
        if self.of_ranks is None or not self.of_ranks.gathers:
            return
        found = ranks.gather({"counts": self._own_counts().cpu()})
        leaders = group_leaders(ranks.ranks.batches)
        total_PE = torch.stack([found[first]["counts"] for first in leaders]).sum(0)
        self._summed_PE = total_PE.to(self._device)

    def ending(self, value: float | None = None) -> RouterEnd:
        """This rank's part of the statistics at the end of the step.

        `value`: its part of the loss, if no backward has added that up.
        """
        counts = self.counts()
        logical_LE, computed_LE = counts.logical_LE.cpu(), counts.computed_LE.cpu()
        loss = float(self._over_parts(self.loss)) if value is None else value
        return RouterEnd(loss, logical_LE, computed_LE)

    def end_pass(self) -> None:
        if not self._joined:
            self._counts_LSE = self.links.summed(self._counts_LSE)
            self._joined = True

    def _over_parts(self, x: Tensor) -> Tensor:
        """The sum over ranks with other places and layers. Collective."""
        return self.links.summed(self.places.summed(x))

    # Around a forward
    # ------------------------------------------------------------

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        if instruction.operation != BACKWARD and instruction.counts_routing:
            self.outputs.begin()

    def after_forward(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        if not self.outputs.open:
            return
        self.outputs.end()
        if inputs.microbatch.index not in self._counted:
            self._count(inputs)
            self._counted.add(inputs.microbatch.index)
        if instruction.operation == SCORE:
            self.outputs.take()

    def _count(self, inputs: MicrobatchInputs) -> None:
        segment_T, experts = self._segments(inputs), self._counts_LSE.shape[2]
        # The microbatch's loss needs its counts at once, of all places.
        counts_LSE = self._counts_LSE if self.places.whole else torch.zeros_like(self._counts_LSE)
        for layer, (logits_TE, chosen_Tk) in self.outputs.by_layer.items():
            self._chosen = chosen_Tk.shape[-1]
            place = (segment_T[:, None] * experts + chosen_Tk[: len(segment_T)]).flatten()
            counts = counts_LSE[self._first + layer].view(-1)
            counts.scatter_add_(0, place, torch.ones_like(place))
            if self.sums:
                # The loss is linear in these sums.
                x = logits_TE[: len(segment_T)].detach().to(self._dtype)
                self._probability_SE.index_add_(0, segment_T, x.softmax(-1).double())
                self._z_S.index_add_(0, segment_T, x.logsumexp(-1).square().double())

        if not self.places.whole:
            segments = on_device(np.array(inputs.microbatch.segments), self._device)
            self._counts_LSE[:, segments] += self.places.summed(counts_LSE[:, segments])

    def _segments(self, inputs: MicrobatchInputs) -> Tensor:
        """int64 [T], the segment of each token that this rank runs; padding, if any, follows."""
        index = inputs.microbatch.index
        if index not in self._segment_of:
            self._segment_of[index] = on_device(inputs.segments, self._device)
        return self._segment_of[index]

    # The loss
    # ------------------------------------------------------------

    def root(self, instruction: Instruction, inputs: MicrobatchInputs, scale: float) -> Root | None:
        """The microbatch's part of the loss, and its gradient; None if there is no part."""
        found = self.outputs.take()
        terms, scores = self.terms, instruction.operation == SCORE
        if scores or not instruction.counts_routing or not (terms.load_balancing or terms.z):
            return None
        weights_SE, z_S = self._linear_weights()
        segment_T = self._segments(inputs)
        weights_TE, z_T = weights_SE[segment_T], z_S[segment_T]
        term = torch.zeros((), dtype=self._dtype, device=self._device)
        for logits_TE in found:
            x = logits_TE[: len(segment_T)].to(self._dtype)
            if terms.load_balancing:
                term = term + (x.softmax(-1) * weights_TE).sum()
            if terms.z:
                term = term + (x.logsumexp(-1).square() * z_T).sum()
        self.loss = self.loss + term.detach()
        return (term, torch.full_like(term, scale)) if term.requires_grad else None

    def value(self) -> Tensor:
        """The loss, from a pass without backwards."""
        weights_SE, z_S = self._linear_weights()
        value = (weights_SE.double() * self._probability_SE).sum() + (z_S * self._z_S).sum()
        return self._over_parts(value).to(self._dtype)

    def _linear_weights(self) -> tuple[Tensor, Tensor]:
        """Weights by segment: of each probability [S, E], and of each squared logsumexp [S].

        They are not final for statistics with tokens in microbatches that have not run.
        Microbatches that have run hold no tokens of such statistics.
        """
        if self._weights is not None:
            return self._weights
        counts_PE = self._counts_of_parts()
        rows_P = on_device(self._tokens_of_part * self._layers, self._device).to(torch.float64)
        each_P = 1 / (rows_P * self._mean_over)
        experts = counts_PE.shape[1]
        lb_PE = self.terms.load_balancing * experts * counts_PE * (each_P / rows_P)[:, None]
        z_P = self.terms.z * each_P
        found = (
            self._summed(lb_PE).to(self._dtype),
            self._summed(z_P[:, None])[:, 0].to(self._dtype),
        )
        if self.terms.given is not None or len(self._counted) == len(self.plan.microbatches):
            self._weights = found
        return found

    def _summed(self, values_PX: Tensor) -> Tensor:
        """[S, X], for each segment the sum over the rollouts through it, in a fixed order."""
        if not len(self._part):
            return values_PX.new_zeros(0, values_PX.shape[1])
        lengths = self.plan.forest.multiplicity
        return torch.segment_reduce(
            values_PX[self._part], "sum", lengths=on_device(lengths, self._device), initial=0.0
        )

    def _own_counts(self) -> Tensor:
        """int64 [P, E], over all layers, of this rank."""
        by_segment_SE = self._counts_LSE.sum(0)
        found = by_segment_SE.new_zeros(self._statistics, by_segment_SE.shape[1])
        return found.index_add_(0, self._part, by_segment_SE[self._segment])

    def _counts_of_parts(self) -> Tensor:
        """float64 [P, E], over all layers, and over ranks if a statistic is taken over them."""
        given = self.terms.given
        if given is None:
            found = self._own_counts() if self._summed_PE is None else self._summed_PE
            return found.double()
        self._check_given(given)
        given = given.to(self._device)
        if given.dim() == 2:
            return given.sum(0)[None].double()
        found = given.new_zeros(self._statistics, given.shape[2])
        return found.index_add_(0, on_device(self.terms.parts, self._device), given.sum(1)).double()

    def _check_given(self, given: Tensor) -> None:
        """Raises ConfigError if the caller's counts do not fit the batch and the scope."""
        layers, _, experts = self._counts_LSE.shape
        forest, rollouts = self.plan.forest, self.plan.rollouts
        joins = self.of_ranks is not None and self.of_ranks.tokens is not None
        wanted = [] if joins else [(rollouts, layers, experts)]
        wanted += [(layers, experts)] if self._statistics == 1 else []
        if tuple(given.shape) not in wanted or given.dtype != torch.int64:
            raise ConfigError(
                f"router_counts are {given.dtype} of shape {tuple(given.shape)}, and the model and "
                f"the scope take int64 of {' or '.join(map(str, wanted))}. Give scores."
                "expert_counts for the scope 'batch', else scores.rollout_expert_counts."
            )
        tokens = self._tokens_of_part
        if given.dim() == 3:
            tokens = np.zeros(rollouts, np.int64)
            ends = forest.leaf >= 0
            tokens[ends] = (forest.start + forest.length)[forest.leaf[ends]]
        found_NL = given.sum(-1).reshape(-1, layers).cpu().numpy()
        wrong = np.argwhere(found_NL != tokens[:, None] * self._chosen)
        if len(wrong):
            row, layer = wrong[0].tolist()
            raise ConfigError(
                f"router_counts have {found_NL[row, layer]} choices in layer {layer}, and the "
                f"counted tokens of this batch have {tokens[row] * self._chosen}. Take the counts "
                "of the same batch, from policy.score with the same router=."
            )
