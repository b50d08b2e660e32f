"""Drop-in replacements for TorchRL's GRPO losses, advantages and trainer."""

from grpo.mc_advantage import MCAdvantage
from grpo.ray_mc_advantage import RayMCAdvantage
from grpo.selector import MCAdvantageSelector

__all__ = ["MCAdvantage", "MCAdvantageSelector", "RayMCAdvantage"]
