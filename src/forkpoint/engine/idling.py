"""The microbatch that a rank runs where other ranks have one and it has none."""

from functools import cache

import torch

from forkpoint.config import Config
from forkpoint.engine.microbatches import MicrobatchInputs, prepare_microbatches
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.plan import Plan
from forkpoint.plan.planner import make_plan
from forkpoint.rollouts.batch import Rollout, RolloutBatch


@cache
def idle_inputs(device: torch.device, multiple: int) -> tuple[Plan, MicrobatchInputs]:
    """A microbatch of one token that trains on nothing, for slots in which a rank has none.

    `multiple`: of what the host takes lengths, to which the token is padded.
    """
    batch = RolloutBatch([Rollout([0, 0], [0, 0], 0.0)])
    capabilities = Capabilities(length_multiple=multiple)
    config = Config(sharing="none", boundary="within")
    plan = make_plan(batch, config=config, capabilities=capabilities)
    (inputs,) = prepare_microbatches(plan, batch, device)
    return plan, inputs
