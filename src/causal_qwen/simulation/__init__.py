"""Simulation: the causal engine without a backbone, on features whose structure is known."""

from causal_qwen.simulation.experiments import Simulation, simulate
from causal_qwen.simulation.mechanism import Mechanism
from causal_qwen.simulation.structure import Individuals, StructuralModel

__all__ = ["Individuals", "Mechanism", "Simulation", "StructuralModel", "simulate"]
