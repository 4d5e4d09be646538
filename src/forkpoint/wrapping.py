"""The way in: a policy of a model."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.hosts.libraries import host_of
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
            of other stages are dropped. Of other dimensions nothing is read that the model does not
            say itself; what the two say is compared.

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
