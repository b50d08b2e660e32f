"""The policy as the loss scores it: TorchRL's wrapper, without its way through ragged tensors."""

from __future__ import annotations

from tensordict import TensorDictBase
from torch import nn
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.modules.llm import TransformersWrapper

from .rollout import positions


class PaddedPolicy(TransformersWrapper):
    """A wrapper for batches of which every entry is one padded tensor.

    TorchRL's makes a lazy stack of each batch, un-pads it and pads it again, which takes several
    times as long as a small model's forward pass.
    """

    only_moves_logits = True  # so the loss can score the model directly, see `grpo.actor`

    def _get_sft_dist(self, tensordict: TensorDictBase, **kwargs) -> LLMMaskedCategorical:
        """The distribution of each token, masked to the response."""
        attention = tensordict["masks", "all_attention_mask"]
        output = self.model(
            tensordict["tokens", "full"],
            attention_mask=attention.long(),
            position_ids=positions(attention),
            use_cache=False,
        )
        # The logits for a token stand at the one before it.
        logits = nn.functional.pad(output["logits"][:, :-1], (0, 0, 1, 0))
        mask = attention.clone()
        mask[:, : tensordict["tokens", "prompt"].shape[1]] = False
        return LLMMaskedCategorical(logits=logits, mask=mask)
