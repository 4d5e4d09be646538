"""The output head's weights as they lie on this rank: all rows, or some of the vocabulary."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from forkpoint.errors import UnsupportedError
from forkpoint.ops.head import VocabularyShard


def check_local_head(head: nn.Linear) -> None:
    """A head split over ranks is split by rows, or not at all.

    Raises UnsupportedError where it is split otherwise.
    """
    weight = head.weight
    if isinstance(weight, DTensor):
        # Of two dimensions the last one is that of tensor parallelism.
        split = weight.placements[-1]
        if not (split.is_replicate() or split.is_shard(0)):
            raise UnsupportedError(
                f"the output head's weight is split over ranks as {split}, along the hidden size. "
                "Log-probs have been shown exact where it is split by rows of the vocabulary. Load "
                "the model with 'embedding_rowwise' (or 'colwise_gather_output' for lm_head) in "
                "tp_plan."
            )


def local_head(head: nn.Linear) -> tuple[Tensor, Tensor | None, VocabularyShard | None]:
    """Weight and bias here, and which rows of the vocabulary they are; None where they are all.

    Called where the weights are gathered over data ranks. The tensors pass gradients on to the
    head's parameters.
    """
    weight, bias = head.weight, head.bias
    if not isinstance(weight, DTensor):
        return weight, bias, None
    assert weight.device_mesh.ndim == 1, "the head's weight is sharded over data ranks"
    shard = None
    if weight.placements != (Replicate(),):
        assert weight.placements == (Shard(0),), weight.placements
        mesh = weight.device_mesh
        rows = -(-weight.shape[0] // mesh.size())  # as torch.chunk, by which DTensor splits
        start = min(weight.shape[0], rows * mesh.get_local_rank())
        shard = VocabularyShard(mesh.get_group(), start)
    if isinstance(bias, DTensor):
        assert bias.placements == weight.placements, (bias.placements, weight.placements)
        bias = bias.to_local()
    elif bias is not None and shard is not None:
        raise UnsupportedError(
            "the output head's weight is split over ranks and its bias is not, so that gradients "
            "of the bias would stay parts. Split both by one rule of tp_plan for lm_head."
        )
    return weight.to_local(), bias, shard
