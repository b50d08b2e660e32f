"""A bigram language model, batches of random tokens and a collector of them, all in fp64."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.distributions import LLMMaskedCategorical

from grpo import GRPOLoss, GRPOTrainer

VOCAB = 7


class BigramActor(nn.Module):
    """Scores each token by the one before it."""

    def __init__(self, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = nn.Parameter(
            torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
        )

    def get_dist(self, tensordict, **kwargs):
        tokens = tensordict["tokens", "full"]
        return LLMMaskedCategorical(
            logits=self.logits[tokens.roll(1, -1)], mask=tensordict["masks", "all_assistant_mask"]
        )

    _get_sft_dist = get_dist


def make_batch(lengths: list[int], length: int = 16, seed: int = 0) -> TensorDict:
    """One row for each number of valid tokens, padded on the left to `length`."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    mask = torch.arange(length) >= length - torch.tensor(lengths)[:, None]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return TensorDict(
        {
            "tokens": {"full": torch.randint(VOCAB, (rows, length), generator=generator)},
            "masks": {"all_assistant_mask": mask},
            "log_probs": {"full": normal(rows, length) - 2},
            "advantage": normal(rows, 1, 1),
            "next": {
                "reward": normal(rows, 1, 1),
                "done": torch.ones(rows, 1, dtype=torch.bool),
                "ref_log_probs": {"full": normal(rows, length) - 2},
            },
        },
        batch_size=[rows],
    )


class ToyCollector:
    """Yields batch after batch; each depends on its number and on torch's generator."""

    init_random_frames = 0

    def __init__(self, lengths=(5, 15, 3, 8), change=None):
        self.lengths = list(lengths)
        self.change = change  # called with (number, batch) before the batch is handed out
        self.batches = 0
        self.shutdowns = 0

    def __iter__(self):
        while True:
            batch = make_batch(self.lengths, seed=self.batches)
            batch["advantage"] = batch["advantage"] + torch.randn(1, dtype=torch.float64)
            self.batches += 1
            if self.change is not None:
                self.change(self.batches, batch)
            yield batch

    def set_seed(self, seed, static_seed=False):
        return seed

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]

    def update_policy_weights_(self, *args, **kwargs):
        pass

    def shutdown(self):
        self.shutdowns += 1


class Log:
    """Keeps all that is logged."""

    def __init__(self):
        self.values: dict[str, list[float]] = {}

    def log_scalar(self, name, value, step=None):
        self.values.setdefault(name, []).append(float(value))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def make_buffer(batch_size: int = 2, **kwargs) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(64),
        sampler=SamplerWithoutReplacement(shuffle=kwargs.pop("shuffle", True)),
        batch_size=batch_size,
        **kwargs,
    )


def make_trainer(
    *,
    batches=1,
    lengths=(5, 15, 3, 8),
    change=None,
    loss=None,
    optimizer=None,
    collector=None,
    **options,
) -> GRPOTrainer:
    """A run of `batches` batches over the bigram model."""
    if loss is None:
        loss = GRPOLoss(BigramActor(), **options.pop("loss_options", {}))
    if optimizer is None:
        optimizer = torch.optim.AdamW(loss.parameters(), lr=0.05)
    options.setdefault("replay_buffer", make_buffer())
    options.setdefault("empty_replay_buffer_on_weight_update", True)
    return GRPOTrainer(
        collector=collector or ToyCollector(lengths, change),
        total_frames=batches * len(lengths),
        loss_module=loss,
        optimizer=optimizer,
        progress_bar=False,
        log_interval=0,
        **options,
    )
