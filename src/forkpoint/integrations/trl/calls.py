"""Calls of a model by TRL's losses: their rows, and objects that replace the model.

TRL's losses get log-probs by `model(..., labels=labels, fused_lm_head=True)`. A StandIn takes this
call. It records the rows of the call, or answers it with results that forkpoint has computed or
computes now.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.topology import unwrapped
from forkpoint.hosts.transformers.families import MULTIMODAL
from forkpoint.hosts.transformers.refusals import supported_model
from forkpoint.integrations.images import INPUTS, media_of_rows, media_parts
from forkpoint.parallel.topology import Places
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import Media

IGNORED = -100
"""Label of tokens without a log-prob."""
REMEDIES = {
    "shift_labels": "Sequences are split by forkpoint itself: leave out what shifts labels.",
    "position_ids": "Rows without padding are not supported: set padding_free=False.",
}
"""Arguments that TRL may pass to the model, with remedies for refused ones."""


@dataclass(frozen=True, eq=False)
class Rows:
    """One call of a model: B rows of W columns.

    input_ids: int64 [B, W].
    present: bool [B, W]; False for padding.
    scored: bool [B, W]; True for tokens whose log-probs are requested.
    routed: whether a load-balancing loss of routers is requested.
    media: images of each row; empty where no row has any.
    types: int64 [B, W], 1 for tokens of images, 0 for others; None for calls without images. If TRL
        has cut an image of Qwen-VL, there are no images, types are 0, and its tokens are text.
    """

    input_ids: Tensor
    present: Tensor
    scored: Tensor
    routed: bool = False
    media: tuple[tuple[Media, ...], ...] = ()
    types: Tensor | None = None

    @classmethod
    def of_call(cls, arguments: Mapping[str, Any], model: nn.Module | None) -> "Rows":
        """The rows of a call of a model with these arguments.

        Raises UnsupportedError for arguments that change what is computed, and for labels that are
        not the tokens themselves.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        input_ids, labels = given.pop("input_ids"), given.pop("labels")
        mask = given.pop("attention_mask", None)
        routed = bool(given.pop("output_router_logits", False))
        types = given.pop("mm_token_type_ids", None)
        media: tuple[tuple[Media, ...], ...] = ()
        if "pixel_values" in given:
            # Models without grids also count tokens around an image.
            if types is None or INPUTS["image"][1] not in given:
                types = (input_ids == _image_token(model)).long()
            media = media_of_rows("image", media_parts("image", given), types == 1)
        # TRL's head uses no cache.
        for name in sorted(given.keys() - {"fused_lm_head", "use_cache"}):
            remedy = REMEDIES.get(name, "Leave out what makes the trainer pass it.")
            raise UnsupportedError(
                f"the trainer gives its model {name}, which forkpoint's trainers do not take: "
                f"input_ids, attention_mask and labels are allowed. {remedy}"
            )
        present = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
        scored = labels != IGNORED
        scored[:, 0] = False  # no token comes before it
        if media and types is not None:
            scored &= types == 0  # TRL's masks hide images in results of tools
        if bool((scored & (labels != input_ids)).any()):
            raise UnsupportedError(
                "the trainer's labels are other tokens than its input_ids; forkpoint computes "
                "log-probs of the input_ids only. Use labels that equal input_ids or -100."
            )
        return cls(input_ids, present, scored, routed, media, types)

    def of(self, chosen: Tensor) -> "Rows":
        """Some of the rows, int64 [n], without router losses."""
        return Rows(
            self.input_ids[chosen],
            self.present[chosen],
            self.scored[chosen],
            media=tuple(self.media[row] for row in chosen.tolist()) if self.media else (),
            types=None if self.types is None else self.types[chosen],
        )

    def with_prompts(self) -> "Rows":
        """The same rows, with log-probs of their prompts too."""
        scored = self.present & (self.present.cumsum(1) > 1)
        if self.types is not None:
            scored &= self.types == 0
        return replace(self, scored=scored)


