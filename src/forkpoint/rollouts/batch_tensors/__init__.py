"""Batches from tensors: padded, split into prompts and completions, or jagged. Imports no torch.

The readers validate whole tensors at once, with the checks and messages of a single rollout.
"""

from forkpoint.rollouts.batch_tensors.columns import Columns as Columns
from forkpoint.rollouts.batch_tensors.constructors import FromTensors as FromTensors
from forkpoint.rollouts.batch_tensors.identifiers import check_unique as check_unique
from forkpoint.rollouts.batch_tensors.identifiers import fill_ids as fill_ids
from forkpoint.rollouts.batch_tensors.identifiers import group_index as group_index
from forkpoint.rollouts.batch_tensors.identifiers import group_of as group_of
from forkpoint.rollouts.batch_tensors.identifiers import prompt_lengths as prompt_lengths
from forkpoint.rollouts.batch_tensors.layout import PaddedLayout as PaddedLayout
