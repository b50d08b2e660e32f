"""Scoring a batch with a TransformersWrapper without its detours over [B, T, V] logits.

TorchRL's wrapper shifts, un-pads and re-pads the model's logits before it makes a distribution of
them: each step touches all of their bytes. Here the wrapper runs first with a stand-in for the
model that returns, in place of logits, the number of each position. What comes out is the wrapper's
own mask and, for every position of it, the row of logits that belongs there, whatever the input
mode, padding or packing. Then the model runs once and its rows are scored where they lie.
"""

from __future__ import annotations

import copy
import inspect
import math
import threading
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.modules.llm import TransformersWrapper

from grpo_kernels import linear_log_probs, token_log_probs
from grpo_kernels.backends import Backend


def reason_not_direct(actor: nn.Module | None) -> str | None:
    """None if the model of this actor can be scored directly, else why not.

    A subclass may do anything to the logits, unless it has `only_moves_logits = True`: its methods
    then call the model once and pass on the rows of its logits as they are.
    """
    if not isinstance(actor, TransformersWrapper):
        return f"the actor is a {type(actor).__name__}, not a TransformersWrapper"
    if type(actor) is not TransformersWrapper and not getattr(actor, "only_moves_logits", False):
        return f"{type(actor).__name__} is a subclass of TransformersWrapper"
    for name, value in vars(actor).items():
        if callable(value) and callable(getattr(TransformersWrapper, name, None)):
            return f"the actor's {name} is replaced"
    if actor.generate:
        return "the actor generates; use get_new_version(generate=False)"
    if actor.batching:
        return "the actor batches calls of several threads"
    if actor.num_samples is not None:
        return "the actor has num_samples"
    return None


class _PositionNumbers(nn.Module):
    """Stands in for the model: "logits" [B, T, 1] that number the positions from 1."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.config = getattr(model, "config", None)
        self.call: tuple[tuple, dict] | None = None

    def forward(self, *args, **kwargs) -> dict[str, Tensor]:
        self.call = args, kwargs
        input_ids = args[0] if args else kwargs["input_ids"]
        # fp64 holds every position number exactly.
        numbers = torch.arange(
            1, input_ids.numel() + 1, dtype=torch.float64, device=input_ids.device
        )
        return {"logits": numbers.view(*input_ids.shape, 1)}


class ModelCall(NamedTuple):
    """What the wrapper would call its model with, and where each row of logits goes."""

    args: tuple
    kwargs: dict
    rows: Tensor  # [B, T]: 1 + the flat model position whose logits score this token; 0: none
    mask: Tensor  # [B, T]: the tokens that count


def plan_model_call(
    actor: TransformersWrapper, tensordict: TensorDictBase, masking_strategy: str
) -> ModelCall:
    """Run the wrapper with position numbers in place of logits.

    Writes into `tensordict` what the wrapper's distribution methods write.
    """
    rehearsal = copy.copy(actor)
    model = _PositionNumbers(actor.model)
    rehearsal._modules = {**actor._modules, "model": model}
    rehearsal.out_keys = list(actor.out_keys)
    # The copy's own, so that its end leaves the actor's alone.
    rehearsal._batch_queue, rehearsal._futures = [], []
    dist = getattr(rehearsal, f"_get_{masking_strategy}_dist")(tensordict)
    args, kwargs = model.call
    return ModelCall(args, kwargs, dist.logits.squeeze(-1).long(), dist.mask.bool())


class LinearHead(NamedTuple):
    """A model's output layer as `linear_log_probs` takes it."""

    layer: nn.Linear
    temperature: float
    softcap: float | None
    hooks: tuple[int, ...]  # of the layer, when it was checked


def _hooks(layer: nn.Module) -> tuple[int, ...]:
    return (*layer._forward_pre_hooks, *layer._forward_hooks)


def current_linear_head(head: LinearHead, model: nn.Module) -> LinearHead:
    """`head`, or what the model has now if its output layer was replaced or hooked since."""
    if model.get_output_embeddings() is head.layer and _hooks(head.layer) == head.hooks:
        return head
    return find_linear_head(model)