def _image_token(model: nn.Module | None) -> int:
    """Id of the placeholder token of a model's images.

    Raises UnsupportedError for models with unknown images.
    """
    assert model is not None
    core = supported_model(unwrapped(model))
    family = MULTIMODAL.get(core.config.model_type)
    if family is None or "image" not in family.kinds:
        known = [name for name, one in MULTIMODAL.items() if "image" in one.kinds]
        raise UnsupportedError(
            f"the trainer gives images to a {type(core).__name__}; forkpoint's trainers take "
            f"those of {', '.join(known)}. Leave the images out, or use the trainer of TRL itself."
        )
    return core.config.image_token_id


class PackedRows:
    """Rows of several calls as one batch, with conversions of values to and from the shapes of the
    calls.

    Ranks of context parallelism have the same batch: the rows of all of them, in the order of the
    ranks. Per-token values have two lengths: T for the batch, t for the rows of this rank.
    """

    def __init__(self, calls: Sequence[Rows], temperature: float, places: Places) -> None:
        """Pack the rows of all calls. Collective over context-parallel ranks.

        Args:
            calls: the rows of each call.
            temperature: the temperature of all rows.
            places: context-parallel ranks of the model.

        Raises:
            UnsupportedError: the first token of a row is scored.
            RolloutError: a row has padding between tokens.
        """
        self.calls: tuple[Rows, ...] = tuple(calls)
        self.ranks: int = places.size
        """Number of ranks whose rows are in the batch."""
        self._places: Places = places
        self.width: int = max(rows.input_ids.shape[1] for rows in calls)
        own = torch.cat(
            [
                self.widened(torch.stack([rows.input_ids, rows.present.long(), rows.scored.long()]))
                for rows in calls
            ],
            1,
        )
        every = _of_ranks(own, places)
        self.width = every[0].shape[2]
        ids, present, scored = torch.cat(every, 1)
        present, scored = present.bool(), scored.bool()
        first = present & (present.cumsum(1) == 1)
        if bool((first & scored).any()):
            raise UnsupportedError(
                "a row has a trained token and no token before it: its prompt is empty, so that "
                "TRL predicts the token from padding. Give every prompt at least one token, such "
                "as the tokenizer's bos_token."
            )
        self.batch: RolloutBatch = RolloutBatch.from_padded(
            ids, present, scored & present, temperatures=temperature
        )
        cells = np.flatnonzero(self.batch.layout.mask())
        begin = sum(x.shape[1] for x in every[: places.rank]) * self.width
        here = np.searchsorted(cells, (begin, begin + own.shape[1] * self.width))
        self.tokens: slice = slice(*here.tolist())
        """Slice of the tokens of this rank in the flat tokens of the batch."""
        self.cells: Tensor = torch.from_numpy(cells[self.tokens] - begin).to(ids.device)
        """Positions of these tokens in this rank's flattened [N, width]: int64 [t]."""
        if any(rows.types is not None for rows in calls):
            none = [() for _ in range(len(self.batch))]
            media = [row for rows in calls for row in (rows.media or none[: len(rows.input_ids)])]
            types = [
                torch.zeros_like(rows.input_ids) if rows.types is None else rows.types
                for rows in calls
            ]
            self.batch = self.batch.with_media(media, self.flat(types))

    def widened(self, values: Tensor) -> Tensor:
        """Pad [..., W] on the right with zeros, to the width of the widest call."""
        return torch.nn.functional.pad(values, (0, self.width - values.shape[-1]))

    def flat(self, values: Sequence[Tensor]) -> Tensor:
        """Values of the tokens from values of the calls, each [B, W]: [t]."""
        return torch.cat([self.widened(x) for x in values]).flatten()[self.cells]

    def joined(self, values_t: Tensor) -> Tensor:
        """Values of the tokens of all ranks, without a graph: [T]. Collective."""
        values_T = values_t.new_zeros(len(self.batch.layout.columns))
        values_T[self.tokens] = values_t.detach()
        return self._places.summed(values_T)

    def own(self, per_token: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Select this rank's values [t] from values of all tokens of the batch [T]."""
        return {name: values_T[self.tokens] for name, values_T in per_token.items()}

    def unpacked(self, values_t: Tensor) -> list[Tensor]:
        """Convert values of tokens, with their graph, to the shapes of TRL's outputs.

        Each is [B, W - 1]. Column j belongs to the token of column j + 1, and is 0 if that token is
        not scored.
        """
        sizes = [len(rows.input_ids) for rows in self.calls]
        every = values_t.new_zeros(sum(sizes) * self.width).index_put((self.cells,), values_t)
        parts = every.view(-1, self.width).split(sizes)
        return [
            part[:, 1 : rows.input_ids.shape[1]]
            for part, rows in zip(parts, self.calls, strict=True)
        ]


def _of_ranks(own: Tensor, places: Places) -> list[Tensor]:
    """Gather tensors [3, N, W] from context-parallel ranks. N may differ, and W is padded with
    zeros to the largest. Collective."""
    sizes = torch.stack(places.all_of(torch.tensor(own.shape[1:], device=own.device)))
    rows, width = sizes.amax(0).tolist()
    fill = (0, width - own.shape[2], 0, rows - own.shape[1])
    every = places.all_of(torch.nn.functional.pad(own, fill))
    return [x[:, :count] for x, count in zip(every, sizes[:, 0].tolist(), strict=True)]


@dataclass(eq=False)
class HeadAnswer:
    """Outputs of a fused head with TRL's names: [B, W - 1] each, or None if not requested."""

    log_probs: Tensor
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    aux_loss: Tensor | None = None


class Captured(BaseException):
    """Carries the rows of the first call. It is not an Exception, so handlers in a loss do not
    catch it."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows: Rows = rows


class StandIn:
    """Reads attributes from a model, and answers calls with `fused_lm_head=True` itself."""

    def __init__(
        self,
        model: nn.Module | None,
        answer: Callable[[dict[str, Any]], HeadAnswer],
        *,
        passes_on: bool = False,
    ) -> None:
        """`answer`: computes the result of a call from its arguments. `passes_on`: whether other
        calls without gradients go to the model; otherwise they are refused."""
        self.model: nn.Module | None = model
        self._answer, self._passes_on = answer, passes_on

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not set yet
            raise AttributeError(name)
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args and kwargs.get("fused_lm_head"):
            return self._answer(kwargs)
        if self._passes_on and self.model is not None and not torch.is_grad_enabled():
            return self.model(*args, **kwargs)
        raise UnsupportedError(
            "the trainer's loss calls its model for other outputs than log-probs (arguments "
            f"{', '.join([*map(repr, map(type, args)), *kwargs]) or 'none'}). Use a loss of "
            "log-probs and entropies, or the trainer of TRL."
        )


def capturing(model: nn.Module | None) -> StandIn:
    """A stand-in that raises Captured at the first call, which ends the loss."""

    def answer(arguments: dict[str, Any]) -> HeadAnswer:
        raise Captured(Rows.of_call(arguments, model))

    return StandIn(model, answer)


def answering(model: nn.Module | None, rows: Rows, found: HeadAnswer) -> StandIn:
    """A stand-in that returns computed results for the captured rows."""

    def answer(arguments: dict[str, Any]) -> HeadAnswer:
        asked, known = arguments["input_ids"], rows.input_ids
        if asked.shape != known.shape:
            raise UnsupportedError(
                f"the trainer's loss calls its model with rows of shape {tuple(asked.shape)} after "
                f"rows of shape {tuple(known.shape)}; all calls of a loss must have the same rows. "
                "Use a loss with one call, or the trainer of TRL."
            )
        return found

    return StandIn(model, answer)


def scoring(model: nn.Module | None, score: Callable[[Rows], HeadAnswer]) -> StandIn:
    """A stand-in that computes the rows when it is called."""
    return StandIn(model, lambda given: score(Rows.of_call(given, model)), passes_on=True)
