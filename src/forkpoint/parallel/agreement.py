"""The agreement of ranks before a step, which each rank computes from the same exchanged
proposals."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forkpoint.config import Gather, Split
from forkpoint.errors import ConfigError, RankError, UnsupportedError
from forkpoint.losses.base import Denominators, Loss, coupling_of, is_own
from forkpoint.parallel.copies import Contents, alike, check_same_batches
from forkpoint.parallel.ranks import DataRanks, group_leaders
from forkpoint.parallel.statistics import StatisticsOfRanks, StatisticsShare, joined
from forkpoint.parallel.step import RankStep
from forkpoint.plan.align import align
from forkpoint.plan.gathering import (
    Choice,
    Offer,
    choose_gathering,
    choose_split,
    link_cost,
    step_cost,
)
from forkpoint.plan.media import CommonEncoders, PlannedMedium
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.program import Program
from forkpoint.plan.shared_prompts import SharedPrompt
from forkpoint.plan.stage_sizes import SizedOffer, StagedStep, choose_size
from forkpoint.plan.stages import Stage
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import MediumOutline

Coupling = Literal["", "groups", "batch"]
"""Rollouts that a loss couples: none, those of each group, or all."""
GatherOption = Literal["", "auto", "microbatch", "step"]
"""`Config.gather`; "" if weights are not sharded."""


@dataclass(frozen=True)
class Held:
    """Parameters of the model on one rank, which other ranks with the same stage have too."""

    stage: int
    """Index of the stage of a pipeline; 0 without stages."""
    parameters: str
    """Digest of their names, types and sizes."""
    trained: str
    """Digest of the names of those that are trained."""
    count: int
    """Number of parameters that are trained."""


@dataclass(frozen=True)
class Proposal:
    """One rank's part of a step."""

    call: str
    """The call as text, with all options that must be the same on every rank."""
    error: str | None = None
    """Reason why this rank cannot run the step. If set, other fields are empty."""
    held: Held | None = None
    """Parameters of the model on this rank."""
    scale: float | None = None
    """Factor of the gradients; None if it can differ between ranks."""
    offer: Offer = field(default_factory=Offer)
    budget_bytes: int | None = None
    """The memory budget of the plan; None is no limit."""
    calibration: Calibration | None = None
    """The calibration that prices the plan, until ranks have agreed on one."""
    trains: bool = False
    """Whether this rank's plan trains on any token."""
    trainable: bool = True
    """Whether any parameter that this rank's batch runs requires a gradient, if the call gives
    gradients."""
    trained_tokens: int = 0
    rollouts: int = 0
    groups: NDArray[np.uint64] | None = None
    """Digests of the rollouts' groups. A group has the same digest on all ranks."""
    couples: Coupling = ""
    gathered: RolloutBatch | None = None
    """This rank's rollouts, if the loss is computed from those of all ranks."""
    statistics: StatisticsShare | None = None
    """This rank's part of router statistics, if the step computes any."""
    contents: Contents | None = None
    """Contents of the step, if several ranks have the same batch."""
    sample: RolloutBatch | None = None
    """Sample for a self-check, if one is due on this rank."""
    prompts: Mapping[str, int] = field(default_factory=dict)
    """Number of edges of prompts that this rank can exchange, by digest."""
    exchanged: Offer | str | None = None
    """This rank's offer for a step in which prompts are exchanged, or the reason why it has none.
    None before ranks have found common prompts."""
    sizes: tuple[SizedOffer, ...] = ()
    """Offers of plans of several sizes, on stages of a pipeline."""
    trains_encoder: bool = False
    """Whether the encoder is trained."""
    outline: MediumOutline | None = None
    """Outline of one of the offer's media, if fully_shard may gather weights for each
    microbatch."""


