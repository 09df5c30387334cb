"""Serving: one model behind HTTP, in OpenAI's shapes and in ours; requests share a batch. Or in vLLM."""
