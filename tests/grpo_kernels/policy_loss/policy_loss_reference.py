"""The formulas of `policy_loss` once more: naive, fp64, differentiated by autograd.

Written from the papers and TorchRL's source, not from eager.py. Masked tokens are indexed away, so
that nothing is ever computed on them.
"""

import math

import torch

LOSSES = ("loss_objective", "loss_kl_to_ref", "loss_kl_to_inference", "loss_entropy")
METRICS = ("clip_fraction", "kl_approx", "ESS", "entropy", "kl_to_ref", "kl_to_inference")
DIFFERENTIABLE = ("log_probs", "ref_log_probs", "entropy")
FULL = {
    "kl_to_ref_coeff": 0.3,
    "kl_to_inference_coeff": 0.7,
    "entropy_coeff": 0.05,
}


def make_batch(
    rows,
    columns,
    *,
    seed=0,
    dtype=torch.float32,
    spread=0.5,
    keep=0.7,
    ref=True,
    entropy=True,
    masked=True,
):
    """Random inputs; the log-ratios have a standard deviation of `spread`."""
    generator = torch.Generator().manual_seed(seed)

    def randn():
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    old = -2 + randn()
    batch = {
        "log_probs": (old + spread * randn()).to(dtype),
        "old_log_probs": old.to(dtype),
        "advantages": randn().to(dtype),
        "mask": torch.rand(rows, columns, generator=generator) < keep if masked else None,
        "ref_log_probs": (old + spread * randn()).to(dtype) if ref else None,
        "entropy": randn().abs().to(dtype) if entropy else None,
    }
    return batch


def hold(values, low, high):
    """Within [low, high], with gradient at the bounds, where releases of torch differ."""
    return torch.where(values > high, high, torch.where(values < low, low, values))


def naive_policy_loss(
    log_probs,
    old_log_probs,
    advantages,
    mask=None,
    *,
    ref_log_probs=None,
    entropy=None,
    objective="grpo",
    clip_low=0.2,
    clip_high=0.2,
    kl_mask_threshold=None,
    aggregation="token_mean",
    kl_to_ref_coeff=None,
    kl_to_inference_coeff=None,
    entropy_coeff=None,
    semantics="torchrl",
    log_ratio_cap=None,
    normaliser=None,
):
    """A dict of PolicyLossOutput's fields, in fp64, with an autograd graph."""
    rows, columns = log_probs.shape
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    advantages = advantages.double().expand(rows, columns)
    low, high = float(clip_low), float(clip_high)
    corrected = semantics == "corrected"
    asked = torch.ones(rows, columns, dtype=torch.bool) if mask is None else mask
    valid = asked & old_log_probs.isfinite()
    cap = math.inf if log_ratio_cap is None else log_ratio_cap

    every_ratio = log_probs.double().detach() - old_log_probs.double()
    trained = valid.clone()
    if kl_mask_threshold is not None:
        trained &= 0.5 * every_ratio**2 <= kl_mask_threshold

    def picked(tensor, where):
        return tensor.double()[where]

    def dense(values, where):
        return torch.zeros(rows, columns, dtype=torch.float64).masked_scatter(where, values)

    def aggregate(values, where):
        if aggregation == "none":
            return dense(values, where)
        if aggregation == "token_mean":
            count = max(int(where.sum()), 1) if normaliser is None else float(normaliser)
            return values.sum() / count
        per_row = dense(values, where).sum(-1) / where.sum(-1).clamp(min=1)
        if normaliser is not None:
            count = float(normaliser)
        elif corrected:
            count = max(int(where.any(-1).sum()), 1)
        else:
            count = max(rows, 1)
        total = per_row.sum() / count
        return total if corrected else total.reshape(1)

    def mean(values, where):
        count = int(where.sum()) if corrected else rows * columns
        return values.sum() / max(count, 1)

    # objective
    current, advantage = picked(log_probs, trained), picked(advantages, trained)
    ratio = hold(current - picked(old_log_probs, trained), -cap, cap).exp()
    clipped_ratio = hold(ratio, 1 - low, 1 + high)
    # The value of each token, and where the clip binds.
    if objective == "grpo":
        values = -torch.minimum(ratio * advantage, clipped_ratio * advantage)
        binds = ((ratio > 1 + high) & (advantage >= 0)) | ((ratio < 1 - low) & (advantage < 0))
    elif objective == "cispo":
        values = -clipped_ratio * advantage
        if corrected:
            values = -clipped_ratio.detach() * advantage * current
        binds = (ratio > 1 + high) | (ratio < 1 - low)
    else:
        raise ValueError(f"the reference has no objective {objective!r}")
    if not corrected:  # TorchRL counts before it drops tokens by the KL-mask, and knows no cap
        every = picked(every_ratio, valid).exp()
        binds = (every > 1 + high) | (every < 1 - low)
    output = dict.fromkeys((*LOSSES, *METRICS))
    output["loss_objective"] = aggregate(values, trained)
    output["clip_fraction"] = mean(binds.double(), valid)
    output["kl_approx"] = mean(-picked(every_ratio, valid), valid)

    log_weights = picked(every_ratio, trained)
    if len(log_weights) == 0:
        output["ESS"] = torch.zeros((), dtype=torch.float64)
    else:
        shares = log_weights.softmax(0)
        output["ESS"] = 1 / (shares**2).sum() / len(shares)

    if entropy is not None:
        output["entropy"] = mean(picked(entropy, valid if corrected else asked), valid).detach()
        if entropy_coeff is not None:
            output["loss_entropy"] = aggregate(-entropy_coeff * picked(entropy, trained), trained)

    def kl_terms(name, target, coeff):
        where = valid if corrected else trained
        difference = picked(target, where) - picked(log_probs, where)
        penalty = hold(difference, -cap, cap)
        penalty = penalty.expm1() - penalty
        output[name] = mean(penalty, where).detach()
        if coeff is not None:
            loss = aggregate(penalty, where) if corrected else mean(penalty, where)
            output[f"loss_{name}"] = coeff * loss

    if ref_log_probs is not None:
        kl_terms("kl_to_ref", ref_log_probs, kl_to_ref_coeff)
    if kl_to_inference_coeff is not None:
        kl_terms("kl_to_inference", old_log_probs, kl_to_inference_coeff)
    return output


