"""Drop-in replacements for TorchRL's GRPO losses, advantages and trainer."""

from .losses import (
    DAPO,
    CISPOLoss,
    CISPOLossOutput,
    DAPOLossOutput,
    GRPOLoss,
    GRPOLossOutput,
    LLMLossOutput,
)
from .mc_advantage import MCAdvantage
from .ray_mc_advantage import RayMCAdvantage
from .selector import MCAdvantageSelector
from .trainer import GRPOTrainer

__all__ = [
    "DAPO",
    "CISPOLoss",
    "CISPOLossOutput",
    "DAPOLossOutput",
    "GRPOLoss",
    "GRPOLossOutput",
    "GRPOTrainer",
    "LLMLossOutput",
    "MCAdvantage",
    "MCAdvantageSelector",
    "RayMCAdvantage",
]
