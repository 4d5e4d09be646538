"""Kinds of bad input and of set-ups that are not supported, each with the message that it gets.

test_bad_inputs.py provokes them, and test_refusals.py states of a model.
"""

from bad_inputs.files import FILES
from bad_inputs.kind import Kind
from bad_inputs.losses import LOSSES
from bad_inputs.model_files import MODEL_FILES
from bad_inputs.models import MODELS
from bad_inputs.options import OPTIONS
from bad_inputs.plans import KERNELS, PLANS
from bad_inputs.rollouts import ROLLOUTS
from bad_inputs.routers import ROUTERS
from bad_inputs.splits import SPLITS
from bad_inputs.states import STATES
from bad_inputs.tensors import TENSORS
from bad_inputs.traces import TRACES
from bad_inputs.trl_options import TRL
from bad_inputs.verl_options import VERL

TOPICS: dict[str, tuple[Kind, ...]] = {
    "Files of rollouts": FILES,
    "Rollouts and batches": ROLLOUTS,
    "Batches from tensors": TENSORS,
    "Options": OPTIONS,
    "Models on the command line": MODEL_FILES,
    "Models": MODELS,
    "Models split over ranks": SPLITS,
    "States of a model": STATES,
    "Losses": LOSSES,
    "Routers of mixtures of experts": ROUTERS,
    "Trainers of TRL": TRL,
    "Engines for verl": VERL,
    "Plans": PLANS,
    "Attention kernels": KERNELS,
    "Traces and folders of replays": TRACES,
}
KINDS: dict[str, Kind] = {kind.name: kind for kinds in TOPICS.values() for kind in kinds}

__all__ = ["KINDS", "TOPICS", "Kind"]
