"""Checks that refuse, by name, what has not been shown exact of a transformers model.

Rollouts may share a token only if the model computes for it what depends on the tokens before it
alone, and gradients arrive only where the code that runs is the family's own. These checks run
before a step: on code (`code`), hooks (`hooks`), parameters (`tensors`), positions and media
(`tokens`), and what holds in training (`training`). They refuse what they do not know.
"""

from forkpoint.hosts.refusals.code import check_adapters as check_adapters
from forkpoint.hosts.refusals.code import check_attention_function as check_attention_function
from forkpoint.hosts.refusals.code import check_blocks as check_blocks
from forkpoint.hosts.refusals.code import check_critic as check_critic
from forkpoint.hosts.refusals.code import check_functions as check_functions
from forkpoint.hosts.refusals.code import check_modules as check_modules
from forkpoint.hosts.refusals.hooks import check_hooks as check_hooks
from forkpoint.hosts.refusals.hooks import check_parameter_hooks as check_parameter_hooks
from forkpoint.hosts.refusals.tensors import check_derived_weights as check_derived_weights
from forkpoint.hosts.refusals.tensors import check_embeddings as check_embeddings
from forkpoint.hosts.refusals.tensors import check_parameters as check_parameters
from forkpoint.hosts.refusals.tensors import check_rotary_buffers as check_rotary_buffers
from forkpoint.hosts.refusals.tensors import plain_head as plain_head
from forkpoint.hosts.refusals.tokens import check_causal as check_causal
from forkpoint.hosts.refusals.tokens import check_media as check_media
from forkpoint.hosts.refusals.tokens import check_rope as check_rope
from forkpoint.hosts.refusals.training import check_checkpointing as check_checkpointing
from forkpoint.hosts.refusals.training import check_random as check_random
from forkpoint.hosts.refusals.training import check_routers as check_routers
from forkpoint.hosts.refusals.training import check_trainable as check_trainable
from forkpoint.hosts.refusals.training import checkpointed as checkpointed
