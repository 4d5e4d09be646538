"""Calls of torchtitan's layers in a step: its inner attention, and the argument they pass on.

Blocks take masks of attention and give them to the inner attention, whose class they look at: of
"flex" attention it is torch's BlockMask. The microbatch travels in that argument.
"""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

from forkpoint.hosts.attention import attend
from forkpoint.hosts.calls import CallContext, refuse_call

MASKS = "attention_masks"
"""The argument that layers pass on."""


class CarriedContext(CallContext, BlockMask):
    """A microbatch that torchtitan takes for a mask. It reads nothing of it."""

    def __init__(self, context: CallContext) -> None:
        vars(self).update(vars(context))


def attend_BLHD(
    module: nn.Module,
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKE: Tensor,
    *,
    attention_masks: object = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Forward of the inner attention in microbatches: [B, L, H, E].

    Under tensor parallelism it runs the heads of this rank, of DTensors.
    """
    if not isinstance(attention_masks, CallContext):
        refuse_call()
    q, k, v = (x.to_local() if isinstance(x, DTensor) else x for x in (q_BLHD, k_BLKD, v_BLKE))
    output = attend(attention_masks, module, q, k, v, scale=scale)
    if not isinstance(q_BLHD, DTensor):
        return output
    return DTensor.from_local(output, q_BLHD.device_mesh, q_BLHD.placements, run_check=False)


def attend_BHLD(
    module: nn.Module,
    q_BHLD: Tensor,
    k_BKLD: Tensor,
    v_BKLE: Tensor,
    *,
    block_mask: object = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Forward of the inner attention in microbatches: [B, H, L, E].

    Under tensor parallelism it runs the heads of this rank; some families give DTensors of these.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BHLD, k_BKLD, v_BKLE))
    return attend_BLHD(module, q, k, v, attention_masks=block_mask, scale=scale).transpose(1, 2)
