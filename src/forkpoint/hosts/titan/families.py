"""The models of torchtitan 0.2 that have been shown exact."""

from dataclasses import dataclass

from torch import Tensor, nn

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.modules import plain_class

PACKAGE = "torchtitan."
"""Where modules of torchtitan come from."""


@dataclass(frozen=True)
class Family:
    """A class of models."""

    module: str
    """The file that defines it."""
    name: str
    rope: str
    """The model's buffer that its blocks take, with a row for each position."""

    @property
    def package(self) -> str:
        """The package of its modules."""
        return self.module.rpartition(".model.")[0] + "."

    def rope_of(self, model: nn.Module) -> Tensor:
        return model.get_buffer(self.rope)


FAMILIES = (
    Family("torchtitan.models.llama3.model.model", "Transformer", "freqs_cis"),
    Family("torchtitan.models.qwen3.model.model", "Qwen3Model", "rope_cache"),
    Family("torchtitan.models.deepseek_v3.model.model", "DeepSeekV3Model", "freqs_cis"),
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
