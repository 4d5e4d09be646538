"""The models of torchtitan that have been shown exact."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.modules import plain_class
from forkpoint.hosts.titan.versions import Version, Version03

PACKAGE = "torchtitan."
"""Where modules of torchtitan come from."""


@dataclass(frozen=True)
class Family:
    """A class of models."""

    module: str
    """The file that defines it."""
    name: str
    version: Version
    rope: str = ""
    """The model's buffer that its blocks take, with a row for each position; where attention has
    none itself."""

    @property
    def package(self) -> str:
        """The package of its modules."""
        return ".".join(self.module.split(".")[:3]) + "."


FAMILIES = (
    Family("torchtitan.models.llama3.model.model", "Transformer", Version(), "freqs_cis"),
    Family("torchtitan.models.qwen3.model.model", "Qwen3Model", Version(), "rope_cache"),
    Family("torchtitan.models.deepseek_v3.model.model", "DeepSeekV3Model", Version(), "freqs_cis"),
    Family("torchtitan.models.llama3.model", "Llama3Model", Version03()),
    Family("torchtitan.models.qwen3.model", "Qwen3Model", Version03()),
    Family("torchtitan.models.deepseek_v3.model", "DeepSeekV3Model", Version03()),
)


def is_titan(model: object) -> bool:
    """Whether a class of torchtitan is among those of a model."""
    return any(kind.__module__.startswith(PACKAGE) for kind in type(model).__mro__)


def family_of(model: nn.Module) -> Family:
    """The family of a model. Refuses classes that have not been shown exact."""
    kind = plain_class(model)
    for family in FAMILIES:
        if (family.module, family.name) == (kind.__module__, kind.__qualname__):
            return family
    raise UnsupportedError(
        f"{kind.__module__}.{kind.__qualname__} has not been shown exact; supported are "
        f"{', '.join(f'{f.module}.{f.name}' for f in FAMILIES)}, not subclasses of them."
    )


def sizes_of(model: nn.Module) -> Any:
    """The sizes of a model, under the names of torchtitan 0.2's arguments."""
    return family_of(model).version.sizes(model)


def blocks_of(model: Any) -> list[nn.Module]:
    """The blocks of a model, out of the wrappers that recompute their activations."""
    return [
        block._checkpoint_wrapped_module if isinstance(block, CheckpointWrapper) else block
        for block in model.layers.values()
    ]


def is_checkpointed(block: nn.Module) -> bool:
    """Whether torchtitan has put a block into torch's wrapper that recomputes its activations."""
    return isinstance(block, CheckpointWrapper)


def head_of(model: nn.Module) -> Any:
    """The head of a model; None on a stage of a pipeline that has none."""
    return getattr(model, family_of(model).version.head)
