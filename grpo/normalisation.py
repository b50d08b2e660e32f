"""What one optimiser step is divided by, however its batch is cut.

The mean of a step over tokens (or sequences) is sum_i loss_i / N with N counted over all
micro-batches of the step and all ranks. `count_tokens` counts a micro-batch as `GRPOLoss` will,
`step_scales` sums the counts and says what to hand to the loss of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.modules.llm import LLMWrapperBase

from grpo_kernels.policy_loss import eager

from .losses import GRPOLoss

PROMPT_TOKENS = ("tokens", "prompt")
ATTENTION_MASK = ("masks", "all_attention_mask")
ASSISTANT_MASK = ("masks", "all_assistant_mask")


class TokenCounts(NamedTuple):
    """Counts of one batch, or of a step: 0-d fp64 tensors."""

    trained: Tensor  # tokens of the objective
    valid: Tensor  # those and the ones that the KL-mask drops
    trained_rows: Tensor
    valid_rows: Tensor
    rows: Tensor
    positions: Tensor


class StepScales(NamedTuple):
    """How the loss of one micro-batch enters the step's."""

    normaliser: Tensor | None  # the loss's argument of that name
    kl: Tensor | None  # factor of the KL penalties where they do not follow the normaliser


def count_tokens(
    loss: GRPOLoss, batch: TensorDictBase, *, may_score: bool = True
) -> TokenCounts | None:
    """Counts of the tokens that `loss` trains on in `batch`: its mask and a finite sampling
    log-prob.

    Where the mask cannot be known without a forward pass of the actor (with a KL-mask, a loss mask
    in the batch, or an actor other than a TorchRL wrapper that reads tokens) it takes one without
    gradients, or is None if it may not.
    """
    mask = _mask_of_strategy(loss, batch)
    if mask is not None:
        trained = valid = mask & _sampling_log_probs(loss, batch).isfinite()
    elif may_score:
        trained, valid = _masks_by_scoring(loss, batch)
    else:
        return None
    counts = (
        trained.sum(),
        valid.sum(),
        trained.any(-1).sum(),
        valid.any(-1).sum(),
        *map(trained.sum().new_tensor, (len(trained), trained.numel())),
    )
    return TokenCounts(*[count.to(torch.float64) for count in counts])


def metric_weight(
    loss: GRPOLoss, batch: TensorDictBase, count: TokenCounts | None
) -> Tensor | float:
    """What the loss's metrics of `batch` are means over: positions, or valid tokens.

    Rows where the tokens are not counted.
    """
    if loss.semantics == "corrected":
        return float(batch.numel()) if count is None else count.valid
    return float(_sampling_log_probs(loss, batch).numel())


def step_scales(
    loss: GRPOLoss, counts: Sequence[TokenCounts], group: dist.ProcessGroup | None = None
) -> list[StepScales]:
    """The scales of each micro-batch of a step.

    Args:
        loss: the loss of all of them.
        counts: of this rank's micro-batches.
        group: ranks that share the step, whose gradients are averaged afterwards, as
            DistributedDataParallel does; None: this process alone.
    """
    totals = torch.stack([torch.stack(count) for count in counts]).sum(0)
    ranks = 1
    if group is not None:
        ranks = dist.get_world_size(group)
        dist.all_reduce(totals, group=group)
    total = TokenCounts(*totals)
    corrected = loss.semantics == "corrected"
    if loss.aggregation == "none" or loss.reduction == "none":
        return [StepScales(None, None)] * len(counts)
    if corrected and loss.reduction == "sum":
        objective = kl = total.trained.new_ones(())
    elif loss.aggregation == "prompt_mean":
        objective, kl = total.trained_rows if corrected else total.rows, total.valid_rows
    else:
        objective, kl = total.trained, total.valid
    normaliser = objective.clamp_min(1) / ranks
    if not loss.kl_to_ref_coeff and not loss.kl_to_inference_coeff:
        return [StepScales(normaliser, None)] * len(counts)
    if corrected:  # over all valid tokens, though the normaliser may count fewer
        kl = objective.clamp_min(1) / kl.clamp_min(1)
        return [StepScales(normaliser, kl)] * len(counts)
    # Means over the positions of the batch, pads included: of the whole one padded to its longest.
    longest = torch.stack([count.positions / count.rows.clamp_min(1) for count in counts]).max()
    if group is not None:
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    positions = (total.rows * longest).clamp_min(1) / ranks
    return [StepScales(normaliser, count.positions / positions) for count in counts]


def _sampling_log_probs(loss: GRPOLoss, batch: TensorDictBase) -> Tensor:
    return batch.get(
        loss.tensor_keys.sample_log_prob,
        as_padded_tensor=True,
        padding_side="left",
        padding_value=0.0,
    )


def _mask_of_strategy(loss: GRPOLoss, batch: TensorDictBase) -> Tensor | None:
    """The mask of the actor's distribution, [B, T], from the batch alone; None if it takes more."""
    actor = loss.actor_network
    if (
        loss.kl_mask_threshold
        or not isinstance(actor, LLMWrapperBase)
        or getattr(actor, "input_mode", None) != "tokens"
        or loss._overrides("_get_cur_log_prob")
        or loss._has_loss_mask(batch)
        or _sampling_log_probs(loss, batch) is None
    ):
        return None
    padded = actor.pad_output

    def rows(key: tuple[str, ...]) -> list[Tensor] | Tensor | None:
        return batch.get(key) if padded else batch.get(key, None, as_list=True)

    if padded and not isinstance(batch.get(ATTENTION_MASK, None), Tensor):
        return None
    attention, prompts = rows(ATTENTION_MASK), batch.get(PROMPT_TOKENS, None, as_list=not padded)
    masks = attention
    if loss.masking_strategy == "rlhf" or (loss.masking_strategy == "sft" and prompts is None):
        masks = batch.get(ASSISTANT_MASK, None, as_list=not padded)
    if attention is None or masks is None:
        return None
    if loss.masking_strategy == "sft" and prompts is not None:
        if padded:
            masks = masks.clone()
            masks[:, : prompts.shape[-1]] = False
        else:
            masks = [
                torch.cat([torch.zeros_like(mask[: len(prompt)]), mask[len(prompt) :]])
                for mask, prompt in zip(masks, prompts, strict=True)
            ]
    if not padded:
        masks = pad_sequence(masks, batch_first=True, padding_value=False, padding_side="left")
    masks = masks.bool()
    return masks if masks.shape == _sampling_log_probs(loss, batch).shape else None


@torch.no_grad()
def _masks_by_scoring(loss: GRPOLoss, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    """The loss's masks of trained and of valid tokens, [B, T], from its own forward pass."""
    batch = batch.copy()
    scores = loss._score(batch)
    old_log_probs = loss._sampling_log_probs(batch, scores.log_probs)
    inputs = eager.select_tokens(scores.log_probs, old_log_probs, scores.mask, loss._options(None))
    trained = inputs.trained
    if loss.aggregation == "token_mean":
        for key in loss._loss_mask_keys():
            loss_mask = batch.get(key, None)
            if loss_mask is not None:
                trained = trained & loss._expand_loss_mask(loss_mask, trained)
    return trained, inputs.valid
