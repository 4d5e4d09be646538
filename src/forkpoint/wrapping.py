"""Makes a policy of a model."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.hosts.libraries import cut_model, host_of
from forkpoint.parallel.call import RankGroup
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import short


def wrap(
    model: nn.Module, config: Config | None = None, *, mesh: DeviceMesh | None = None
) -> Policy:
    """Make a policy of a model. The model stays usable as before.

    Args:
        model: a model of transformers or torchtitan of a supported family, initialised and on its
            device, or a peft model around a model of transformers. A token classifier with one
            label is a critic. fully_shard or DistributedDataParallel of torch may hold the model,
            and transformers may have split it over ranks (DistributedConfig).
        config: options of planning and running. The default is Config().
        mesh: the device mesh of the model, with names of its dimensions. A dimension "cp" (or "sp")
            splits the sequences of one batch over its ranks (context parallelism). A dimension "pp"
            cuts the model into stages of a pipeline and drops the parameters of other stages (see
            `cut`). Other dimensions are only compared with the way ranks hold the model.

    Raises:
        UnsupportedError: the model has not been shown exact; the message names the reason.
        ConfigError: `config` is not a Config, its sizes do not fit the model, or the mesh is not
            the mesh of the model.
        PlanError: the mesh has more stages than the model has layers.
        RankError: another rank refused its part of the model or its configuration; the message
            names the reason.

    If several ranks hold the model, all of them must call `wrap`. A step modifies the model and
    restores it afterwards. Stages of a pipeline stay cut.
    """
    config = Config() if config is None else config
    if not isinstance(config, Config):
        raise ConfigError(
            f"config is {short(config)} of type {type(config).__name__}; it takes a "
            "forkpoint.Config, such as Config(sharing='tree'), or None."
        )
    host = host_of(model, compile_blocks=config.compile_blocks, mesh=mesh)
    # If a rank refuses its configuration, the others would wait for it in the first call.
    ranks = RankGroup(host.group.ranks)
    return ranks.each(lambda: Policy(host, config), tells=(Exception,))


def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a model into stages of a pipeline: drop the parameters of all other stages.

    Use it if fully_shard or DistributedDataParallel will hold the stages over another dimension of
    the mesh. Call `wrap` with the same mesh last. If neither holds the model, call only `wrap`,
    which cuts it.

    Args:
        model: a whole transformers model, or a peft model around one.
        mesh: device mesh with a dimension "pp". Its ranks are the stages.

    Raises:
        ConfigError: the mesh has no dimension "pp".
        PlanError: the model has fewer layers than there are stages.
        UnsupportedError: stages of the model have not been shown exact, or ranks already hold it.
    """
    cut_model(model, mesh)
