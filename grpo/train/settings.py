"""Everything a run can be told; the command line has an option for each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from .errors import InputError, first_line


class LossName(str, Enum):
    """Losses of this package."""

    grpo = "grpo"
    dapo = "dapo"
    cispo = "cispo"


class Semantics(str, Enum):
    """See the README: as TorchRL has it, or with its faults mended."""

    torchrl = "torchrl"
    corrected = "corrected"


class Aggregation(str, Enum):
    """How token losses become one number."""

    token_mean = "token_mean"
    prompt_mean = "prompt_mean"


class RolloutName(str, Enum):
    """What samples the responses."""

    transformers = "transformers"
    vllm = "vllm"


class DType(str, Enum):
    """Of the forward passes; weights and optimiser stay in fp32."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class LoggerName(str, Enum):
    """Where metrics go, besides metrics.csv."""

    csv = "csv"
    tensorboard = "tensorboard"
    wandb = "wandb"


@dataclass
class Settings:
    """One run."""

    model: str | None
    task: str
    data: Path | None
    reward: str
    loss: LossName
    semantics: Semantics
    aggregation: Aggregation
    clip_low: float
    clip_high: float
    kl_to_ref: float | None
    kl_to_inference: float | None
    kl_mask_threshold: float | None
    entropy_coeff: float | None
    iterations: int
    prompts: int
    group_size: int
    candidates: int | None
    keep_return_bounds: tuple[float, float] | None
    max_new_tokens: int
    rollout: RolloutName
    importance_cap: float | None
    fused_lm_head: bool
    dtype: DType
    device: str
    mini_batch: int
    gradient_accumulation: int
    epochs: int
    learning_rate: float
    clip_norm: float | None
    warm_up_steps: int | None
    seed: int
    threads: int
    output: Path
    save_every: int
    logger: LoggerName
    ray: bool
    ranks: int = 1

    def save(self, path: Path) -> None:
        """As JSON, for `--resume`."""
        path.write_text(json.dumps(asdict(self), indent=2, default=str) + "\n")

    @classmethod
    def load(cls, path: Path) -> Settings:
        """What `save` wrote. Raises InputError for anything else."""
        types = {
            "data": Path,
            "output": Path,
            "loss": LossName,
            "semantics": Semantics,
            "aggregation": Aggregation,
            "rollout": RolloutName,
            "dtype": DType,
            "logger": LoggerName,
            "keep_return_bounds": tuple,
        }
        try:
            values = json.loads(path.read_text())
            return cls(
                **{
                    name: types[name](value) if name in types and value is not None else value
                    for name, value in values.items()
                }
            )
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path}: damaged, or of another version of this program: {first_line(error)}"
            ) from None
