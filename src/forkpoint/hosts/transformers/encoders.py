"""Encoders of images and video of multimodal models, and positions of tokens in rollouts with
media."""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.utils.generic import is_flash_attention_requested
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_window_index

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.calls import CallContext
from forkpoint.hosts.entry import Encoder
from forkpoint.hosts.modules import every_module, plain_class
from forkpoint.hosts.refusals import check_code
from forkpoint.hosts.transformers.families import Family, family_of
from forkpoint.hosts.transformers.multimodal import deep_layers, idle_modules
from forkpoint.hosts.transformers.refusals import TOKENWISE_CODE
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.fields import host_values, short
from forkpoint.rollouts.media import KINDS, Media, ShownMedia
from forkpoint.tree.forest import IntArray


class TransformersEncoder(Encoder):
    """The encoders of a model of transformers. A language model has none."""

    def __init__(self, core: Any) -> None:
        self.core: Any = core
        self.family: Family = family_of(core)

    @property
    def modules(self) -> Collection[nn.Module]:
        return idle_modules(self.core)

    def check(self) -> None:
        """Refuse modules that have not been shown exact.

        The encoder's code is not changed. Calls may have one medium or several, so no module may
        mix the media of a call.
        """
        encoder, allowed = self.modules, ("transformers.models.", *TOKENWISE_CODE)
        for name, module in every_module(self.core):
            if module not in encoder:
                continue
            check_code(name, module, allowed, "Use transformers' modules without changes.")
            if module.training and isinstance(module, _BatchNorm):
                raise UnsupportedError(
                    f"{name} is a {type(module).__name__} in training mode, which mixes the images "
                    f"of a call. Call {name}.eval()."
                )

    def check_batch(self, batch: RolloutBatch) -> None:
        name, family = plain_class(self.core).__name__, self.family
        for medium in batch.media:
            if medium.kind not in family.kinds:
                why = "text alone"
                if family.kinds:
                    why = f"text and media of kind {' and '.join(map(repr, family.kinds))}"
                elif family.bidirectional:
                    why = "text alone: tokens of an image attend to each other in both directions"
                raise UnsupportedError(
                    f"the rollouts have media of kind {medium.kind!r}, and {name} has been shown "
                    f"exact for {why}. Leave these rollouts out, or train them by ordinary steps."
                )
            if medium.is_absent:
                raise UnsupportedError(
                    f"{medium!r} was read without its pixels, for planning. Read the rollouts with "
                    "pixels=True."
                )
            features = self._features(medium.kind)
            strange = sorted(medium.inputs.keys() - _arguments(features) - self._of_positions())
            if strange:
                raise UnsupportedError(
                    f"{medium!r} has the input {strange[0]!r}, which {name} does not take for "
                    f"media of kind {medium.kind!r}. Leave it out."
                )
            needed = _arguments(features, needed=True)
            if family.axes:
                needed |= {f"{medium.kind}_grid_thw"}
            missing = sorted(needed - medium.inputs.keys())
            if missing:
                raise UnsupportedError(
                    f"{medium!r} lacks the input {missing[0]!r}, which {name} needs for media "
                    f"of kind {medium.kind!r}. Give the inputs as the model's processor makes them."
                )
            single = sorted(n for n, x in medium.inputs.items() if not len(x.shape))
            if single:
                raise UnsupportedError(
                    f"{medium!r} has the input {single[0]!r} without dimensions. Give an array of "
                    "one entry, as the model's processor makes it."
                )
            if family.axes:
                self._check_grid(medium)
            if not medium.is_finite:
                raise UnsupportedError(
                    f"{medium!r} has inputs that are NaN or infinite, which make every gradient "
                    "NaN. Leave its rollouts out, or process the image again."
                )
        if family.axes and batch.media_of is not None:
            _check_neighbours(batch, batch.media_of)

    def encode(self, media: Sequence[Media]) -> tuple[tuple[Tensor, ...], ...]:
        """Encode media of one kind by one call of the model's own get_image_features. Returns
        features [R, C] for each medium of R tokens.

        The first features of a medium replace embeddings. Others, if any, are added after the first
        blocks.
        """
        kind, device = media[0].kind, next(self.core.parameters()).device
        encoder = self._features(kind)
        names = _arguments(encoder)
        parts = _inputs_of(media, names, device)
        every_input = (item for medium in media for item in medium.inputs.items())
        grids = [torch.as_tensor(x).cpu() for n, x in every_input if n.endswith("_grid_thw")]
        given = {n: x[0] if len(x) == 1 else torch.cat(x) for n, x in parts.items()}
        if grids:
            lengths = _lengths_on_host(self.core, torch.cat(grids), device)
            given |= {f"{kind}_{name}": x for name, x in lengths.items()}
        with _naming(media):
            found = encoder(**given, return_dict=True)
        # Newer versions of transformers return a tensor for each row of a grid.
        every = (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))
        counts = [len(_flat(every[0]))]
        if len(media) > 1:
            rows = iter(found.pooler_output)
            counts = [sum(len(x) for x in islice(rows, len(grid))) for grid in grids]
        for medium, count in zip(media, counts, strict=True):
            if count != medium.tokens:
                raise UnsupportedError(
                    f"{medium!r} stands for {medium.tokens} tokens, and "
                    f"{plain_class(self.core).__name__} gives {count} features for it. Give the "
                    f"inputs of one {kind}, as the model's processor makes them."
                )
        # Copies, because fully_shard warns of views.
        pieces = ([x.clone() for x in _flat(each).split(counts)] for each in every)
        return tuple(zip(*pieces, strict=True))

    def decoder_inputs(self, ids_1T: Tensor, context: CallContext) -> dict[str, Any]:
        """The decoder's inputs, with features of media at the tokens that stand for them."""
        features, rows = context.state.cache.media, context.inputs.media
        if features is None:
            return {"input_ids": ids_1T}
        embeds_1TC = features.anchored(self.core.get_input_embeddings()(ids_1T))
        if rows is None:
            return {"inputs_embeds": embeds_1TC}
        first, *deep = (x.to(embeds_1TC.dtype) for x in features.read(rows))
        read_1TC = embeds_1TC.index_copy(1, rows.places, first[None])
        found: dict[str, Any] = {"inputs_embeds": read_1TC}
        if deep:
            there_1T = torch.zeros_like(ids_1T, dtype=torch.bool).index_fill(1, rows.places, True)
            found |= {"visual_pos_masks": there_1T, "deepstack_visual_embeds": deep}
        return found

    def positions(self, batch: RolloutBatch) -> IntArray | None:
        """Positions of tokens, int64 [4, T]: in the rollout, and in time, height and width by the
        model's own get_rope_index. None if the model has only the first.

        get_rope_index is called once for each distinct prefix up to the last medium, because text
        follows.
        """
        if not self.family.axes:
            return None
        place = np.arange(batch.logical_tokens) - np.repeat(batch.offsets[:-1], batch.lengths)
        axes_4T = np.broadcast_to(place, (4, len(place))).copy()
        assert batch.media_of is not None
        alike: dict[tuple[bytes, tuple[Media, ...]], list[int]] = {}
        for n, (begin, end) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
            (seen,) = np.nonzero(batch.media_of[begin:end] >= 0)
            if len(seen):
                until = begin + seen[-1] + 1
                key = batch.token_ids[begin:until].tobytes(), batch[n].media
                alike.setdefault(key, []).append(n)
        for members in alike.values():
            longest = max(members, key=lambda n: int(batch.lengths[n]))
            found_3L = _rope_index(self.core, batch, longest)
            for n in members:
                begin, end = batch.offsets[n], batch.offsets[n + 1]
                axes_4T[1:, begin:end] = found_3L[:, : end - begin]
        return axes_4T

    def shape(self) -> EncoderShape | None:
        """Sizes of an encoder, read from its modules; None if the family's media are refused."""
        if not self.family.kinds:
            return None
        core, encoder = self.core, self.modules
        modules = [module for _, module in every_module(core) if module in encoder]
        linear = [module for module in modules if isinstance(module, nn.Linear)]
        products = [*linear, *(m for m in modules if isinstance(m, nn.modules.conv._ConvNd))]
        blocks = max((m for m in modules if isinstance(m, nn.ModuleList)), key=len)
        inside = (module for module in blocks[0].modules() if isinstance(module, nn.Linear))
        hidden = next(inside).in_features
        # Inputs and outputs of products, and those of two norms in a block.
        kept = sum(m.in_features + m.out_features for m in linear) + 4 * hidden * len(blocks)
        if any(vars(m).get("gradient_checkpointing") and m.training for m in modules):
            kept = hidden * len(blocks) + kept // len(blocks)
        outer, vision = core.config, core.config.vision_config
        merged = getattr(vision, "spatial_merge_size", None) or getattr(
            outer, "spatial_merge_size", None
        )
        merged = merged or getattr(outer, "scale_factor", None)
        merged = merged or 1 / getattr(outer, "downsample_ratio", 1)
        return EncoderShape(
            parameters=sum(m.weight.numel() for m in products),
            layers=len(blocks),
            hidden=hidden,
            patches_per_token=float(merged) ** 2,
            feature_elements=outer.get_text_config().hidden_size * (1 + deep_layers(core)),
            activation_elements=kept,
            dtype_bytes=next(core.parameters()).element_size(),
            trained=any(p.requires_grad for m in modules for p in m.parameters(recurse=False)),
            # Inputs are the patches of all images in one sequence, and attention is computed within
            # each image.
            together=self.family.axes,
        )

    def sample(self, media: Sequence[Media]) -> Media:
        """The smallest of these media; for an image with a grid of patches, its first few
        patches."""
        medium = min(media, key=lambda medium: medium.tokens)
        if not self.family.axes:
            return medium
        size = int(self.core.config.vision_config.spatial_merge_size)
        height = width = 2 * size
        if medium.tokens <= 4:  # one frame
            height, width = medium.array(f"{medium.kind}_grid_thw")[0, 1:].tolist()
        patches = height * width
        inputs: dict[str, Any] = {}
        for name, value in medium.inputs.items():
            grid = _tensor(value, torch.device("cpu")).new_tensor([[1, height, width]])
            inputs[name] = grid if name.endswith("_grid_thw") else value[:patches]
        return Media(medium.kind, inputs, patches // size**2)

    def stock_arguments(self, shown: ShownMedia, *, encodes: bool) -> dict[str, Tensor]:
        """Arguments of a forward of the model for the media of its rows. Without `encodes`, as on
        later stages of a pipeline, only those for positions."""
        names, device = _arguments(type(self.core).forward), next(self.core.parameters()).device
        of_positions = self._of_positions()
        found: dict[str, list[Tensor]] = {}
        for row in shown.rows:
            for name, parts in _inputs_of(row, None if encodes else of_positions, device).items():
                found.setdefault(name, []).append(_joined(parts, self.family.joined))
        given = {name: _joined(parts, 0) for name, parts in found.items()}
        if "mm_token_type_ids" in names:
            given["mm_token_type_ids"] = torch.as_tensor(shown.types_NL, device=device)
        return given

    def _features(self, kind: str) -> Callable[..., Any]:
        return getattr(self.core.base_model, f"get_{kind}_features")

    def _of_positions(self) -> frozenset[str]:
        """Inputs of media that positions depend on."""
        if not self.family.axes:
            return frozenset()
        return _arguments(self.core.base_model.get_rope_index) - _OF_TOKENS

    def _check_grid(self, medium: Media) -> None:
        """Refuse a grid of patches that does not fit the patches and tokens of a medium."""
        size = int(self.core.config.vision_config.spatial_merge_size)
        name = f"{medium.kind}_grid_thw"
        grid = medium.array(name)
        pixels = medium.inputs[min(_arguments(self._features(medium.kind), needed=True))]
        fits = grid.dtype.name in ("int32", "int64") and grid.ndim == 2 and grid.shape[1] == 3
        fits = fits and bool((grid > 0).all()) and not (grid[:, 1:] % size).any()
        patches = sum(t * h * w for t, h, w in grid.tolist()) if fits else 0
        if not fits or patches != medium.tokens * size**2:
            raise UnsupportedError(
                f"{medium!r} has {name} {grid.dtype} {short(grid.tolist())}; it takes int64 "
                f"[[time, height, width]], height and width multiples of {size}, whose product is "
                f"{medium.tokens * size**2}: {size**2} patches for each token."
            )
        if pixels.shape[0] != patches:
            raise UnsupportedError(
                f"{medium!r} has {pixels.shape[0]} rows of pixels, and {name} has {patches} "
                "patches. Give the inputs of one medium, as the model's processor makes them."
            )


def _flat(features: Tensor | Sequence[Tensor]) -> Tensor:
    parts = (features,) if isinstance(features, Tensor) else features
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in parts])


