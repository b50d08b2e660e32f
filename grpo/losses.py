"""GRPOLoss, DAPO and CISPOLoss: TorchRL 0.14.1's interface over `grpo_kernels.policy_loss`.

`forward` reads the batch, has the actor score it, and hands log-probs, entropy, advantages and mask
to one call of the kernel. What the kernel cannot know (a subclass's own objective or aggregation, a
loss mask in the batch, a composite distribution) goes through `_composed_forward`: the same
formulas, term by term, in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorClass, TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)
from torch import Tensor
from torch.distributions import Distribution
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.modules.distributions.utils import (
    composite_entropy,
    has_analytic_entropy,
    sample_and_log_prob,
)
from torchrl.modules.llm import LLMWrapperBase
from torchrl.objectives.common import LossModule

from grpo_kernels import PolicyLossOutput, token_log_probs
from grpo_kernels.backends import BACKENDS, Backend
from grpo_kernels.once_differentiable import not_twice_differentiable
from grpo_kernels.policy_loss import eager, policy_loss_with
from grpo_kernels.policy_loss.options import (
    AGGREGATIONS,
    SEMANTICS,
    PolicyLossOptions,
    Semantics,
    check_choice,
    check_clip,
)

from .actor import (
    current_linear_head,
    find_linear_head,
    plan_model_call,
    reason_not_direct,
    score_directly,
)

# What attributes of a loss may be, whenever they are set.
CHOICES = {
    "actor_path": ("auto", "distribution"),
    "aggregation": AGGREGATIONS,
    "backend": BACKENDS,
    "masking_strategy": ("sft", "rlhf", "generic"),
    "reduction": ("mean", "sum", "none"),
    "ref_log_prob_padding_side": ("left", "right"),
    "semantics": SEMANTICS,
}


class LLMLossOutput(TensorClass["nocast"]):
    """Loss terms (differentiable) and metrics (detached) of one call; None where not asked for."""

    loss_objective: torch.Tensor
    clip_fraction: torch.Tensor
    kl_approx: torch.Tensor
    ESS: torch.Tensor
    entropy: torch.Tensor | None = None
    loss_entropy: torch.Tensor | None = None
    loss_kl_to_ref: torch.Tensor | None = None
    kl_to_ref: torch.Tensor | None = None
    loss_kl_to_inference: torch.Tensor | None = None
    kl_to_inference: torch.Tensor | None = None


class GRPOLossOutput(LLMLossOutput):
    """What GRPOLoss returns."""


class DAPOLossOutput(LLMLossOutput):
    """What DAPO returns."""


class CISPOLossOutput(LLMLossOutput):
    """What CISPOLoss returns."""


class Scores(NamedTuple):
    """What the actor says of the batch's tokens: [B, T] tensors."""

    log_probs: Tensor
    entropy: Tensor | None
    mask: Tensor | None
    # Whether masked tokens may have an entropy other than 0.
    entropy_of_pads: bool = False


