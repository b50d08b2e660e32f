"""What is refused, and in what words."""

import pytest
import torch

from grpo_kernels.token_log_probs import token_log_probs

LOGITS, TOKENS = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((LOGITS.int(), TOKENS), {}, TypeError, "logits must be fp32"),
        ((torch.zeros(()), TOKENS), {}, ValueError, r"logits must be \[..., V\]"),
        ((torch.zeros(2, 3, 0), TOKENS), {}, ValueError, "V > 0"),
        ((LOGITS, TOKENS.float()), {}, TypeError, "tokens must be an integer"),
        ((LOGITS, TOKENS[:1]), {}, ValueError, r"\(2, 3\), got \(1, 3\)"),
        ((LOGITS, TOKENS, TOKENS), {}, TypeError, "mask must be a bool"),
        ((LOGITS, TOKENS, TOKENS[0] == 0), {}, ValueError, "mask must have the shape of tokens"),
        ((LOGITS, TOKENS), {"temperature": 0.0}, ValueError, "temperature must be positive"),
        ((LOGITS, TOKENS), {"temperature": torch.ones(3, 3)}, ValueError, "broadcast"),
        (
            (LOGITS, TOKENS),
            {"temperature": torch.ones(3, requires_grad=True)},
            ValueError,
            "not differentiable",
        ),
        ((LOGITS, TOKENS), {"logit_softcap": -1.0}, ValueError, "logit_softcap must be None or"),
        ((LOGITS, TOKENS.to("meta")), {}, ValueError, "tokens must be on the device of logits"),
        ((LOGITS, TOKENS), {"backend": "cuda"}, ValueError, "backend must be one of"),
    ],
)
def test_wrong_arguments_are_named(arguments, options, error, words):
    with pytest.raises(error, match=words):
        token_log_probs(*arguments, **options)
