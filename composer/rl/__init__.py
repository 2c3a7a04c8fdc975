"""Reinforcement learning: advantage, loss, packing, buffer, trainer."""