def find_linear_head(model: nn.Module) -> LinearHead:
    """The output layer of a Hugging Face causal LM, checked on a few tokens.

    Raises ValueError, with the reason, if logits are not softcap(scale * (W hidden + b)).
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    name = type(model).__name__
    if type(head) is not nn.Linear:
        raise ValueError(
            f"fused_lm_head needs a model whose output layer is an nn.Linear; "
            f"{name}.get_output_embeddings() is {type(head).__name__}"
        )
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "fused_lm_head needs the model itself, and this is a torch.compile wrapper of it; "
            "compile in place with model.compile()"
        )
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    hooks = _hooks(head)
    hidden: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    training = model.training
    try:
        with torch.no_grad():
            model.eval()
            input_ids = torch.arange(8, device=head.weight.device).unsqueeze(0) % head.out_features
            logits = model(input_ids, use_cache=False)["logits"].double()
            plain = nn.functional.linear(hidden[0], head.weight, head.bias).double()
    finally:
        hook.remove()
        model.train(training)
    scales = {1.0}
    for attribute in ("logit_scale", "logits_scaling"):
        scale = getattr(config, attribute, None)
        if scale:
            scales |= {float(scale), 1 / float(scale)}
    # Both sides are few roundings from one matmul's result.
    rounding = torch.finfo(head.weight.dtype).eps
    for scale in sorted(scales):
        expected = plain * scale
        if softcap is not None:
            expected = softcap * torch.tanh(expected / softcap)
        difference = (expected - logits).abs()
        agree = difference <= 4 * rounding * expected.abs() + 1e-6
        overall = (logits * expected).sum() / expected.square().sum()
        if agree.all() and (overall - 1).abs() <= rounding:
            if softcap is not None and scale != 1:
                break  # linear_log_probs caps before it scales
            return LinearHead(head, 1 / scale, softcap, hooks)
    raise ValueError(
        f"fused_lm_head: the logits of {name} are not its output layer's, up to the "
        "final_logit_softcapping, logit_scale or logits_scaling of its config; use "
        "fused_lm_head=False"
    )


def _hidden_before(head: nn.Linear, model: nn.Module, args: tuple, kwargs: dict) -> Tensor:
    """[B, T, H]: the input of the output layer, which is left with no rows to multiply."""
    taken: list[Tensor] = []
    thread = threading.get_ident()

    def take(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        if threading.get_ident() != thread:  # another one's call of the same model
            return None
        taken.append(inputs[0])
        return (inputs[0][:, :0],)

    hook = head.register_forward_pre_hook(take)
    try:
        model(*args, **kwargs)
    finally:
        hook.remove()
    if len(taken) != 1:
        raise RuntimeError(
            f"fused_lm_head: {type(model).__name__} ran its output layer {len(taken)} times in one "
            "call, and that must be once; use fused_lm_head=False"
        )
    return taken[0]


def _accepts_logits_to_keep(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def score_directly(
    actor: TransformersWrapper,
    call: ModelCall,
    tokens: Tensor,
    *,
    entropy: bool,
    head: LinearHead | None,
    backend: Backend,
) -> tuple[Tensor, Tensor | None]:
    """[B, T] log-probs of `tokens` and entropy, 0 where the plan's mask is off.

    A token that no logits precede (the first of a sequence that is not masked) is scored as the
    wrapper scores it: by logits of 0, that is uniformly over the vocabulary.
    """
    model = actor.model
    input_ids = call.args[0] if call.args else call.kwargs["input_ids"]
    kwargs = {"use_cache": False, **call.kwargs}
    counted = call.mask & (call.rows > 0)

    # The rows from the first that counts; a GPU would have to wait to know it.
    first = 0
    if _accepts_logits_to_keep(model) and input_ids.device.type == "cpu" and counted.any():
        first = int(((call.rows[counted] - 1) % input_ids.shape[1]).min())
        kwargs["logits_to_keep"] = input_ids.shape[1] - first

    # Tokens and mask in the model's layout; slot 0 takes what has no row there.
    row_tokens = tokens.new_zeros(input_ids.numel() + 1).scatter_(
        0, call.rows.flatten(), torch.where(counted, tokens, 0).flatten()
    )
    row_mask = counted.new_zeros(input_ids.numel() + 1).scatter_(
        0, call.rows.flatten(), counted.flatten()
    )
    row_tokens = row_tokens[1:].view(input_ids.shape)[:, first:]
    row_mask = row_mask[1:].view(input_ids.shape)[:, first:]

    if head is None:
        logits = model(*call.args, **kwargs)["logits"]
        vocab = logits.shape[-1]
        log_probs, entropies = token_log_probs(
            logits, row_tokens, row_mask, entropy=entropy, backend=backend
        )
    else:
        hidden = _hidden_before(head.layer, model, call.args, kwargs)
        vocab = head.layer.out_features
        log_probs, entropies = linear_log_probs(
            hidden,
            head.layer.weight,
            row_tokens,
            row_mask,
            bias=head.layer.bias,
            temperature=head.temperature,
            logit_softcap=head.softcap,
            entropy=entropy,
            backend=backend,
        )

    def to_batch(scores: Tensor, without_logits: float) -> Tensor:
        uniform = scores.new_full((1,), without_logits)
        padded = nn.functional.pad(scores, (first, 0))
        by_slot = torch.cat([uniform, padded.flatten()])
        return torch.where(call.mask, by_slot[call.rows], 0.0)

    log_vocab = math.log(vocab)
    log_probs = to_batch(log_probs, -log_vocab)
    return log_probs, to_batch(entropies, log_vocab) if entropy else None
