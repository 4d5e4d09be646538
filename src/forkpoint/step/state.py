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
    """State of one model that outlives its steps, shared by policies of other options."""

    def __init__(self) -> None:
        self.staging: Staging | None = None
        """ModelHost memory for offloaded activations and prefix caches, made when first needed."""
        self.found: dict[str, Calibration | None] = {}
        """By the attention kernel asked for: the calibration of this device and model, once it was
        looked for."""
        self.agreed: set[str] = set()
        """Kernels for which all ranks have the same calibration."""
        self.checked_reduction: bool = False
        """Whether the reduction of gradients over ranks was checked."""
        self.checks: SampleChecks = SampleChecks()
        self.budgets: MemoryBudgets = MemoryBudgets()
        self.looked_at_prompts: bool = False
        """Whether the first batch was looked at for prompts that keep it from sharing."""
        self.ratios: Ratios = Ratios()

    def calibration(self, host: ModelHost, config: Config) -> Calibration | None:
        """The prices of plans, as the configuration says; None: nominal rates.

        By default it is what `forkpoint calibrate` wrote for this device and model, else what is
        measured here, once.
        """
        if config.calibration is None:
            return None
        # If the compiler has failed, prices of compiled blocks still choose plans.
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
        """The calibration that was found or measured here, until ranks have agreed on it."""
        if config.calibration != AUTO or config.attention_kernel in self.agreed:
            return None
        return self.calibration(host, config)

    def use_calibration(self, config: Config, calibration: Calibration | None) -> None:
        """Price by this in place of what is found or measured."""
        self.found[config.attention_kernel] = calibration

    def staging_of(
        self, plan: Plan, host: ModelHost, config: Config, *, training: bool = True
    ) -> Staging | None:
        """Host memory for what a plan has there; None if it has nothing there.

        `training`: whether backwards follow, without which no activations are kept.
        """
        offloads = training and any(m.activations == "offload" for m in plan.microbatches)
        if not offloads and not plan.host_layers:
            return None
        self.staging = self.staging or staging_for(host.device)
        self.staging.limit_bytes = config.host_memory_bytes
        self.staging.folder = None if config.offload_folder is None else Path(config.offload_folder)
        return self.staging
