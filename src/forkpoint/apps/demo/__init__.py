"""Program of `forkpoint demo`: a small GRPO loop with a task, a sampler and a trainer."""
