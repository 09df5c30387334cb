"""Fast paths of the One-vs-Rest head. Each has a readable oracle in `causal_qwen.losses` or `causal_qwen.heads`."""
