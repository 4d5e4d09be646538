"""Program of `forkpoint demo`: a small GRPO loop with a task, a sampler, a trainer and a plot."""
