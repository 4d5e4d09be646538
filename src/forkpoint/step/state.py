"""Per-model state that policies share: calibration, budgets, host memory, sample checks."""

from pathlib import Path

from forkpoint.config import AUTO, Config
from forkpoint.device import device_name
from forkpoint.engine.memory import MemoryBudgets
from forkpoint.engine.staging import Staging, staging_for
from forkpoint.hosts.host import ModelHost
from forkpoint.plan import Plan
from forkpoint.plan.pricing.calibration import Calibration, find_calibration
from forkpoint.step.calibrate.automatic import measured
from forkpoint.step.results import Ratios
from forkpoint.step.self_check import SampleChecks


class ModelState:
    """State of one model that its policies share and that outlives steps."""

    def __init__(self) -> None:
        self.staging: Staging | None = None
        """Host memory for offloaded activations and prefix caches, made when first needed."""
        self.found: dict[str, Calibration | None] = {}
        """The calibration of this device and model, or None, by attention kernel in `Config`; a
        missing key was not looked for."""
        self.agreed: set[str] = set()
        """Attention kernels for which all ranks have the same calibration."""
        self.checked_reduction: bool = False
        """Whether the reduction of gradients over ranks was checked."""
        self.checks: SampleChecks = SampleChecks()
        self.budgets: MemoryBudgets = MemoryBudgets()
        self.looked_at_prompts: bool = False
        """Whether the first batch was checked for prompts that prevent sharing."""
        self.ratios: Ratios = Ratios()

    def calibration(self, host: ModelHost, config: Config) -> Calibration | None:
        """The calibration that prices plans, by `Config.calibration`; None: nominal rates.

        By default, the result of `forkpoint calibrate` for this device and model, or else an
        automatic measurement, made once.
        """
        if config.calibration is None:
            return None
        # If the compiler has failed, plans are still priced with compiled blocks.
        compiled = host.compiles or host.compiling.failure is not None
        device, kernel = device_name(host.device), config.attention_kernel
        if config.calibration != AUTO:
            found = Calibration.load(Path(config.calibration))
            found.check_device(device, compiled=compiled)
            return found
        if kernel not in self.found:
            self.found[kernel] = find_calibration(
                device, host.shape, compiled=compiled
            ) or measured(host, kernel, compiled=compiled)
        return self.found[kernel]

    def to_agree(self, host: ModelHost, config: Config) -> Calibration | None:
        """This rank's calibration, until ranks have agreed on one."""
        if config.calibration != AUTO or config.attention_kernel in self.agreed:
            return None
        return self.calibration(host, config)

    def use_calibration(self, config: Config, calibration: Calibration | None) -> None:
        """Use this calibration instead of one that was found or measured."""
        self.found[config.attention_kernel] = calibration

    def staging_of(
        self, plan: Plan, host: ModelHost, config: Config, *, training: bool = True
    ) -> Staging | None:
        """Host memory for a plan; None if it stores nothing there.

        `training`: whether backwards run. Otherwise no activations are kept.
        """
        offloads = training and any(m.activations == "offload" for m in plan.microbatches)
        if not offloads and not plan.host_layers:
            return None
        self.staging = self.staging or staging_for(host.device)
        self.staging.limit_bytes = self.budgets.of_host(host, config)
        self.staging.folder = None if config.offload_folder is None else Path(config.offload_folder)
        return self.staging