@dataclass(frozen=True)
class Agreement:
    """The result of an agreement. It is the same on all ranks, except `program`."""

    program: Program
    """This rank's program, in the common shape unless weights are gathered once a step."""
    gathering: Choice[Gather] | None
    """How often weights are gathered; None if they are not sharded."""
    counts: Denominators
    """Denominators of all ranks' rollouts as one batch."""
    trains: bool
    """Whether any rank's plan trains on any token."""
    sample: RolloutBatch | None
    parts: tuple[RolloutBatch, ...] = ()
    """Rollouts of each rank, if the loss is computed from those of all ranks."""
    splitting: Choice[Split] | None = None
    """Whether common prompts are replicated or exchanged; None if there are none."""
    prompts: tuple[SharedPrompt, ...] = ()
    """Exchanged prompts."""
    statistics: StatisticsOfRanks | None = None
    """Statistics of routers, if the step computes any."""
    staged: StagedStep | None = None
    """The training step on stages of a pipeline, if there are several."""
    encoders: CommonEncoders | None = None
    """Encoder runs of all ranks, if ranks with different batches run in lockstep."""

    def step(self, ranks: DataRanks, *, mean: bool) -> RankStep:
        """Make the step. `mean`: whether each rank has a separate loss."""
        digest = ""
        if self.gathering is not None and self.gathering.taken == "microbatch":
            shape = "".join(
                f"{i.operation}{i.slot}{i.ends_at}{i.keeps_graph};"
                for i in self.program.instructions
            )
            digest = hashlib.blake2b(shape.encode(), digest_size=8).hexdigest()
        return RankStep(ranks, any_trains=self.trains, mean=mean, digest=digest, parts=self.parts)


def agreed(
    proposals: Sequence[Proposal],
    index: int,
    names: Sequence[int],
    *,
    gather: GatherOption,
    batches: Sequence[int] | None = None,
    split: str = "replicate",
    prompts: tuple[SharedPrompt, ...] = (),
    shape: ModelShape | None = None,
    stages: Sequence[Stage] = (),
    strict: bool = False,
) -> Agreement:
    """Compute the step that all ranks run.

    Args:
        proposals: by rank.
        names: by rank, its number in messages.
        gather: as in `Config`; "" if weights are not sharded. If weights are gathered for each
            microbatch, programs need one common shape.
        batches: number of the batch, by rank. Ranks with one batch count once. None: all differ.
        prompts: prompts that ranks may exchange.
        shape: shape of the model, for prices of exchanges.
        stages: stages of the pipeline, if there are several.
        strict: whether to refuse a step on stages that exceeds the memory budget.

    Raises RankError, which names the rank, if a rank cannot run the step or makes another call.
    """
    _check_calls(proposals, names)
    if not any(proposal.trainable for proposal in proposals):
        raise UnsupportedError(
            "no parameter that these rollouts run requires a gradient, on any rank (text runs no "
            "encoder of images); unfreeze some, or use policy.score for log-probs alone."
        )
    sample = next((p.sample for p in proposals if p.sample is not None), None)
    if batches is not None:
        check_same_batches([p.contents for p in proposals], names, batches)
    statistics = joined([p.statistics for p in proposals], names, batches)
    if batches is not None:
        index = sorted(set(batches)).index(batches[index])
        firsts = group_leaders(batches)
        proposals, names = [proposals[n] for n in firsts], [names[n] for n in firsts]
    schedule = _schedule(gather, names, [proposal.offer for proposal in proposals])
    sizes, staged = [proposal.sizes for proposal in proposals], None
    if sizes[0]:
        staged = choose_size(sizes, stages, proposals[0].budget_bytes, strict=strict)
        schedule = replace(schedule, programs=staged.programs)
    splitting = None
    if prompts:
        exchanging, splitting = _split(proposals, names, gather, split, prompts, shape, schedule)
        schedule = exchanging or schedule
    _check_coupling(proposals)
    digests = [p.groups for p in proposals if p.groups is not None and len(p.groups)]
    groups = len(np.unique(np.concatenate(digests))) if digests else 0
    return Agreement(
        program=schedule.programs[index],
        gathering=schedule.gathering,
        counts=Denominators(
            tokens=float(sum(proposal.trained_tokens for proposal in proposals)),
            rollouts=float(sum(proposal.rollouts for proposal in proposals)),
            groups=float(groups),
        ),
        trains=any(proposal.trains for proposal in proposals),
        sample=sample,
        parts=tuple(p.gathered for p in proposals if p.gathered is not None),
        splitting=splitting,
        prompts=prompts if splitting is not None and splitting.taken == "exchange" else (),
        statistics=statistics,
        staged=staged,
        encoders=_encoders(schedule, proposals),
    )


