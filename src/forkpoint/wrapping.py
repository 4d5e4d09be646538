"""The way in: a policy of a model."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.hosts.libraries import cut_model, host_of
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import short


def wrap(
    model: nn.Module, config: Config | None = None, *, mesh: DeviceMesh | None = None
) -> Policy:
    """Make a policy of a model, which stays usable as before.

    Args:
        model: a supported transformers model, already initialised and on its device, or a peft
            model around one; or a critic, a token classifier of a supported family with one label.
            torch's fully_shard or DistributedDataParallel may hold it, and transformers may have
            split it over ranks (DistributedConfig).
        config: how batches are planned and run.
        mesh: the device mesh that the model was split over, with names of its dimensions. A
            dimension "cp" (or "sp") splits the sequences of one batch over its ranks: context
            parallelism. A dimension "pp" cuts the model into stages of a pipeline: the parameters
            of other stages are dropped (see `cut`). Of other dimensions nothing is read that the
            model does not say itself; what the two say is compared.

    Raises:
        UnsupportedError: the model has not been shown exact; the message names what is in the way.
        ConfigError: the configuration is no Config, or has sizes that no model can have, or the
            mesh is not that of the model.

    Collective where several ranks hold the model. Unless it is cut into stages, the model is
    modified only during a step and restored afterwards.
    """
    config = Config() if config is None else config
    if not isinstance(config, Config):
        raise ConfigError(
            f"config is {short(config)} of type {type(config).__name__}; it takes a "
            "forkpoint.Config, such as Config(sharing='tree'), or None."
        )
    host = host_of(model, compile_blocks=config.compile_blocks, mesh=mesh)
    return Policy(host, config)


def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a model into stages of a pipeline: drop the parameters of other stages than this rank's.

    For models that fully_shard or DistributedDataParallel is to hold afterwards, over another
    dimension of the mesh. `wrap` with the same mesh comes last; by itself it cuts a model that
    nothing else holds.

    Args:
        model: a whole transformers model, or a peft model around one.
        mesh: with a dimension "pp", whose ranks are the stages.

    Raises:
        ConfigError: the mesh has no dimension "pp".
        PlanError: the model has fewer layers than there are stages.
        UnsupportedError: stages of the model have not been shown exact, or ranks hold it already.
    """
    cut_model(model, mesh)
