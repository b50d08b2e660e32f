"""TransformersWrapper batches scored directly: TorchRL's numbers without its logits copies."""

import itertools

import pytest
import torch
import torchrl.objectives.llm as torchrl_losses
from tensordict import TensorDict, lazy_stack
from torch import nn
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.modules.llm import TransformersWrapper
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import grpo
from grpo.tiny import tiny_llama, tiny_tokenizer

VOCAB, ROWS, COLUMNS, PROMPT = 64, 4, 18, 6
LOSSES = ("loss_objective", "loss_entropy", "loss_kl_to_ref", "loss_kl_to_inference")
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def wrap(model: nn.Module, **options) -> TransformersWrapper:
    return TransformersWrapper(
        model,
        tokenizer=tiny_tokenizer(VOCAB),
        input_mode="tokens",
        generate=False,
        **options,
    )


def make_batch(ragged: bool, seed: int = 0) -> TensorDict:
    """Rollouts; ragged ones differ in the lengths of prompts and of responses."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in range(ROWS):
        length = COLUMNS - (3 * row if ragged else 0)
        prompt = PROMPT - (row if ragged else 0)
        tokens = torch.randint(3, VOCAB, (length,), generator=generator)

        def near_uniform(length=length):
            return 0.3 * torch.randn(length, generator=generator) - 4.2

        rows.append(
            TensorDict(
                tokens={"full": tokens, "prompt": tokens[:prompt]},
                masks={
                    "all_attention_mask": torch.ones(length, dtype=torch.bool),
                    "all_assistant_mask": torch.arange(length) >= prompt,
                },
                log_probs={"full": near_uniform()},
                next=TensorDict(ref_log_probs={"full": near_uniform()}),
                advantage=torch.randn(1, 1, generator=generator).expand(length, 1).clone(),
            )
        )
    return lazy_stack(rows)


def outputs_and_gradients(loss: nn.Module, model: nn.Module, batch: TensorDict):
    model.zero_grad()
    out = loss(batch)
    terms = [getattr(out, name) for name in LOSSES]
    sum(
        (weight * term).sum()
        for weight, term in zip((1.0, 0.7, 1.3, 0.4), terms)
        if term is not None
    ).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach() for name, value in out.items()}, gradients


def assert_same(ours, theirs, tolerance: float = 2e-6) -> None:
    for got, expected in zip(ours, theirs):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert got[name].shape == value.shape, name
            torch.testing.assert_close(
                got[name], value, rtol=1e-4, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


OPTIONS = {
    "default": {},
    "KLs, per prompt": {
        "kl_to_ref_coeff": 0.1,
        "kl_to_inference_coeff": 0.1,
        "aggregation": "prompt_mean",
    },
    "KL-mask, per token": {"kl_mask_threshold": 0.05, "aggregation": "none"},
    "no entropy": {"entropy_bonus": False},
}
WRAPPERS = {"padded": {}, "packed": {"pad_model_input": False}, "pad_output": {"pad_output": True}}
# TorchRL's wrapper cannot stack a ragged batch with pad_output=True.
BATCHES = [
    (ragged, wrapper)
    for ragged in (False, True)
    for wrapper in WRAPPERS
    if not (ragged and wrapper == "pad_output")
]


@pytest.mark.parametrize("path", ["direct", "fused_lm_head", "distribution"])
@pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
@pytest.mark.parametrize(("ragged", "wrapper"), BATCHES)
def test_numbers_and_gradients_are_torchrls(ragged, strategy, wrapper, path):
    model = tiny_llama(VOCAB, hidden=32, layers=1)
    extra = {
        "direct": {},
        "fused_lm_head": {"fused_lm_head": True},
        "distribution": {"actor_path": "distribution"},
    }[path]
    batch = make_batch(ragged)
    for options in OPTIONS.values():
        theirs, ours = (
            outputs_and_gradients(
                library.GRPOLoss(
                    wrap(model, **WRAPPERS[wrapper]), masking_strategy=strategy, **options, **more
                ),
                model,
                batch.copy(),
            )
            for library, more in ((torchrl_losses, {}), (grpo, extra))
        )
        assert_same(ours, theirs)


def test_direct_path_makes_no_distribution_of_the_logits(monkeypatch):
    vocabularies = []
    original = LLMMaskedCategorical.__init__

    def record(self, logits, *args, **kwargs):
        vocabularies.append(logits.shape[-1])
        original(self, logits, *args, **kwargs)

    monkeypatch.setattr(LLMMaskedCategorical, "__init__", record)
    monkeypatch.setattr(LLMMaskedCategorical, "log_prob", None)
    monkeypatch.setattr(LLMMaskedCategorical, "entropy", None)
    model = tiny_llama(VOCAB, hidden=32, layers=1)
    grpo.GRPOLoss(wrap(model))(make_batch(True)).loss_objective.backward()
    assert vocabularies == [1]


def test_ready_distribution_is_scored_without_its_methods(monkeypatch):
    monkeypatch.setattr(LLMMaskedCategorical, "log_prob", None)
    monkeypatch.setattr(LLMMaskedCategorical, "entropy", None)
    model = tiny_llama(VOCAB, hidden=32, layers=1)
    loss = grpo.GRPOLoss(wrap(model), actor_path="distribution")
    loss(make_batch(True)).loss_objective.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_model_runs_once(monkeypatch):
    model = tiny_llama(VOCAB, hidden=32, layers=1)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for extra in ({}, {"fused_lm_head": True}):
        loss = grpo.GRPOLoss(wrap(model), **extra)
        calls.clear()
        loss(make_batch(True))
        assert calls == [1]


def test_batch_and_actor_are_left_as_they_were():
    model = tiny_llama(VOCAB, hidden=32, layers=1)
    actor = wrap(model)
    batch = make_batch(True)
    keys, out_keys = set(batch.keys(True, True)), list(actor.out_keys)
    before = batch.clone()
    for strategy in ("sft", "rlhf", "generic"):
        grpo.GRPOLoss(actor, masking_strategy=strategy)(batch)
    assert set(batch.keys(True, True)) == keys
    assert all((one == other).all() for one, other in zip(batch.unbind(0), before.unbind(0)))
    assert actor.out_keys == out_keys
    assert actor.model is model


def test_bf16_model_is_nearer_to_fp64_than_torchrl():
    model = tiny_llama(VOCAB, hidden=32, layers=1).bfloat16()
    exact_model = tiny_llama(VOCAB, hidden=32, layers=1).bfloat16().double()
    batch = make_batch(False)
    exact_batch = batch.apply(lambda x: x.double() if x.is_floating_point() else x)
    results = {
        "exact": torchrl_losses.GRPOLoss(wrap(exact_model))(exact_batch),
        "torchrl": torchrl_losses.GRPOLoss(wrap(model))(batch.copy()),
        "ours": grpo.GRPOLoss(wrap(model))(batch.copy()),
    }
    for name in ("loss_objective", "entropy", "kl_approx"):
        exact, torchrl, ours = (getattr(result, name).double() for result in results.values())
        assert (ours - exact).abs() <= (torchrl - exact).abs() + 1e-4


def cohere() -> nn.Module:
    return CohereForCausalLM(CohereConfig(**{**SMALL, "logit_scale": 0.25}))


def granite() -> nn.Module:
    return GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0))


def gemma2() -> nn.Module:
    config = Gemma2Config(**SMALL, final_logit_softcapping=2.0, tie_word_embeddings=True)
    return Gemma2ForCausalLM(config)


def qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True))


MODELS = {
    "llama": lambda: tiny_llama(VOCAB, hidden=32, layers=1),
    "qwen3, tied": qwen3,
    "gemma2, softcap": gemma2,
    "cohere, scale": cohere,
    "granite, scale": granite,
}


@pytest.mark.parametrize("name", MODELS)
def test_fused_lm_head_agrees_with_logits_on_every_parameter(name):
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    plain, fused = (
        outputs_and_gradients(
            grpo.GRPOLoss(wrap(model), kl_to_ref_coeff=0.1, fused_lm_head=fused),
            model,
            make_batch(True),
        )
        for fused in (False, True)
    )
    assert len(plain[1]) == len(list(model.parameters()))
    assert_same(fused, plain)


def test_fused_lm_head_leaves_frozen_weights_alone():
    model = tiny_llama(VOCAB, hidden=32, layers=1)
    for parameter in itertools.chain(
        model.lm_head.parameters(), model.model.embed_tokens.parameters()
    ):
        parameter.requires_grad_(False)
    plain, fused = (
        outputs_and_gradients(
            grpo.GRPOLoss(wrap(model), fused_lm_head=fused), model, make_batch(True)
        )
        for fused in (False, True)
    )
    assert "lm_head.weight" not in fused[1]
    assert_same(fused, plain)


class TwoLayerHead(nn.Sequential):
    """An output layer that is no nn.Linear."""


def test_head_that_is_no_linear_layer_raises_at_construction():
    model = tiny_llama(VOCAB, hidden=32, layers=1)
    model.set_output_embeddings(TwoLayerHead(nn.Linear(32, 32), nn.Linear(32, VOCAB)))
    with pytest.raises(ValueError, match=r"nn\.Linear.*TwoLayerHead"):
        grpo.GRPOLoss(wrap(model), fused_lm_head=True)


def test_logits_that_are_not_the_heads_raise_at_construction():
    model = tiny_llama(VOCAB, hidden=32, layers=1)
    model.register_forward_hook(lambda _, __, out: out.__setitem__("logits", out.logits**2))
    with pytest.raises(ValueError, match="are not its output layer's"):
        grpo.GRPOLoss(wrap(model), fused_lm_head=True)


def test_fused_lm_head_without_a_transformers_wrapper_raises_at_construction():
    with pytest.raises(ValueError, match="not a TransformersWrapper"):
        grpo.GRPOLoss(nn.Linear(2, 2), fused_lm_head=True)
    actor = wrap(tiny_llama(VOCAB, hidden=32, layers=1))
    with pytest.raises(ValueError, match="actor_path='distribution'"):
        grpo.GRPOLoss(actor, fused_lm_head=True, actor_path="distribution")


def test_wrapper_that_overrides_its_distributions_is_asked_for_them():
    class Halved(TransformersWrapper):
        def _get_sft_dist(self, tensordict, **kwargs):
            dist = super()._get_sft_dist(tensordict, **kwargs)
            return LLMMaskedCategorical(dist.logits / 2, dist.mask)

    model = tiny_llama(VOCAB, hidden=32, layers=1)
    actor = Halved(model, tokenizer=tiny_tokenizer(VOCAB), input_mode="tokens", generate=False)
    batch = make_batch(True)
    theirs, ours = (
        outputs_and_gradients(library.GRPOLoss(actor), model, batch.copy())
        for library in (torchrl_losses, grpo)
    )
    assert_same(ours, theirs)


def test_history_input_is_scored_as_torchrl_scores_it():
    history = pytest.importorskip("torchrl.data.llm").History
    tokenizer = tiny_tokenizer(VOCAB)
    model = tiny_llama(VOCAB, hidden=32, layers=1)
    chats = [
        [
            {"role": "user", "content": "w3 w4"},
            {"role": "assistant", "content": "w5 w6 w7" + " w8" * row},
        ]
        for row in range(3)
    ]
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %} {{ m.content }} "
        "{% endgeneration %}{% else %} {{ m.content }} {% endif %}{% endfor %}"
    )
    actor = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="history",
        generate=False,
        chat_template=tokenizer.chat_template,
    )
    batch = TensorDict(
        history=TensorDict(full=history.from_chats(chats), batch_size=3), batch_size=3
    )
    scored = actor(batch.copy())
    old = scored.get(("log_probs", "full"), as_list=True)
    batch = batch.to_lazystack(0)
    for row, log_probs in zip(batch.tensordicts, old):
        row["log_probs"] = TensorDict(full=log_probs.detach())
        row["tokens"] = TensorDict(full=torch.zeros(len(log_probs), dtype=torch.long))
        row["advantage"] = torch.ones(len(log_probs), 1)
    theirs, ours = (
        outputs_and_gradients(library.GRPOLoss(actor, masking_strategy="rlhf"), model, batch.copy())
        for library in (torchrl_losses, grpo)
    )
    assert theirs[0]["entropy"] > 0
    assert_same(ours, theirs)