def upstream_of(losses, seed=0):
    """A random upstream gradient for each loss term."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(loss.shape, generator=generator, dtype=torch.float64)
        for name, loss in losses.items()
    }


def evaluate(function, batch, options, *, double=False, upstream=None, upstream_seed=0):
    """Every output of `function`, and under "grad <input>" every gradient.

    `upstream` maps loss terms to upstream gradients; without it they are random. `double` lifts
    the inputs to fp64 first.
    """
    inputs = {}
    for name, tensor in batch.items():
        if tensor is not None and double and tensor.is_floating_point():
            tensor = tensor.double()
        if tensor is not None:
            tensor = tensor.detach()
            if name in DIFFERENTIABLE:
                tensor.requires_grad_()
        inputs[name] = tensor
    output = function(**inputs, **options)
    output = output if isinstance(output, dict) else output._asdict()
    losses = {name: output[name] for name in LOSSES if output[name] is not None}
    if upstream is None:
        upstream = upstream_of(losses, upstream_seed)
    total = sum((losses[name] * weight).sum() for name, weight in upstream.items())
    wanted = [name for name in DIFFERENTIABLE if inputs[name] is not None]
    gradients = torch.autograd.grad(
        total, [inputs[name] for name in wanted], allow_unused=True, materialize_grads=True
    )
    output.update({f"grad {name}": grad for name, grad in zip(wanted, gradients, strict=True)})
    return output


def assert_equal_outputs(actual, expected, batch, *, rtol=None, atol=None):
    """Same terms, same shapes, values within what the input's precision allows."""
    compute = torch.float64 if batch["log_probs"].dtype == torch.float64 else torch.float32
    for name, want in expected.items():
        got = actual[name]
        assert (got is None) == (want is None), name
        if want is None:
            continue
        if name.startswith("grad "):
            dtype = batch[name.removeprefix("grad ")].dtype
            kind = dtype if torch.finfo(dtype).eps > torch.finfo(compute).eps else compute
        else:
            dtype = kind = compute
        assert got.dtype == dtype, f"{name} is {got.dtype}"
        assert got.shape == want.shape, f"{name} has shape {tuple(got.shape)}"
        eps = torch.finfo(kind).eps
        floor = 0.02 if got.ndim < 2 else 1e-3  # a sum may cancel
        largest = float(want.detach().abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(
            got.double(),
            want.double(),
            rtol=32 * eps if rtol is None else rtol,
            atol=16 * eps * (largest + floor) if atol is None else atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )
