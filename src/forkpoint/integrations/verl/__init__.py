"""verl's engines, with every shared token computed once.

`VERL_ENGINE_VENDOR=forkpoint` has verl's workers take them in place of its own FSDP engine; verl
finds them by the entry point `verl.plugins` of this package. docs/start/verl.md says how.
"""