def _lengths_on_host(core: Any, grid_N3: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Lengths of sequences in the attention of an encoder of patches, on the CPU.

    Attention converts them to a list in every block, which would wait for the device.
    FlashAttention reads them on the device.
    """
    visual = core.base_model.visual
    if is_flash_attention_requested(visual.config):
        return {}
    found = {"cu_seqlens": get_vision_cu_seqlens(grid_N3)}
    if hasattr(visual, "window_size"):
        sizes = visual.spatial_merge_size, visual.window_size, visual.patch_size
        order, found["cu_window_seqlens"] = get_vision_window_index(grid_N3, *sizes)
        found["window_index"] = order.to(device)
    return found


def _rope_index(core: Any, batch: RolloutBatch, index: int) -> IntArray:
    rollout = batch[index]
    assert rollout.media_types is not None
    find = core.base_model.get_rope_index
    parts = _inputs_of(rollout.media, _arguments(find), torch.device("cpu"))
    given = {name: torch.cat(each) for name, each in parts.items()}
    ids = torch.as_tensor(rollout.token_ids.astype(np.int64))[None]
    types = torch.as_tensor(rollout.media_types.astype(np.int64))[None]
    try:
        return find(ids, mm_token_type_ids=types, **given)[0][:, 0].numpy()
    except (RuntimeError, StopIteration, IndexError, TypeError) as error:
        raise UnsupportedError(
            f"rollout {index} has tokens of images or video in an order for which the model's own "
            f"get_rope_index finds no positions ({type(error).__name__}: {error}). Give each "
            "medium's grid, and its tokens as the model's processor places them."
        ) from error


def _inputs_of(
    media: Sequence[Media], names: frozenset[str] | None, device: torch.device
) -> dict[str, list[Tensor]]:
    """Inputs of media by name; only those in `names` if given."""
    found: dict[str, list[Tensor]] = {}
    for medium in media:
        for name, value in medium.inputs.items():
            if names is None or name in names:
                found.setdefault(name, []).append(_tensor(value, device))
    return found


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate tensors. Smaller images are padded with zeros, as by processors."""
    shape = [max(sizes) for sizes in zip(*(x.shape for x in parts), strict=True)]
    padded = []
    for x in parts:
        shape[dim] = x.shape[dim]
        more = [m - n for m, n in zip(shape, x.shape, strict=True)]
        around = [n for each in reversed(more) for n in (0, each)]
        padded.append(nn.functional.pad(x, around) if any(around) else x)
    return torch.cat(padded, dim)


_OF_TOKENS = frozenset({"self", "input_ids", "mm_token_type_ids", "attention_mask"})
"""Arguments of get_rope_index that are no inputs of media."""


@cache
def _of_function(function: Callable[..., Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Names of a function's arguments, and of those without a default, without `self` and
    `kwargs`."""
    every = inspect.signature(function).parameters.values()
    named = [p for p in every if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    needed = (p.name for p in named if p.default is p.empty and p.name != "self")
    return frozenset(p.name for p in named), frozenset(needed)


def _arguments(function: Any, *, needed: bool = False) -> frozenset[str]:
    return _of_function(getattr(function, "__func__", function))[needed]


def _tensor(value: Any, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        # torch accepts only native byte order and no negative strides, and warns of read-only
        # arrays.
        value = host_values("A medium", "input", value)
        value = np.require(value, value.dtype.newbyteorder("="), ["C", "W"])
    return torch.as_tensor(value, device=device)


@contextmanager
def _naming(media: Sequence[Media]) -> Iterator[None]:
    """Raise UnsupportedError that names the media, if the model's code fails with their inputs.

    Errors of memory and communication, which are subclasses of RuntimeError, are raised unchanged.
    """
    try:
        yield
    except Exception as error:
        if type(error) not in (RuntimeError, ValueError, TypeError, IndexError):
            raise
        shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in media[0].inputs.items())
        others = f" and {len(media) - 1} more" if len(media) > 1 else ""
        raise UnsupportedError(
            f"the model's own code fails for {media[0]!r} of shapes {shapes}{others} "
            f"({type(error).__name__}: {' '.join(str(error)[:300].split())}). Give the inputs of "
            f"one {media[0].kind} in each, as the model's processor makes them."
        ) from error


def _check_neighbours(batch: RolloutBatch, media_of: IntArray) -> None:
    """Refuse two media of one kind without a token between them, because models treat them as
    one."""
    kinds = np.array([KINDS.index(m.kind) + 1 for m in batch.media] + [0])
    kind_T = kinds[media_of]
    same = (kind_T[1:] > 0) & (kind_T[1:] == kind_T[:-1])
    rows = batch.media_row
    assert rows is not None
    follows = (media_of[1:] == media_of[:-1]) & (rows[1:] == rows[:-1] + 1)
    same[batch.offsets[1:-1] - 1] = False
    (where,) = np.nonzero(same & ~follows)
    if len(where):
        rollout = int(np.searchsorted(batch.offsets, where[0], side="right")) - 1
        raise UnsupportedError(
            f"rollout {rollout} has two {KINDS[kind_T[where[0]] - 1]}s without a token between "
            f"them, at position {where[0] + 1 - batch.offsets[rollout]}, and the model takes them "
            "for one. Put text between them, as the model's processor does."
        )
