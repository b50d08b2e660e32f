"""The losses on torchrl's TransformersWrapper: a tiny Llama, built here, and a ragged batch."""

import copy

import pytest
import torch
import torchrl.objectives.llm as torchrl_losses
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm.grpo import CISPOLoss as TorchRLCISPOLoss

import grpo

transformers = pytest.importorskip("transformers")
VOCAB = 32
NAMES = ("GRPOLoss", "DAPO", "CISPOLoss")


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{index}": index for index in range(VOCAB)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")),
        pad_token="w0",
        eos_token="w2",
        unk_token="w1",
        padding_side="left",
    )


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


def wrapper(model, tokenizer, pad_output):
    return TransformersWrapper(
        copy.deepcopy(model),
        tokenizer=tokenizer,
        input_mode="tokens",
        generate=False,
        pad_output=pad_output,
        return_log_probs=True,
    )


def ragged_batch(model, tokenizer):
    """Prompts and responses of several lengths, scored by the wrapper before an update."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for prompt, response in ((3, 4), (2, 6), (5, 1)):
        full = torch.randint(3, VOCAB, (prompt + response,), generator=generator)
        assistant = torch.arange(prompt + response) >= prompt
        rows.append(
            TensorDict(
                {
                    "tokens": {
                        "full": full,
                        "prompt": full[:prompt],
                        "response": full[prompt:],
                    },
                    "masks": {
                        "all_attention_mask": torch.ones_like(assistant),
                        "all_assistant_mask": assistant,
                    },
                    "advantage": torch.randn(1, 1, generator=generator).expand(
                        prompt + response, 1
                    ),
                }
            )
        )
    batch = lazy_stack(rows)
    with torch.no_grad():
        scored = wrapper(model, tokenizer, False)(batch.copy())
    for row, scores in zip(rows, scored.unbind(0), strict=True):
        log_probs = scores["log_probs", "full"]
        noise = 0.3 * torch.randn(log_probs.shape, generator=generator)
        row["log_probs", "full"] = log_probs + noise
        row["next", "ref_log_probs", "full"] = log_probs - noise
    return lazy_stack(rows)


@pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
@pytest.mark.parametrize("name", NAMES)
def test_a_transformers_wrapper_gives_torchrls_numbers(name, strategy, model, tokenizer):
    batch = ragged_batch(model, tokenizer)
    options = {
        "masking_strategy": strategy,
        "kl_to_ref_coeff": 0.3,
        "kl_to_inference_coeff": 0.2,
        "kl_mask_threshold": 0.5,
    }
    results = []
    for cls in (getattr(grpo, name), getattr(torchrl_losses, name, TorchRLCISPOLoss)):
        loss = cls(wrapper(model, tokenizer, False), **options)
        output = loss(batch.copy())
        output = output.to_tensordict().to_dict()
        sum(output[key].sum() for key in output if key.startswith("loss_")).backward()
        gradients = [p.grad for p in loss.actor_network.parameters() if p.grad is not None]
        results.append((output, gradients))
    (got, got_gradients), (want, want_gradients) = results
    for key in want:
        if want[key] is not None:
            torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-6)
    assert want["clip_fraction"] > 0
    assert len(got_gradients) == len(want_gradients) > 0
    for mine, theirs in zip(got_gradients, want_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
