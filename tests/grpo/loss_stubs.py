"""An actor that returns a distribution with given log-probs, and batches for it."""

import torch
from tensordict import TensorDict
from torchrl.modules.distributions import LLMMaskedCategorical

ACTION, SAMPLED, REF = ("tokens", "full"), ("log_probs", "full"), ("next", "ref_log_probs", "full")


class GivenLogProbs(torch.distributions.Distribution):
    """A distribution over tokens of which log-probs and entropies are given."""

    arg_constraints = {}  # noqa: RUF012

    def __init__(self, log_probs, entropy, mask):
        super().__init__(batch_shape=log_probs.shape, validate_args=False)
        self.given, self.given_entropy, self.mask = log_probs, entropy, mask

    def log_prob(self, action):
        assert action.shape == self.given.shape
        return self.given

    def entropy(self):
        return self.given_entropy


class GivenActor(torch.nn.Module):
    """Scores any batch with the same log-probs."""

    in_keys = (("tokens", "full"),)

    def __init__(self, log_probs, entropy, mask):
        super().__init__()
        self.log_probs = torch.nn.Parameter(log_probs.clone())
        self.entropy = torch.nn.Parameter(entropy.clone())
        self.mask = mask

    def get_dist(self, tensordict, logits_key="logits"):
        return GivenLogProbs(self.log_probs, self.entropy, self.mask)


class StrategyActor(GivenActor):
    """Has a mask for each masking strategy."""

    def _get_dist(self, shift):
        return GivenLogProbs(self.log_probs, self.entropy, self.mask.roll(shift, -1))

    def _get_sft_dist(self, tensordict):
        return self._get_dist(0)

    def _get_rlhf_dist(self, tensordict):
        return self._get_dist(1)

    def _get_generic_dist(self, tensordict):
        return self._get_dist(2)


class LogitsActor(torch.nn.Module):
    """A position-masked categorical distribution over given logits."""

    in_keys = (("tokens", "full"),)

    def __init__(self, logits, mask):
        super().__init__()
        self.logits = torch.nn.Parameter(logits.clone())
        self.mask = mask

    def get_dist(self, tensordict, logits_key="logits"):
        return LLMMaskedCategorical(logits=self.logits, mask=self.mask)


def make_case(rows, columns, *, seed=0, dtype=torch.float32, spread=0.5, keep=0.7):
    """(log_probs, entropy, mask) for an actor and the batch that it scores."""
    generator = torch.Generator().manual_seed(seed)

    def randn():
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    old = -2 + randn()
    log_probs, ref = old + spread * randn(), old + spread * randn()
    batch = TensorDict(
        {
            ACTION: torch.zeros(rows, columns, dtype=torch.int64),
            SAMPLED: old.to(dtype),
            REF: ref.to(dtype),
            "advantage": randn().unsqueeze(-1).to(dtype),
        },
        [rows],
    )
    mask = torch.rand(rows, columns, generator=generator) < keep
    return (log_probs.to(dtype), randn().abs().to(dtype), mask), batch


def compare(ours, theirs, batch, *, rtol=1e-5, atol=1e-6, seed=0, their_batch=None):
    """All outputs of two losses, and the gradients of their actors' parameters."""
    got = ours(batch)
    want = theirs(batch if their_batch is None else their_batch)
    got, want = (output.to_tensordict().to_dict() for output in (got, want))
    names = {name for name in want if want[name] is not None}
    assert {name for name in got if got[name] is not None} == names
    losses = sorted(name for name in names if name.startswith("loss_"))
    generator = torch.Generator().manual_seed(seed)
    upstream = {
        name: torch.randn(want[name].shape, generator=generator, dtype=torch.float64)
        for name in losses
    }

    def gradients(loss, output):
        total = sum((output[name].double() * upstream[name]).sum() for name in losses)
        parameters = [p for p in loss.actor_network.parameters() if p.requires_grad]
        return torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)

    for name in sorted(names):
        assert got[name].shape == want[name].shape, name
        assert got[name].requires_grad == want[name].requires_grad, name
        torch.testing.assert_close(
            got[name].double(),
            want[name].double(),
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    for mine, their in zip(gradients(ours, got), gradients(theirs, want), strict=True):
        torch.testing.assert_close(mine.double(), their.double(), rtol=rtol, atol=atol)
    return got