def _encoders(schedule: "_Schedule", proposals: Sequence[Proposal]) -> CommonEncoders | None:
    """Encoder runs of all batches; None if no rank waits for those of another batch."""
    outline = next((p.outline for p in proposals if p.outline is not None), None)
    if outline is None or not schedule.lockstep or len(proposals) == 1:
        return None
    return CommonEncoders.of(
        schedule.programs,
        schedule.media,
        trains=any(p.trains_encoder for p in proposals),
        idle=outline.medium(),
    )


def _check_calls(proposals: Sequence[Proposal], names: Sequence[int]) -> None:
    """Raises RankError if a rank cannot run the step, or if ranks make different calls."""
    refused = [n for n, proposal in enumerate(proposals) if proposal.error is not None]
    if refused:
        first = refused[0]
        others = f" (and {len(refused) - 1} other ranks)" if len(refused) > 1 else ""
        raise RankError(
            f"rank {names[first]}{others} cannot run this step, so no rank does, and gradients are "
            f"unchanged: {proposals[first].error} Fix it there, then repeat the step on all ranks."
        )
    calls = {proposal.call: names[n] for n, proposal in reversed(list(enumerate(proposals)))}
    if len(calls) > 1:
        found = "; ".join(f"rank {rank}: {call}" for call, rank in calls.items())
        raise RankError(
            f"the ranks make different calls: {found}. Every rank must make the same calls of its "
            "policy in the same order, with the same options; a rank without rollouts passes "
            "RolloutBatch([])."
        )
    scales = [p.scale for p in proposals if p.scale is not None]
    if not all(alike([scale], scales[:1]) for scale in scales):
        found = ", ".join(f"rank {rank} by {s:.6g}" for rank, s in zip(names, scales, strict=True))
        raise RankError(
            f"the ranks scale one loss differently: {found}. Its gradients are sums over all "
            "ranks, so pass the same scale on each. The scales of a function may differ: its "
            "gradients are means over ranks."
        )
    _check_held(proposals, names)


def _check_held(proposals: Sequence[Proposal], names: Sequence[int]) -> None:
    """Raises RankError if ranks with the same stage hold or train different parameters."""
    firsts: dict[int, tuple[int, Held]] = {}
    for rank, proposal in zip(names, proposals, strict=True):
        held = proposal.held
        if held is None:
            continue
        first, other = firsts.setdefault(held.stage, (rank, held))
        no_step = "so no rank runs this step, and gradients are unchanged."
        if held.parameters != other.parameters:
            raise RankError(
                f"ranks {first} and {rank} hold different parameters: names, dtypes or sizes "
                f"differ, {no_step} Make the same model on both."
            )
        if held.trained != other.trained:
            raise RankError(
                f"ranks {first} and {rank} train different parameters ({other.count} and "
                f"{held.count}, whose gradients are summed over ranks), {no_step} Set "
                "requires_grad equally on both; if you choose parameters at random, use the same "
                "seed."
            )


@dataclass(frozen=True)
class _Schedule:
    """Programs of all ranks, and how often weights are gathered."""

    programs: Sequence[Program]
    """Programs by rank; of one common shape if ranks run in lockstep."""
    gathering: Choice[Gather] | None
    cost: float
    """The predicted cost of the step."""
    media: Sequence[tuple[PlannedMedium, ...]]
    """Planned media by rank."""

    @property
    def lockstep(self) -> bool:
        return self.gathering is not None and self.gathering.taken == "microbatch"


def _schedule(gather: GatherOption, names: Sequence[int], offers: Sequence[Offer]) -> _Schedule:
    """The cheaper schedule of those that gather weights once a step or for each microbatch.
    Arguments as in `agreed`."""
    programs, held = [offer.program for offer in offers], [offer.held for offer in offers]
    aligned: Sequence[Program] = ()
    if gather and gather != "step":
        aligned = align(programs, [offer.tokens for offer in offers])
    gathering = choose_gathering(gather, aligned, held, names) if gather else None
    cost = step_cost(gathering, aligned, held)
    lockstep = gathering is not None and gathering.taken == "microbatch"
    media = [offer.media for offer in offers]
    return _Schedule(aligned if lockstep else programs, gathering, cost, media)


