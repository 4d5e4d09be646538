"""verl's engines with forkpoint's steps, which compute every shared token once.

With `VERL_ENGINE_VENDOR=forkpoint`, verl's workers use these engines instead of its FSDP engine.
verl finds them through the entry point `verl.plugins` of this package. See docs/start/verl.md.
"""
