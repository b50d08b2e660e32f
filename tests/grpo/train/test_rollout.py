"""Sampling with the KV-cache, and the batch that is made of it."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement
from transformers import LlamaConfig, LlavaConfig

from grpo.train import collector
from grpo.train.collector import (
    BatchStorage,
    RolloutCollector,
    TrainerScores,
    draw_prompts,
    encode_prompt,
    response_mask,
    trim,
)
from grpo.train.errors import InputError
from grpo.train.rollout import TransformersRollout, context_length, pad_left, score
from grpo.train.tasks import sort
from grpo.train.tiny_model import build_model, build_tokenizer

TOKENIZER = build_tokenizer()
SIZES = {"prompts": 3, "samples": 4, "prompt_length": 16, "max_new_tokens": 6}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build_model(len(TOKENIZER))


def make_rollout(model, max_new_tokens=6):
    return TransformersRollout(
        model,
        max_new_tokens=max_new_tokens,
        end_id=TOKENIZER.eos_token_id,
        pad_id=TOKENIZER.pad_token_id,
        dtype=torch.float32,
    )


def make_collector(model, **options):
    return RolloutCollector(
        task=sort,
        tokenizer=TOKENIZER,
        rollout=make_rollout(model),
        policy=model,
        importance_cap=options.pop("importance_cap", None),
        dtype=torch.float32,
        seed=0,
        **SIZES,
        **options,
    )


def test_log_probs_are_those_of_a_teacher_forced_pass(model):
    prompts = [encode_prompt(TOKENIZER, text) for text in ("sort 1", "sort 987654", "add 1 + 2")]
    responses = make_rollout(model)(prompts, 5)
    assert len(responses.tokens) == 15
    for row, (tokens, log_probs) in enumerate(zip(*responses, strict=True)):
        full, mask = pad_left([prompts[row // 5] + tokens], 0)
        expected = score(model, full, mask, torch.float32)[0, -len(tokens) :]
        torch.testing.assert_close(torch.tensor(log_probs), expected, rtol=0, atol=1e-5)


def test_a_response_ends_with_its_end_of_turn(model):
    prompts = [encode_prompt(TOKENIZER, "sort 1")]
    for tokens in make_rollout(model, max_new_tokens=40)(prompts, 64).tokens:
        assert TOKENIZER.eos_token_id not in tokens[:-1]
        assert len(tokens) == 40 or tokens[-1] == TOKENIZER.eos_token_id


def test_sampling_follows_the_distribution(model):
    prompt = encode_prompt(TOKENIZER, "sort 1")
    first = [row[0] for row in make_rollout(model, 1)([prompt], 20_000).tokens]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor(first), minlength=len(expected)) / len(first)
    assert (counts - expected).abs().max() < 0.01


def test_the_batch_holds_prompt_response_and_masks(model):
    batch = make_collector(model).collect()
    assert batch.batch_size == (12,)
    prompt_length = len(encode_prompt(TOKENIZER, "sort 123456"))  # not the 16 of the longest taken
    assert batch["tokens", "full"].shape == (12, prompt_length + 6)
    mask = response_mask(batch)
    assert not mask[:, :prompt_length].any()
    assert (batch["log_probs", "full"][mask] < 0).all()
    assert (batch["log_probs", "full"][~mask] == 0).all()
    assert batch["group"].tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_batches_of_any_widths_follow_one_another_in_the_buffer(tmp_path):
    def buffer():
        storage = BatchStorage(4)
        return ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), batch_size=4)

    first = buffer()
    for width in (3, 5, 2):
        first.extend(TensorDict({"x": torch.full((4, width), width)}, [4]))
        assert first.sample()["x"].tolist() == [[width] * width] * 4
        first.empty(empty_write_count=False)
        assert len(first) == 0
    first.extend(TensorDict({"x": torch.ones(3, 7)}, [3]))
    first.dumps(tmp_path)
    second = buffer()
    second.loads(tmp_path)
    assert len(second) == 3
    second.empty()
    second.extend(TensorDict({"x": torch.ones(4, 8)}, [4]))
    assert second.sample()["x"].shape == (4, 8)


def test_only_draws_in_a_row_that_are_all_too_long_are_given_up(monkeypatch):
    monkeypatch.setattr(collector, "MOST_UNUSABLE_DRAWS", 3)

    def draw(*words):
        prompts = itertools.cycle("sort " + "1" * count for count in words)
        task = lambda rng: sort(rng)._replace(prompt=next(prompts))  # noqa: E731
        return draw_prompts(task, random.Random(0), TOKENIZER, 5, 16)

    problems, prompts, too_long = draw(99, 99, 1)
    assert [problem.prompt for problem in problems] == ["sort 1"] * 5
    assert len(prompts) == 5
    assert too_long == 10
    with pytest.raises(InputError, match="3 prompts in a row are longer than 16 tokens"):
        draw(99)


def test_trimming_drops_only_padding(model):
    batch = make_collector(model).collect()
    batch["advantage"] = torch.zeros(12, 1, 1)
    trimmed = trim(batch)
    attention, all_of_it = trimmed["masks", "all_attention_mask"], batch["masks"]
    assert attention.sum() == all_of_it["all_attention_mask"].sum()
    assert attention[:, 0].any()
    assert attention[:, -1].any()
    assert torch.equal(
        trimmed["tokens", "full"][response_mask(trimmed)],
        batch["tokens", "full"][response_mask(batch)],
    )


def test_importance_weights_are_one_where_rollout_and_trainer_agree(model):
    batch = make_collector(model, importance_cap=2.0).collect()
    torch.testing.assert_close(
        batch["importance"], torch.ones_like(batch["importance"]), rtol=0, atol=1e-4
    )


def test_importance_weights_are_the_truncated_ratio(model):
    collector = make_collector(model, importance_cap=1.5)
    honest = collector.rollout

    def shifted(prompts, samples):  # as if the engine had other numerics
        tokens, log_probs = honest(prompts, samples)
        return type(honest(prompts, 1))(tokens, [[x - 0.3 for x in row] for row in log_probs])

    collector.rollout = shifted
    batch = collector.collect()
    mask = response_mask(batch)
    ratio = torch.tensor(0.3).exp()
    assert torch.allclose(batch["importance"][mask], ratio, atol=1e-4)
    assert (batch["importance"][~mask] == 1).all()
    collector.importance_cap = 1.1
    capped = collector.collect()
    assert torch.allclose(capped["importance"][response_mask(capped)], torch.tensor(1.1))
    # The loss then compares with the trainer's own log-probs, the watch with the engine's.
    metrics = TrainerScores(model, None, torch.float32)
    metrics(batch)
    assert metrics.metrics["rollout_difference"] == pytest.approx(0.3, abs=1e-4)


def test_the_collectors_draws_go_on_after_a_restore(model):
    first, second = make_collector(model), make_collector(model)
    first.collect()
    state = first.state_dict()
    second.rng = random.Random(99)
    second.load_state_dict(state)
    torch.manual_seed(1)
    left = first.collect()
    torch.manual_seed(1)
    assert (left == second.collect()).all()


def test_the_context_length_of_a_model_with_a_nested_config():
    config = LlavaConfig(text_config=LlamaConfig(max_position_embeddings=77))
    assert context_length(SimpleNamespace(config=config)) == 77
