"""The counts are those of the loss's own mask, for every strategy and layout of the batch."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm import TransformersWrapper

from grpo import GRPOLoss
from grpo.normalisation import count_tokens, step_scales
from grpo.train.policy import PaddedPolicy
from grpo.train.tiny_model import build_model, build_tokenizer

TOKENIZER = build_tokenizer()
PROMPTS, RESPONSES = (3, 5, 2, 4), (4, 1, 6, 0)


def padded(lengths, width, side):
    position = torch.arange(width)
    lengths = torch.tensor(lengths)[:, None]
    return position >= width - lengths if side == "left" else position < lengths


def dense_batch():
    torch.manual_seed(0)
    rows, longest, new = len(PROMPTS), max(PROMPTS), max(RESPONSES)
    attention = torch.cat([padded(PROMPTS, longest, "left"), padded(RESPONSES, new, "right")], 1)
    tokens = torch.randint(5, 40, attention.shape)
    log_probs = torch.randn(attention.shape)
    log_probs[0, longest] = torch.nan  # no sampling log-prob: the token does not count
    return TensorDict(
        {
            "tokens": {"full": tokens, "prompt": tokens[:, :longest]},
            "masks": {"all_attention_mask": attention, "all_assistant_mask": attention.clone()},
            "log_probs": {"full": log_probs},
            "advantage": torch.randn(rows, 1, 1),
        },
        batch_size=[rows],
    )


def ragged_batch():
    torch.manual_seed(0)
    rows = []
    for prompt, new in zip(PROMPTS, RESPONSES, strict=True):
        tokens = torch.randint(5, 40, (prompt + new,))
        assistant = torch.arange(prompt + new) >= prompt
        log_probs = torch.randn(prompt + new)
        log_probs[-1] = -torch.inf
        rows.append(
            TensorDict(
                {
                    "tokens": {"full": tokens, "prompt": tokens[:prompt]},
                    "masks": {
                        "all_attention_mask": torch.ones(prompt + new, dtype=torch.bool),
                        "all_assistant_mask": assistant,
                    },
                    "log_probs": {"full": log_probs},
                    "advantage": torch.randn(1, 1),
                }
            )
        )
    return lazy_stack(rows)


CASES = {
    "dense": (PaddedPolicy, True, dense_batch),
    "ragged": (TransformersWrapper, False, ragged_batch),
}


@pytest.mark.parametrize(
    ("layout", "strategy", "prompts"),
    [
        ("dense", "sft", True),  # PaddedPolicy is for single turns
        *[
            ("ragged", strategy, prompts)
            for strategy in ("sft", "rlhf", "generic")
            for prompts in (True, False)
        ],
    ],
)
def test_tokens_are_counted_as_the_loss_masks_them(layout, strategy, prompts):
    wrapper, pad_output, make_batch = CASES[layout]
    actor = wrapper(
        build_model(len(TOKENIZER)),
        tokenizer=TOKENIZER,
        input_mode="tokens",
        generate=False,
        pad_output=pad_output,
    )
    loss = GRPOLoss(actor, masking_strategy=strategy, entropy_bonus=False)
    batch = make_batch()
    if not prompts:
        batch = batch.exclude(("tokens", "prompt"))
    counts = count_tokens(loss, batch, may_score=False)
    assert counts is not None, "the mask should be known without a forward pass"
    mask = loss._score(batch.copy()).mask
    sampled = batch.get(("log_probs", "full"), as_padded_tensor=True, padding_side="left")
    trained = mask & sampled.isfinite()
    assert counts.trained == counts.valid == trained.sum()
    assert counts.trained_rows == counts.valid_rows == trained.any(-1).sum()
    assert (counts.rows, counts.positions) == (len(mask), mask.numel())


def test_a_forward_pass_is_taken_only_where_it_must():
    actor = PaddedPolicy(
        build_model(len(TOKENIZER)),
        tokenizer=TOKENIZER,
        input_mode="tokens",
        generate=False,
        pad_output=True,
    )
    batch = dense_batch()
    loss = GRPOLoss(actor, kl_mask_threshold=7.0)
    assert count_tokens(loss, batch, may_score=False) is None
    counts = count_tokens(loss, batch)
    assert 0 < counts.trained < counts.valid


@pytest.mark.parametrize(("aggregation", "normaliser"), [("token_mean", 4), ("prompt_mean", 2)])
def test_the_normaliser_of_two_micro_batches(aggregation, normaliser):
    """Vector 9: rows of 3 and 1 tokens."""
    actor = PaddedPolicy(
        build_model(len(TOKENIZER)),
        tokenizer=TOKENIZER,
        input_mode="tokens",
        generate=False,
        pad_output=True,
    )
    loss = GRPOLoss(actor, aggregation=aggregation)
    counts = [count_tokens(loss, dense_batch()[rows]) for rows in (slice(0, 1), slice(1, 2))]
    assert [int(count.trained) for count in counts] == [3, 1]
    both = step_scales(loss, counts)
    assert both[0].normaliser == both[1].normaliser == normaliser
