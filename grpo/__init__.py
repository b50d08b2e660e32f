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

__all__ = [
    "DAPO",
    "CISPOLoss",
    "CISPOLossOutput",
    "DAPOLossOutput",
    "GRPOLoss",
    "GRPOLossOutput",
    "LLMLossOutput",
]
