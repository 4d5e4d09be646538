"""A library of one model in plain torch, and its entry: the least that a further library needs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.attention import attend
from forkpoint.hosts.calls import CallContext
from forkpoint.hosts.entry import Entry, HeldStage, Library, Stock
from forkpoint.hosts.heads import LogprobHead, ModelHead
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import ShownMedia

VOCAB, HIDDEN, HEADS, LAYERS, POSITIONS = 61, 32, 4, 2, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, context: CallContext | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        if context is not None:
            return self.out(attend(context, self, q, k, v).flatten(-2))
        heads_first = (each.transpose(1, 2) for each in (q, k, v))
        found = scaled_dot_product_attention(*heads_first, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, HIDDEN))

    def forward(self, x: Tensor, context: CallContext | None = None) -> Tensor:
        x = x + self.attention(self.norm(x), context=context)
        return x + self.mlp(x)


class Toy(nn.Module):
    """A decoder and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(POSITIONS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def hidden(self, ids: Tensor, places: Tensor, context: CallContext | None = None) -> Tensor:
        x = self.tokens(ids) + self.places(places)
        for block in self.blocks:
            x = block(x, context=context)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids, torch.arange(ids.shape[1], device=ids.device)))


# The library
# ------------------------------------------------------------


class ToyStock(Stock):
    def __init__(self, model: nn.Module) -> None:
        self.model: nn.Module = model

    def logits(
        self, ids_NL: Tensor, keep: Tensor | None = None, shown: ShownMedia | None = None
    ) -> Tensor:
        found = self.model(ids_NL)
        return found if keep is None else found[:, keep]

    def run_decoder_once(
        self, ids_NL: Tensor, changes: Changes, shown: ShownMedia | None = None
    ) -> None:
        """Each call runs it again."""


class ToyEntry(Entry):
    context_argument: str = "context"

    def __init__(self, model: nn.Module, splits: Sequence[Any] = ()) -> None:
        if type(model) is not Toy:
            raise UnsupportedError(f"{type(model).__name__} is no toy.")
        self.core: Any = model
        self.head: ModelHead = LogprobHead(lambda: self.core.head, dict, ())
        self.stock: Stock = ToyStock(model)
        self.stage: HeldStage = HeldStage(LAYERS)

    @property
    def decoder(self) -> nn.Module:
        return self.core

    @property
    def embeddings(self) -> nn.Module:
        return self.core.tokens

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.core.blocks]

    @property
    def final_norms(self) -> Sequence[nn.Module]:
        return (self.core.norm,)

    @property
    def checkpointed(self) -> bool:
        return False

    def configs(self) -> list[Any]:
        return []

    def shape(self) -> ModelShape:
        sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 64}
        sizes |= {"num_attention_heads": HEADS, "vocab_size": VOCAB}
        return ModelShape.from_config(sizes, dtype_bytes=self.core.head.weight.element_size())

    def check_batch(self, batch: RolloutBatch) -> None:
        if batch.lengths.max(initial=0) > POSITIONS:
            raise UnsupportedError(f"a rollout has more than {POSITIONS} tokens. Cut it.")

    def attach(self, changes: Changes) -> None:
        """Attention looks for a microbatch by itself."""

    def run(self, ids_1T: Tensor | None, positions_1T: Tensor | None, context: Any) -> Any:
        return self.core(ids_1T, positions_1T, context=context)

    def decode(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.core.hidden(*args, **kwargs)


def unsplit(model: nn.Module, splits: Sequence[Any]) -> None:
    assert not splits, "no ranks split a toy"


TOYS = Library(ToyEntry, ToyStock, lambda _: None, unsplit)
