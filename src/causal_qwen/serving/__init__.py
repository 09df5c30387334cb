"""Serving: what answers requests with a model."""
