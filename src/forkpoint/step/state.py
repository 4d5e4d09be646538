"""Per-model state that policies share: calibration, budgets, host memory, sample checks."""

from pathlib import Path

from forkpoint.config import Config
from forkpoint.device import device_name
from forkpoint.engine.host import Host
from forkpoint.engine.memory import MemoryBudgets
from forkpoint.engine.staging import Staging, staging_for
from forkpoint.plan import Plan
from forkpoint.plan.pricing.calibration import Calibration, find_calibration
from forkpoint.step.results import Ratios
from forkpoint.step.self_check import SampleChecks


class ModelState:
    """State of one model that outlives its steps, shared by policies of other options."""

    def __init__(self) -> None:
        self.staging: Staging | None = None
        """Host memory for offloaded microbatches, made when first needed."""
        self.found: tuple[Calibration | None] | None = None
        """The calibration of this device and model, once it was looked for."""
        self.checked_reduction: bool = False
        """Whether the reduction of gradients over ranks was checked."""
        self.checks: SampleChecks = SampleChecks()
        self.budgets: MemoryBudgets = MemoryBudgets()
        self.ratios: Ratios = Ratios()

    def calibration(self, host: Host, config: Config) -> Calibration | None:
        """The calibration that the configuration names, else that of this device and model."""
        # If the compiler has failed, prices of compiled blocks still choose plans.
        compiled = host.compiles or host.compiling.failure is not None
        device = device_name(host.device)
        if config.calibration is not None:
            found = Calibration.load(Path(config.calibration))
            found.check_device(device, compiled=compiled)
            return found
        if self.found is None:
            self.found = (find_calibration(device, host.shape, compiled=compiled),)
        return self.found[0]

    def staging_of(self, plan: Plan, host: Host, config: Config) -> Staging | None:
        """Host memory for a plan's offloaded microbatches; None if it has none."""
        if not any(microbatch.activations == "offload" for microbatch in plan.microbatches):
            return None
        self.staging = self.staging or staging_for(host.device)
        self.staging.limit_bytes = config.host_memory_bytes
        return self.staging
