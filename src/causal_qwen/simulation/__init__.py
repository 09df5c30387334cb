"""Simulation: the causal engine without a backbone, on features whose structure is known."""

from causal_qwen.simulation.engine import CausalEngine
from causal_qwen.simulation.experiments import Simulation, simulate
from causal_qwen.simulation.structure import Individuals, StructuralModel

__all__ = ["CausalEngine", "Individuals", "Simulation", "StructuralModel", "simulate"]
