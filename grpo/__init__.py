"""Drop-in replacements for TorchRL's GRPO losses, advantages and trainer."""
