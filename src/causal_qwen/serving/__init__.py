"""Serving: one model behind HTTP, in OpenAI's shapes and in ours; requests share the decoder's batch. Or in vLLM."""
