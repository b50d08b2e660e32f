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
]
