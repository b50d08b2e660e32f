"""The formulas once more, written in the shortest way in fp64, and independent of the package."""

import torch


def reference(logits, tokens, temperature=1.0, logit_softcap=None):
    """log_probs and entropy in fp64; tokens must be in range, rows valid."""
    z = logits.double()
    if logit_softcap is not None:
        z = logit_softcap * torch.tanh(z / logit_softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double().unsqueeze(-1)
    log_p = torch.log_softmax(z / temperature, -1)
    entropy = -torch.where(log_p == -torch.inf, 0, log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy


def reference_gradient(logits, tokens, grad_log_probs, grad_entropy, temperature=1.0, softcap=None):
    """The closed form in fp64."""
    x = logits.double()
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double().unsqueeze(-1)
    p = torch.softmax(z / temperature, -1)
    log_p = torch.log_softmax(z / temperature, -1)
    finite_log_p = torch.where(p == 0, 0, log_p)
    entropy = -(p * finite_log_p).sum(-1, keepdim=True)
    one_hot = torch.nn.functional.one_hot(tokens, x.shape[-1]).double()
    grad = grad_log_probs.double().unsqueeze(-1) * (one_hot - p)
    grad = grad - grad_entropy.double().unsqueeze(-1) * p * (finite_log_p + entropy)
    grad = grad / temperature
    return grad if softcap is None else grad * (1 - torch.tanh(x / softcap) ** 2)
