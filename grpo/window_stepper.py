"""One optimiser step over a window of micro-batches, whose gradient is that of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl._utils import logger as torchrl_logger
from torchrl._utils import timeit
from torchrl.trainers.trainers import MixedPrecisionOptimizationStepper

from .normalisation import StepScales

if TYPE_CHECKING:
    from .trainer import GRPOTrainer


class WeightedMeans:
    """Means of detached scalars as (sum, weight), on the device until they are asked for."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor | float] = {}

    def add(self, name: str, value: Tensor, weight: Tensor | float = 1.0) -> None:
        """Count `value`, reduced to its mean, `weight` times."""
        value = value.detach().to(torch.float64).mean()
        self.sums[name] = self.sums.get(name, 0.0) + value * weight
        self.weights[name] = self.weights.get(name, 0.0) + weight

    def update(self, other: WeightedMeans) -> None:
        """Add all that another holds."""
        for name, total in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + total
            self.weights[name] = self.weights.get(name, 0.0) + other.weights[name]

    def means(self, group: dist.ProcessGroup | None = None) -> TensorDict | None:
        """The means over all ranks of `group`, in fp32; None of nothing."""
        if not self.sums:
            return None
        names = sorted(self.sums)
        sums = torch.stack([self.sums[name] for name in names])
        weights = torch.stack([torch.as_tensor(self.weights[name]).to(sums) for name in names])
        if group is not None:
            both = torch.stack([sums, weights])
            dist.all_reduce(both, group=group)
            sums, weights = both
        weights = torch.where(weights == 0, 1.0, weights)  # no token counted: the sum is 0
        return TensorDict(dict(zip(names, (sums / weights).float(), strict=True)))


class WindowStepper(MixedPrecisionOptimizationStepper):
    """One optimiser step over a window of micro-batches, in mixed precision where asked for."""

    def state_dict(self) -> dict[str, Any]:
        """All but the optimiser's: a trainer's checkpoint has that as a component of its own."""
        state = super().state_dict()
        del state["optimizer"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict({"optimizer": self.optimizer.state_dict()} | state_dict)

    def step(self, trainer: GRPOTrainer, sub_batch: TensorDictBase) -> TensorDictBase:
        """One optimiser step on one micro-batch."""
        return self.step_window(trainer, [sub_batch]).means()

    def step_window(
        self, trainer: GRPOTrainer, micro_batches: Sequence[TensorDictBase]
    ) -> WeightedMeans:
        """One optimiser step on all of `micro_batches`; its metrics, none if it was skipped."""
        means = WeightedMeans()
        scales, weights = trainer._scales_and_weights(micro_batches)
        finite = True
        for index, (batch, scale, weight) in enumerate(
            zip(micro_batches, scales, weights, strict=True)
        ):
            last = index == len(micro_batches) - 1
            with trainer._gradient_sync(last):
                autocast = torch.amp.autocast(
                    self.device_type, enabled=self.mixed_precision, dtype=self.autocast_dtype
                )
                with timeit("loss forward"), autocast:
                    output = trainer.compute_loss(batch, normaliser=scale.normaliser)
                    loss, terms = self._scaled_loss(output, scale, len(micro_batches))
                with timeit("backward"):
                    self.scaler.scale(loss).backward()
            finite = finite & loss.detach().isfinite().all()
            for name, term in terms.items():
                means.add(name, term)
                means.weights[name] = 1.0  # a sum over the window, counted once
            for name, metric in output.items():
                if name not in terms and metric is not None:
                    means.add(name, metric, weight)
        with timeit("optimizer"):
            grad_norm = self._finish(finite, trainer.process_group)
        if grad_norm is None:
            return WeightedMeans()
        means.add("grad_norm", torch.as_tensor(grad_norm))
        return means

    @staticmethod
    def _scaled_loss(
        output: TensorDictBase, scale: StepScales | None, micro_batches: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The part of the step's loss in this micro-batch: its sum, and term by term."""
        terms = {
            name: term
            for name, term in output.items()
            if name.startswith("loss") and term is not None
        }
        if not terms:
            raise RuntimeError(
                "The loss module returned no 'loss_*' entry; the entries of its output that are to "
                f"be minimised must start with 'loss', got {sorted(output.keys())}."
            )
        for name, term in terms.items():
            if term.numel() != 1:
                raise ValueError(
                    f"{name} has shape {tuple(term.shape)}, and a step needs scalars: construct "
                    "the loss with reduction='mean' and aggregation 'token_mean' or 'prompt_mean'"
                )
            if scale.normaliser is None:
                terms[name] = term / micro_batches
            elif scale.kl is not None and name.startswith("loss_kl"):
                terms[name] = term * scale.kl.to(term.dtype)
        return sum(terms.values()), terms

    def _finish(self, finite: Tensor, group: dist.ProcessGroup | None) -> float | None:
        """Clip and step; the gradient's norm, or None if the step was skipped."""
        self.scaler.unscale_(self.optimizer)
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        if hasattr(norm, "full_tensor"):  # of sharded parameters
            norm = norm.full_tensor()
        verdict = torch.stack([finite.to(norm), norm.isfinite().to(norm)])
        if group is not None:  # all ranks skip the step or none
            dist.all_reduce(verdict, dist.ReduceOp.MIN, group=group)
        loss_is_finite, norm_is_finite, norm_value = torch.cat([verdict, norm[None]]).tolist()
        step = bool(loss_is_finite and norm_is_finite)
        if step:
            if self.clip_norm is not None:
                nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)
            self.scaler.step(self.optimizer)
            self._optimizer_step_count += 1
        else:
            self._skipped_nonfinite_steps += 1
            what = "gradient norm" if loss_is_finite else "loss"
            torchrl_logger.warning(
                f"The {what} is not finite: this optimizer step is skipped "
                f"({self._skipped_nonfinite_steps} so far)."
            )
        if self._use_scaler and gradients:
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm_value if step else None
