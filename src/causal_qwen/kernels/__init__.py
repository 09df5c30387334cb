"""Fast paths of the One-vs-Rest head; their readable oracles are in `causal_qwen.losses` and `.heads`."""
