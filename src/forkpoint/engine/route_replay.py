"""Experts that a batch says its tokens were sent to, while a plan runs.

A sampler that ran the same weights may have sent a token to other experts than training does:
scores that are nearly equal are told apart by rounding. Steps then send it where the sampler did
(routing replay: arXiv 2510.11370). The choice alone is held. The weights of the chosen experts are
computed from the live router's scores, by the model's own code, so that gradients reach the router.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forkpoint.device import on_device
from forkpoint.engine.feature import Feature
from forkpoint.engine.microbatches import MicrobatchInputs, microbatch_tokens
from forkpoint.errors import UnsupportedError
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import BACKWARD, Instruction
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree import token_steps


@dataclass(frozen=True, eq=False)
class ReplayedRoutes:
    """How routers would have chosen by themselves, where a batch has `routed_experts`.

    A token counts once for every rollout through it, in each layer in which its experts were given
    and its router ran. Layers are those that have a router.
    """

    decisions_L: Tensor
    """int64 [L]: choices that were given."""
    elsewhere_L: Tensor
    """int64 [L]: those among them for which the router itself would have chosen other experts."""

    @property
    def elsewhere(self) -> float:
        """The share of given choices for which routers would have chosen other experts."""
        decisions = int(self.decisions_L.sum())
        return int(self.elsewhere_L.sum()) / decisions if decisions else 0.0


class RouteReplay(Feature):
    """The experts given for the tokens of one step, microbatch by microbatch."""

    def __init__(self, plan: Plan, batch: RolloutBatch, device: torch.device) -> None:
        """`batch` has `routed_experts`."""
        assert batch.routed_experts is not None
        self._plan, self._batch, self._device = plan, batch, device
        self._given_TLK = batch.routed_experts
        layers = self._given_TLK.shape[1]
        self._decisions_L: Tensor = torch.zeros(layers, dtype=torch.int64, device=device)
        self._elsewhere_L: Tensor = torch.zeros_like(self._decisions_L)
        self._places: dict[int, tuple[Tensor, Tensor]] = {}
        self._here: tuple[Tensor, Tensor] | None = None
        self._counts = False
        self._counted: set[int] = set()
        self._open: int | None = None

    @property
    def routes(self) -> ReplayedRoutes:
        """Of all that has run."""
        return ReplayedRoutes(self._decisions_L, self._elsewhere_L)

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """Hold routers to the microbatch's experts; a backward may run its blocks again."""
        self._counts, self._open = False, None
        if instruction.idle:
            self._here = None
            return
        index = inputs.microbatch.index
        self._here = self._of(inputs)
        if instruction.operation != BACKWARD and instruction.is_noted:
            self._counts, self._open = index not in self._counted, index

    def after_forward(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        if self._open is not None:
            self._counted.add(self._open)
        self._counts, self._open = False, None

    def _of(self, inputs: MicrobatchInputs) -> tuple[Tensor, Tensor]:
        """By place: experts, int64 [T, L, K], -1 where the router chooses; and how many rollouts go
        through its token, int64 [T], 0 for padding."""
        microbatch = inputs.microbatch
        if microbatch.index not in self._places:
            token_T, real_T = microbatch_tokens(self._plan, self._batch, microbatch)
            segment_T, _ = token_steps(self._plan.forest, microbatch)
            given_TLK = np.where(real_T[:, None, None], self._given_TLK[token_T], -1)
            rollouts_T = np.where(real_T, self._plan.forest.multiplicity[segment_T], 0)
            self._places[microbatch.index] = (
                on_device(given_TLK.astype(np.int16), self._device),
                on_device(rollouts_T, self._device),
            )
        return self._places[microbatch.index]

    def choose(
        self, layer: int, name: str, scores_TE: Tensor, values_Tk: Tensor, own_Tk: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Values and indices [T, k] in place of those that the router of a layer has chosen.

        Raises UnsupportedError where the router gets other tokens than the microbatch has.
        """
        if self._here is None:
            return values_Tk, own_Tk
        given_TLK, rollouts_T = self._here
        if scores_TE.dim() != 2 or len(scores_TE) != len(given_TLK):
            raise UnsupportedError(
                f"the router {name} chooses by scores of shape {tuple(scores_TE.shape)}, and the "
                f"microbatch has {len(given_TLK)} tokens, so that it cannot be held to "
                "routed_experts. Leave routed_experts out of the rollouts."
            )
        given_Tk = given_TLK[:, layer].to(own_Tk)
        known_T = given_Tk[:, 0] >= 0
        if self._counts:
            # The order among the k decides nothing.
            same_Tk = own_Tk.detach().sort(-1).values == given_Tk.sort(-1).values
            differs_T = known_T & ~same_Tk.all(-1)
            self._decisions_L[layer] += (known_T * rollouts_T).sum()
            self._elsewhere_L[layer] += (differs_T * rollouts_T).sum()
        held_Tk = torch.where(known_T[:, None], given_Tk, own_Tk)
        return scores_TE.gather(-1, held_Tk), held_Tk