def _split(
    proposals: Sequence[Proposal],
    names: Sequence[int],
    gather: GatherOption,
    asked: str,
    prompts: Sequence[SharedPrompt],
    shape: ModelShape | None,
    replicated: _Schedule,
) -> tuple[_Schedule | None, Choice[Split]]:
    """Whether prompts are exchanged, and the schedule for that case.

    replicated: the schedule in which every rank computes common prompts.
    """
    offers: list[Offer] = []
    for rank, proposal in zip(names, proposals, strict=True):
        if not isinstance(proposal.exchanged, Offer):
            reason = f"rank {rank} cannot exchange prompts: {proposal.exchanged}"
            return None, Choice("replicate", reason)
        offers.append(proposal.exchanged)
    if len({bool(offer.program.scores) for offer in offers}) > 1:
        reason = "with prompts exchanged, the loss would need two passes on some ranks alone"
        return None, Choice("replicate", reason)
    schedule = _schedule(gather, names, offers)
    held = [offer.held for offer in offers]
    link = link_cost(prompts, shape, held)
    splitting = choose_split(asked, replicated.cost, schedule.cost + link)
    return (schedule if splitting.taken == "exchange" else None), splitting


def _check_coupling(proposals: Sequence[Proposal]) -> None:
    """Raises ConfigError if coupled rollouts are on several ranks."""
    couples = max((p.couples for p in proposals), key=("", "groups", "batch").index)
    there = [p.groups for p in proposals if p.groups is not None and len(p.groups)]
    if couples == "batch" and len(there) > 1:
        raise ConfigError(
            f"the loss couples rollouts of different groups, and {len(there)} ranks have rollouts, "
            "whose log-probs are not gathered. Set across_ranks = True in the Loss to gather them. "
            "A function as the loss is averaged over the ranks instead."
        )
    if couples == "groups":
        every = np.concatenate([np.zeros(0, np.uint64), *there])
        split = len(every) - len(np.unique(every))
        if split:
            raise ConfigError(
                f"the loss couples the rollouts of a group, and {split} of the groups have "
                "rollouts on several ranks. Put each group on one rank with forkpoint.place(..., "
                "whole_groups=True), or set across_ranks = True in the Loss."
            )


def coupled(loss: Loss | None, batch: RolloutBatch) -> Coupling:
    """Which rollouts must be on one rank, because the loss couples them."""
    if loss is None or is_own(loss) or loss.decomposition != "joint" or loss.across_ranks:
        return ""
    coupling = coupling_of(loss, batch)
    if len(np.unique(coupling)) == len(coupling):
        return ""
    pairs = np.unique(np.stack([coupling, batch.group_index]), axis=1)
    return "groups" if pairs.shape[1] == len(np.unique(coupling)) else "batch"


def group_digests(batch: RolloutBatch) -> NDArray[np.uint64]:
    """A digest of each group of a batch, the same on every rank.

    A group is identified by its id. Without ids, rollouts with equal prompts are a group, as in
    `RolloutBatch.group_index`.
    """
    _, firsts = np.unique(batch.group_index, return_index=True)
    found, prompts = np.zeros(len(firsts), np.uint64), batch.prompt_lengths
    for number, first in enumerate(firsts):
        name = batch.group_ids[first]
        if name is not None:
            content = b"id " + name.encode(errors="surrogatepass")
        else:
            begin = int(batch.offsets[first])
            content = b"prompt " + batch.content(begin, begin + int(prompts[first]))
        digest = hashlib.blake2b(content, digest_size=8).digest()
        found[number] = np.frombuffer(digest, np.uint64)[0]
    return found


def least_budget(proposals: Sequence[Proposal]) -> int | None:
    """The smallest memory budget of the ranks; None if there is none, or if all are equal."""
    if any(proposal.error is not None for proposal in proposals):
        return None
    budgets = {proposal.budget_bytes for proposal in proposals}
    return min(b for b in budgets if b is not None) if len(budgets) > 1 else None


def common_calibration(proposals: Sequence[Proposal]) -> Calibration | None:
    """The first rank's calibration; None if there is none, or if all are equal."""
    if any(proposal.error is not None for proposal in proposals):
        return None
    every = [proposal.calibration for proposal in proposals]
    if all(each == every[0] for each in every):
        return None
    return next(each for each in every if each is not None)