class GRPOLoss(LossModule):
    r"""Group relative policy optimisation (arXiv:2402.03300) over sampled tokens.

    A drop-in for `torchrl.objectives.llm.GRPOLoss`: same keywords, keys, outputs and numbers. The
    formulas are in `grpo_kernels.policy_loss`.

    Args:
        actor_network: a TorchRL LLM wrapper (with `generate=False`), or any module with
            `get_dist(tensordict, logits_key=...)` or one of `_get_sft_dist`, `_get_rlhf_dist`,
            `_get_generic_dist`.

    Keyword Args:
        clip_epsilon: eps, or (eps_low, eps_high): the ratio is clipped to
            [1 - eps_low, 1 + eps_high]. Held in the buffers `clip_epsilon_low` and
            `clip_epsilon_high`, to which a scheduler may assign numbers.
        kl_mask_threshold: drop tokens with (log ratio)^2 / 2 above it; the ratio is to the sampling
            policy.
        aggregation: "token_mean", "prompt_mean" or "none".
        entropy_bonus, entropy_coeff: whether to compute the entropy, and the weight of its bonus.
        samples_mc_entropy: samples for the entropy of a distribution that has no closed form.
        gamma, clip_value: accepted for TorchRL's sake; no effect there or here.
        reduction: "mean", "sum" or "none". Under torchrl semantics "sum" is a mean, as there.
        kl_to_ref_coeff: weight of the KL penalty to the reference policy; needs its log-probs.
        kl_to_inference_coeff: weight of the KL penalty to the sampling policy.
        device: of the clip buffers; the actor's by default.
        masking_strategy: tokens that count: "sft": the response; "rlhf": the assistant's;
            "generic": all that are not padding.
        ref_log_prob_padding_side, ref_log_prob_padding_value: how ragged reference log-probs are
            padded.
        semantics: "torchrl": every number as TorchRL 0.14.1 gives it; "corrected": see the README.
        log_ratio_cap: hold the log-ratio within +-cap, so that no ratio overflows.
        backend: of the kernels, see `grpo_kernels.backends`.
        actor_path: "auto": a TransformersWrapper's model is run and scored without the wrapper's
            copies of the logits, wherever its options allow it; "distribution": always through
            the actor's distribution, as TorchRL does.
        fused_lm_head: score from the hidden states before the model's output layer
            (`grpo_kernels.linear_log_probs`), so that no logits tensor exists. For a
            TransformersWrapper around a causal LM whose output layer is an nn.Linear.

    Raises:
        TypeError: an unknown keyword. ValueError: a value that is not accepted, or an actor that
            fused_lm_head cannot serve.
    """

    actor_network: LLMWrapperBase
    output_type: type[LLMLossOutput] = GRPOLossOutput
    _objective: Literal["grpo", "cispo"] = "grpo"
    _schedulable_buffers = frozenset({"clip_epsilon_low", "clip_epsilon_high"})

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Where the batch holds what; `set_keys(name=key)` changes it."""

        advantage: NestedKey = "advantage"
        action: NestedKey = ("tokens", "full")
        sample_log_prob: NestedKey = ("log_probs", "full")
        ref_log_probs: NestedKey = ("next", "ref_log_probs", "full")

    def __init__(
        self,
        actor_network: LLMWrapperBase | None = None,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        kl_mask_threshold: float | None = None,
        aggregation: str | None = "token_mean",
        entropy_bonus: bool = True,
        samples_mc_entropy: int = 1,
        entropy_coeff: float = 0.01,
        gamma: float | None = None,
        reduction: str | None = None,
        clip_value: bool | float | None = None,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        device: torch.device | None = None,
        masking_strategy: Literal["sft", "rlhf", "generic"] = "sft",
        ref_log_prob_padding_side: Literal["left", "right"] = "left",
        ref_log_prob_padding_value: float = 0.0,
        semantics: Semantics = "torchrl",
        log_ratio_cap: float | None = None,
        backend: Backend = "auto",
        actor_path: Literal["auto", "distribution"] = "auto",
        fused_lm_head: bool = False,
    ) -> None:
        super().__init__()
        self.actor_network = actor_network
        self.entropy_bonus = entropy_bonus
        self.samples_mc_entropy = samples_mc_entropy
        self.entropy_coeff = entropy_coeff
        self.reduction = "mean" if reduction is None else reduction
        self.kl_mask_threshold = kl_mask_threshold
        self.aggregation = aggregation or "token_mean"
        self.masking_strategy = masking_strategy
        self.ref_log_prob_padding_side = ref_log_prob_padding_side
        self.ref_log_prob_padding_value = ref_log_prob_padding_value
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.kl_to_inference_coeff = kl_to_inference_coeff
        self.semantics = semantics
        self.log_ratio_cap = log_ratio_cap
        self.backend = backend
        self.actor_path = actor_path
        self._linear_head = None
        if fused_lm_head:
            reason = reason_not_direct(actor_network)
            if actor_path == "distribution":
                reason = "actor_path='distribution' makes a distribution of the logits"
            if reason is not None:
                raise ValueError(f"fused_lm_head=True cannot be honoured: {reason}")
            self._linear_head = find_linear_head(actor_network.model)

        if device is None:
            parameter = next(self.parameters(), None)
            device = torch.get_default_device() if parameter is None else parameter.device
        low, high = _clip_pair(clip_epsilon)
        self.register_buffer("clip_epsilon_low", torch.tensor(low, device=device))
        self.register_buffer("clip_epsilon_high", torch.tensor(high, device=device))
        self._set_in_keys()

    def __setattr__(self, name: str, value: object) -> None:
        if name in CHOICES:
            check_choice(name, value, CHOICES[name])
        elif name in self._schedulable_buffers and isinstance(value, (int, float)):
            check_clip(*((value, 0.0) if name == "clip_epsilon_low" else (0.0, value)))
        super().__setattr__(name, value)

    # Keys

    @property
    def tensor_keys(self) -> _AcceptedKeys:
        """The batch keys in use; `set_keys` changes them."""
        return self._tensor_keys

    def _set_in_keys(self) -> None:
        actor_keys = getattr(self.actor_network, "in_keys", None)
        keys = self.tensor_keys
        self._in_keys = list(
            dict.fromkeys(
                [
                    *(actor_keys if isinstance(actor_keys, (list, tuple)) else ()),
                    keys.action,
                    keys.sample_log_prob,
                    keys.advantage,
                    keys.ref_log_probs,
                ]
            )
        )

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        self._set_in_keys()

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that `forward` may read."""
        return self._in_keys

    @in_keys.setter
    def in_keys(self, values: list[NestedKey]) -> None:
        self._in_keys = values

    @property
    def out_keys(self) -> list[str]:
        """The entries of the output that may be set."""
        if getattr(self, "_out_keys", None) is None:
            self._out_keys = [
                "loss_objective",
                "clip_fraction",
                "ESS",
                "kl_approx",
                *(["entropy", "loss_entropy"] if self.entropy_bonus else []),
                "loss_kl_to_ref",
                "kl_to_ref",
                "loss_kl_to_inference",
                "kl_to_inference",
            ]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[str]) -> None:
        self._out_keys = values

    # Options as the kernel takes them

    @property
    def _clip_bounds(self) -> tuple[Tensor, Tensor]:
        """The log-ratio's range: (log(1 - eps_low), log(1 + eps_high))."""
        return (-self.clip_epsilon_low).log1p(), self.clip_epsilon_high.log1p()

    def _options(
        self, normaliser: float | Tensor | None, entropy_of_pads: bool = False
    ) -> PolicyLossOptions:
        aggregation = "none" if self.reduction == "none" else self.aggregation
        if normaliser is None and self.reduction == "sum" and self.semantics == "corrected":
            normaliser = 1.0
        threshold = self.kl_mask_threshold
        to_ref = self.kl_to_ref_coeff
        return PolicyLossOptions(
            objective=self._objective,
            clip_low=self.clip_epsilon_low,
            clip_high=self.clip_epsilon_high,
            kl_mask_threshold=threshold if threshold is not None and threshold > 0 else None,
            aggregation=aggregation,
            kl_to_ref_coeff=to_ref if to_ref is not None and to_ref > 0 else None,
            kl_to_inference_coeff=self.kl_to_inference_coeff,
            entropy_coeff=self.entropy_coeff if self.entropy_bonus else None,
            semantics=self.semantics,
            log_ratio_cap=self.log_ratio_cap,
            normaliser=normaliser,
            entropy_of_pads=entropy_of_pads,
        )

    # The batch

    def forward(
        self, tensordict: TensorDictBase, *, normaliser: float | Tensor | None = None
    ) -> LLMLossOutput:
        """Loss terms and metrics of one batch.

        Args:
            tensordict: the batch. Needs the action (token ids, [B, T]), the sampling log-probs
                ([B, T]), the advantage ([B, T, 1]) and what the actor reads; ragged entries are
                padded on the left.
            normaliser: number of valid tokens (or sequences, for "prompt_mean") of the whole
                optimiser step, when this batch is a part of it; see `grpo_kernels.policy_loss`.

        Raises:
            ValueError: no action or advantage, or shapes that do not fit. KeyError: no sampling or
            reference log-probs. RuntimeError: sampling log-probs that require a gradient.
        """
        keys = self.tensor_keys
        action = self._action(tensordict)
        if action is None:
            raise ValueError(f"Action key {keys.action} not in tensordict.")
        tensordict = tensordict.copy()  # actors write into what they are given
        advantage = tensordict.get(
            keys.advantage,
            None,
            as_padded_tensor=True,
            padding_side="left" if self.semantics == "corrected" else "right",
        )
        if advantage is None:
            raise ValueError(f"Advantage key {keys.advantage} not in tensordict.")
        scores = self._score(tensordict, action)
        old_log_probs = self._sampling_log_probs(tensordict, scores.log_probs)
        if advantage.ndim != scores.log_probs.ndim + 1:
            raise ValueError(
                "advantage and log_weight must have the same number of dimensions, got "
                f"advantage.ndim={advantage.ndim} and log_weight.ndim={scores.log_probs.ndim + 1}"
            )
        options = self._options(normaliser, scores.entropy_of_pads)
        ref_log_probs = None
        if options.kl_to_ref_coeff is not None:
            ref_log_probs = self._target_log_probs(tensordict, keys.ref_log_probs, scores.log_probs)
        batch = (scores, old_log_probs, advantage, ref_log_probs, options)
        if self._needs_composition(tensordict, *batch):
            return self._composed_forward(tensordict, *batch)
        terms = policy_loss_with(
            options,
            scores.log_probs,
            old_log_probs,
            _per_token(advantage, scores.log_probs),
            scores.mask,
            ref_log_probs,
            scores.entropy,
            self.backend,
        )
        if terms.loss_objective.ndim == 2:  # per token: TorchRL's losses are [B, T, 1]
            losses = [
                term if term is None or term.ndim < 2 else term.unsqueeze(-1) for term in terms[:4]
            ]
            terms = PolicyLossOutput(*losses, *terms[4:])
        present = {name: term for name, term in terms._asdict().items() if term is not None}
        # Unchecked, as torchrl makes its own: the checks take longer than a small batch's kernel.
        output = TensorDict._new_unsafe(present, batch_size=torch.Size())
        return self.output_type.from_tensordict(output)

    def _get_cur_log_prob(
        self, tensordict: TensorDictBase
    ) -> tuple[Tensor | TensorDictBase, Distribution, bool]:
        """The action's log-probs under the actor's distribution, that distribution, False.

        The last is TorchRL's flag for composite distributions, kept for subclasses that unpack it.
        """
        dist = self._distribution(tensordict)
        return dist.log_prob(self._action(tensordict)), dist, False

    def _action(self, tensordict: TensorDictBase) -> Tensor | None:
        return tensordict.get(
            self.tensor_keys.action,
            None,
            as_padded_tensor=True,
            padding_side="left",
            padding_value=-100,
        )

    def _action_after(self, action: Tensor, tensordict: TensorDictBase) -> Tensor:
        """The action once the actor has run: for "rlhf" a wrapper tokenises the conversation."""
        return self._action(tensordict) if self.masking_strategy == "rlhf" else action

    def _distribution(self, tensordict: TensorDictBase) -> Distribution:
        """The actor's distribution over the tokens that the masking strategy selects."""
        actor = self.actor_network
        by_strategy = getattr(actor, f"_get_{self.masking_strategy}_dist", None)
        if by_strategy is not None:
            return by_strategy(tensordict)
        if isinstance(actor, (ProbabilisticTensorDictSequential, ProbabilisticTensorDictModule)):
            return actor.get_dist(tensordict)  # unlike a wrapper's, it takes no logits_key
        if hasattr(actor, "get_dist"):
            return actor.get_dist(tensordict, logits_key="logits")
        raise NotImplementedError(
            f"actor_network must have get_dist or _get_{self.masking_strategy}_dist (for "
            f"masking_strategy={self.masking_strategy!r}) to score the batch, got "
            f"{type(actor).__name__}; or override _get_cur_log_prob."
        )

    def _score(self, tensordict: TensorDictBase, action: Tensor | None = None) -> Scores:
        """Log-probs and entropy of the batch, by the way that reads the logits least."""
        action = self._action(tensordict) if action is None else action
        overridden = self._overrides("_get_cur_log_prob") or self._overrides("_get_entropy")
        reason = reason_not_direct(self.actor_network)
        if overridden or self.actor_path == "distribution":
            reason = "the actor is asked for its distribution"
        if reason is not None and self._linear_head is not None:
            raise ValueError(f"fused_lm_head=True cannot be honoured: {reason}")
        if overridden:
            log_probs, dist, _ = self._get_cur_log_prob(tensordict)
            return self._scores_of(log_probs, dist)
        if reason is None:
            call = plan_model_call(self.actor_network, tensordict, self.masking_strategy)
            if self._linear_head is not None:
                self._linear_head = current_linear_head(self._linear_head, self.actor_network.model)
            log_probs, entropy = score_directly(
                self.actor_network,
                call,
                self._action_after(action, tensordict),
                entropy=self.entropy_bonus,
                head=self._linear_head,
                backend=self.backend,
            )
            return Scores(log_probs, entropy, call.mask)
        dist = self._distribution(tensordict)
        action = self._action_after(action, tensordict)
        if isinstance(dist, LLMMaskedCategorical) and dist.position_level_masking:
            mask = dist.mask.bool()
            log_probs, entropy = token_log_probs(
                dist.logits, action, mask, entropy=self.entropy_bonus, backend=self.backend
            )
            return Scores(log_probs, entropy, mask)
        return self._scores_of(dist.log_prob(action), dist)

    def _scores_of(self, log_probs: Tensor | TensorDictBase, dist: Distribution) -> Scores:
        if is_tensor_collection(log_probs):
            log_probs = log_probs.sum(dim="feature", reduce=True)
        mask = getattr(dist, "mask", None)
        if mask is not None:
            mask = mask if mask.dtype == torch.bool else mask.bool()
            mask = mask if mask.shape == log_probs.shape else mask.expand(log_probs.shape)
        entropy = None
        if self.entropy_bonus and self._overrides("_get_entropy"):
            entropy = self._get_entropy(dist, log_probs.shape).squeeze(-1)
        elif self.entropy_bonus:
            entropy = self._entropy_of(dist, log_probs.shape)
        return Scores(log_probs, entropy, mask, entropy_of_pads=True)

    def _get_entropy(self, dist: Distribution, adv_shape: torch.Size) -> Tensor:
        """[B, T, 1] entropy; override it for a distribution that needs another way."""
        return self._entropy_of(dist, adv_shape).unsqueeze(-1)

    def _entropy_of(self, dist: Distribution, adv_shape: torch.Size) -> Tensor:
        """[B, T] entropy: in closed form, or by sampling where there is none."""
        if isinstance(dist, CompositeDistribution):
            entropy = composite_entropy(dist, self.samples_mc_entropy)
        elif has_analytic_entropy(dist):
            entropy = dist.entropy()
        else:
            _, log_prob = sample_and_log_prob(
                dist,
                (self.samples_mc_entropy,),
                reparameterize=getattr(dist, "has_rsample", False),
            )
            entropy = -log_prob.mean(0)
        if is_tensor_collection(entropy):
            entropy.batch_size = adv_shape
            entropy = entropy.sum(dim="feature", reduce=True)
        return entropy

    def _sampling_log_probs(self, tensordict: TensorDictBase, log_probs: Tensor) -> Tensor:
        """The log-probs that the batch was sampled with, in the shape of the current ones."""
        key = self.tensor_keys.sample_log_prob
        sampled = tensordict.get(key, as_padded_tensor=True, padding_side="left", padding_value=0.0)
        if sampled is None:
            raise KeyError(f"Couldn't find the log-prob {key} in the input data.")
        if is_tensor_collection(sampled):
            sampled = sampled.sum(dim="feature", reduce=True)
        if sampled.requires_grad:
            raise RuntimeError(f"tensordict stored {key} requires grad.")
        if sampled.shape != log_probs.shape:
            raise ValueError(
                f"Shape mismatch detected in {type(self).__name__}: current log-prob shape "
                f"{log_probs.shape} != previous log-prob shape {sampled.shape}. The masking "
                "strategy of the loss must be the one that the sampling log-probs and the "
                f"advantage were computed with; here it is '{self.masking_strategy}'. Use "
                "masking_strategy='sft' for single-turn responses, 'rlhf' for the assistant "
                "turns of conversations, 'generic' for all tokens."
            )
        return sampled

    def _target_log_probs(
        self, tensordict: TensorDictBase, key: NestedKey, log_probs: Tensor
    ) -> Tensor:
        """Log-probs of the policy that a KL penalty is to, in the shape of the current ones."""
        target = tensordict.get(
            key,
            as_padded_tensor=True,
            padding_side=self.ref_log_prob_padding_side,
            padding_value=self.ref_log_prob_padding_value,
        )
        if target is None:
            raise KeyError(
                f"Couldn't find the ref log-prob {key} in the input data "
                f"(tensordict.keys(True)={tensordict.keys(True)})."
            )
        if target.ndim == log_probs.ndim + 1:
            target = target.squeeze(-1)
        if target.shape != log_probs.shape:
            raise ValueError(
                "ref_log_prob and cur_log_prob must have the same shape, got "
                f"{target.shape} and {log_probs.shape}. Store the log-probs under {key} as [B, T] "
                "or [B, T, 1], padded as the batch was when it was collected."
            )
        return target

    # Term by term

    def _needs_composition(
        self,
        tensordict: TensorDictBase,
        scores: Scores,
        old_log_probs: Tensor,
        advantage: Tensor,
        ref_log_probs: Tensor | None,
        options: PolicyLossOptions,
    ) -> bool:
        """Whether anything here is beyond one kernel call."""
        return (
            scores.log_probs.ndim != 2
            or self._overrides("_compute_policy_objective")
            or self._overrides("_aggregate_loss_value")
            or advantage.shape[-1] != 1
            or advantage.requires_grad
            # TorchRL pads the sampling log-probs anew, on this side, for their KL penalty.
            or (
                options.kl_to_inference_coeff is not None
                and self.ref_log_prob_padding_side == "right"
            )
            or self._has_loss_mask(tensordict)
        )

    def _has_loss_mask(self, tensordict: TensorDictBase) -> bool:
        present = tensordict.keys()
        return any(
            (key[0] if isinstance(key, tuple) else key) in present
            and tensordict.get(key, None) is not None
            for key in self._loss_mask_keys()
        )

    def _overrides(self, method: str) -> bool:
        return getattr(getattr(self, method), "__func__", None) is not OVERRIDABLE[method]

    def _compute_policy_objective(
        self, log_weight: Tensor, advantage: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Per-token loss and clip fraction from [B, T, 1] log-ratios and advantages.

        Override it for another objective; the loss then goes term by term through PyTorch. For
        CISPO under corrected semantics the value stands on the log-ratio instead of the log-prob,
        which has the same gradient.
        """
        everywhere = torch.ones_like(log_weight, dtype=torch.bool)
        inputs = eager.MaskedInputs(everywhere, everywhere, log_weight, log_weight)
        return self._objective_and_clip_fraction(inputs, advantage, self._options(None))

    @staticmethod
    def _objective_and_clip_fraction(
        inputs: eager.MaskedInputs, advantage: Tensor, options: PolicyLossOptions
    ) -> tuple[Tensor, Tensor]:
        log_ratio = inputs.log_ratio
        # Autograd follows the advantage through the value, the log-ratio by the coefficient.
        inputs = inputs._replace(log_probs=inputs.log_probs.detach(), log_ratio=log_ratio.detach())
        tokens = eager.trained_tokens(inputs, advantage, options.log_ratio_cap)
        bounds = eager.clip_bounds(options.clip_low, options.clip_high, inputs.log_ratio)
        objective = eager.objective_of(tokens, bounds, options)
        loss = _WithCoefficient.apply(log_ratio, objective.value, objective.coefficient.detach())
        return loss, eager.clip_fraction(inputs, objective, bounds, options.semantics)

    def _aggregate_loss_value(
        self, value: Tensor, mask: Tensor, tensordict: TensorDictBase | None = None
    ) -> Tensor:
        """Aggregate a [..., T, 1] loss over the [..., T] mask, as `aggregation` says."""
        return self._aggregate(value, mask, self._options(None), tensordict)

    def _aggregate(
        self,
        value: Tensor,
        mask: Tensor,
        options: PolicyLossOptions,
        tensordict: TensorDictBase | None,
    ) -> Tensor:
        mask = mask.unsqueeze(-1).expand_as(value)
        aggregation, semantics = options.aggregation, options.semantics
        normaliser = options.normaliser
        if aggregation == "token_mean" and tensordict is not None:
            for key in self._loss_mask_keys():
                loss_mask = tensordict.get(key, None)
                if loss_mask is not None:
                    mask = mask & self._expand_loss_mask(loss_mask, value)
        value = torch.where(mask, value, 0.0)
        if aggregation == "none":
            return value
        if aggregation == "prompt_mean" and semantics == "torchrl":  # [1], or one a batch dimension
            rows = value.sum(-2) / mask.sum(-2).clamp_min(1)
            return rows.sum(0) / (max(len(rows), 1) if normaliser is None else normaliser)
        value, mask = value.reshape(-1, value.shape[-2]), mask.reshape(-1, mask.shape[-2])
        weights = eager.row_weights(mask, aggregation, semantics, normaliser)
        return (value.sum(-1) * weights.to(value.dtype)).sum()

    def _composed_forward(
        self,
        tensordict: TensorDictBase,
        scores: Scores,
        old_log_probs: Tensor,
        advantage: Tensor,
        ref_log_probs: Tensor | None,
        options: PolicyLossOptions,
    ) -> LLMLossOutput:
        """What `policy_loss` computes, from the same pieces, with the parts that are overridden."""
        semantics = options.semantics
        inputs = eager.select_tokens(scores.log_probs, old_log_probs, scores.mask, options)
        if self._overrides("_compute_policy_objective"):
            advantage = torch.where(inputs.trained.unsqueeze(-1), advantage, 0.0)
            log_weight = inputs.log_ratio.unsqueeze(-1)
            objective, clip_fraction = self._compute_policy_objective(log_weight, advantage)
        else:
            per_token = eager.MaskedInputs(*[tensor.unsqueeze(-1) for tensor in inputs])
            objective, clip_fraction = self._objective_and_clip_fraction(
                per_token, advantage, options
            )

        def aggregate(value: Tensor, mask: Tensor) -> Tensor:
            if not self._overrides("_aggregate_loss_value"):
                return self._aggregate(value, mask, options, tensordict)
            if self._has_loss_mask(tensordict):
                return self._aggregate_loss_value(value, mask, tensordict=tensordict)
            return self._aggregate_loss_value(value, mask)

        def mean(value: Tensor) -> Tensor:
            return eager.semantic_mean(value.detach(), inputs.valid, semantics)

        terms = {
            "loss_objective": aggregate(objective, inputs.trained),
            "clip_fraction": clip_fraction,
            "kl_approx": mean(-inputs.log_ratio),
            "ESS": eager.effective_sample_size(inputs.log_ratio.detach(), inputs.trained),
        }
        if scores.entropy is not None:
            entropy = scores.entropy.to(inputs.log_ratio.dtype)
            loss = -self.entropy_coeff * entropy.unsqueeze(-1)
            terms["loss_entropy"] = aggregate(loss, inputs.trained)
            terms["entropy"] = eager.mean_entropy(
                entropy.detach(), scores.mask, inputs.valid, options
            )
        to_inference = None
        if options.kl_to_inference_coeff is not None:
            to_inference = self._target_log_probs(
                tensordict, self.tensor_keys.sample_log_prob, scores.log_probs
            )
        for name, target, coeff in (
            ("kl_to_ref", ref_log_probs, options.kl_to_ref_coeff),
            ("kl_to_inference", to_inference, options.kl_to_inference_coeff),
        ):
            if target is None:
                continue
            penalty = eager.kl_penalty(inputs, target, options)
            terms[name] = mean(penalty)
            if semantics == "torchrl":
                terms[f"loss_{name}"] = coeff * eager.position_mean(penalty)
            else:
                terms[f"loss_{name}"] = coeff * aggregate(penalty.unsqueeze(-1), inputs.valid)
        present = {name: term for name, term in terms.items() if term is not None}
        return self.output_type.from_tensordict(TensorDict(present))


class _WithCoefficient(torch.autograd.Function):
    """A per-token value that has, beside its own graph, this derivative by the log-ratio."""

    @staticmethod
    def forward(ctx, log_ratio: Tensor, value: Tensor, coefficient: Tensor) -> Tensor:
        ctx.save_for_backward(log_ratio, coefficient)
        return value.clone()

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        log_ratio, coefficient = ctx.saved_tensors
        with torch.no_grad():
            gradient = torch.where(coefficient == 0, 0.0, upstream * coefficient)
        gradient = not_twice_differentiable(gradient, "GRPOLoss", upstream, log_ratio)
        return gradient, upstream, None


def _per_token(advantage: Tensor, log_probs: Tensor) -> Tensor:
    """[B, T] from [B, T, 1], or from what broadcasts to that; whole numbers become floats."""
    advantage = advantage.squeeze(-1)
    if not advantage.is_floating_point():
        advantage = advantage.to(log_probs.dtype)
    return advantage if advantage.shape == log_probs.shape else advantage.expand_as(log_probs)


def _clip_pair(clip_epsilon: float | tuple[float, float]) -> tuple[float, float]:
    """(eps_low, eps_high) from a number or a pair."""
    if isinstance(clip_epsilon, (tuple, list)):
        if len(clip_epsilon) != 2:
            raise ValueError(f"clip_epsilon tuple must have length 2, got {clip_epsilon}.")
        low, high = map(float, clip_epsilon)
    else:
        low = high = float(clip_epsilon)
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip_epsilon values must be non-negative, got ({low}, {high}).")
    if low >= 1:
        raise ValueError(f"clip_epsilon low must be < 1 (to keep 1 - eps_low > 0), got {low}.")
    return low, high


class DAPO(GRPOLoss):
    """GRPO with a higher upper clip bound (DAPO, arXiv:2503.14476).

    `clip_epsilon=None` is 0.2 under torchrl semantics, as there, and the paper's (0.2, 0.28) under
    corrected semantics.
    """

    output_type: type[LLMLossOutput] = DAPOLossOutput

    def __init__(
        self,
        actor_network: LLMWrapperBase | None = None,
        *,
        clip_epsilon: float | tuple[float, float] | None = None,
        semantics: Semantics = "torchrl",
        **kwargs,
    ) -> None:
        if clip_epsilon is None:
            clip_epsilon = (0.2, 0.28) if semantics == "corrected" else 0.2
        super().__init__(actor_network, clip_epsilon=clip_epsilon, semantics=semantics, **kwargs)


class CISPOLoss(GRPOLoss):
    """Clipped importance sampling policy optimisation (MiniMax-M1, arXiv:2506.13585).

    -sg(clip(r)) A log_prob per token under corrected semantics; -clip(r) A under torchrl semantics,
    as there: a clipped token then has no gradient. The paper sets no lower bound: let the lower
    clip_epsilon come close to 1.
    """

    output_type: type[LLMLossOutput] = CISPOLossOutput
    _objective = "cispo"


# Methods that a subclass may replace, or a test on the class itself; the kernel is then not enough.
OVERRIDABLE = {
    name: getattr(GRPOLoss, name)
    for name in (
        "_get_cur_log_prob",
        "_get_entropy",
        "_compute_policy_objective",
        "_aggregate_loss_value",
    )
}

# LossModule's metaclass wraps the forward that a class inherits once more; once is enough.
for _subclass in (DAPO, CISPOLoss):
    del _subclass.forward
