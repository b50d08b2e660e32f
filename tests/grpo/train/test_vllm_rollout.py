"""The vLLM rollout: with a stand-in for the engine, and with vLLM itself where it is installed."""

import importlib.util
import sys
import types

import pytest
import torch
from tensordict import TensorDict

from grpo.train.tiny_model import build_model, build_tokenizer
from grpo.train.vllm_rollout import StaleWeightsError, VLLMRollout

TOKENIZER = build_tokenizer()


class Engine:
    """Says what it was asked, and answers with the end of turn."""

    def __init__(self, **options):
        self.options = options
        self.calls = []

    def collective_rpc(self, name, kwargs):
        self.calls.append((name, kwargs))

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")

    def generate(self, prompts, parameters, use_tqdm):
        end = TOKENIZER.eos_token_id
        logprob = types.SimpleNamespace(logprob=-0.5)
        samples = [
            types.SimpleNamespace(
                index=i, token_ids=(7, end), logprobs=[{7: logprob}, {end: logprob}]
            )
            for i in reversed(range(parameters["n"]))
        ]
        return [types.SimpleNamespace(outputs=samples) for _ in prompts]


@pytest.fixture
def rollout(monkeypatch):
    module = types.ModuleType("vllm")
    module.LLM = Engine
    module.SamplingParams = lambda **options: options
    monkeypatch.setitem(sys.modules, "vllm", module)
    model = build_model(len(TOKENIZER))
    return VLLMRollout(model, TOKENIZER, max_new_tokens=4, dtype="float32", seed=0)


def test_responses_keep_their_end_of_turn_and_log_probs(rollout):
    responses = rollout([[1, 2], [3]], 2)
    assert responses.tokens == [[7, TOKENIZER.eos_token_id]] * 4
    assert responses.log_probs == [[-0.5, -0.5]] * 4


def test_stale_weights_raise_until_they_are_sent(rollout):
    optimizer = torch.optim.SGD(rollout.model.parameters(), lr=0.1)
    for parameter in rollout.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(StaleWeightsError, match=r"update_weights\(\) must come before"):
        rollout([[1]], 1)
    rollout.update_weights()
    assert rollout.engine.calls[0][0] == "reload_weights"
    assert rollout.engine.calls[1] == "reset_prefix_cache"
    assert rollout([[1]], 1).tokens


def test_the_policy_of_a_ray_actor_has_its_engine_load_the_weights_before_each_batch(rollout):
    pytest.importorskip("ray")
    from grpo.train.ray_rollout import RolloutPolicy

    policy = RolloutPolicy(
        rollout.model,
        lambda model: (rollout, rollout),
        samples=2,
        max_new_tokens=4,
        pad_id=0,
        importance_cap=None,
        dtype=torch.float32,
    )
    prompts = TensorDict(
        tokens=TensorDict(prompt=torch.ones(4, 3, dtype=torch.int64)),
        masks=TensorDict(prompt_mask=torch.ones(4, 3, dtype=torch.bool)),
        batch_size=[4],
    )
    for _ in range(2):
        for parameter in rollout.model.parameters():
            parameter.data.add_(1)
        rollout.engine.calls.clear()
        batch = policy(prompts.clone())
        assert rollout.engine.calls[0][0] == "reload_weights"
    assert batch["tokens", "full"][:, 3:5].tolist() == [[7, TOKENIZER.eos_token_id]] * 4


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_agrees_with_the_trainer_after_each_update(tmp_path):
    import csv
    import subprocess

    sizes = ["--prompts", "4", "--group-size", "4", "--warm-up-steps", "5", "--iterations", "3"]
    command = [sys.executable, "-m", "grpo.train", "--rollout", "vllm", *sizes]
    subprocess.run([*command, "--output", str(tmp_path)], check=True, timeout=280)
    with (tmp_path / "metrics.csv").open() as file:
        differences = [float(row["rollout_difference"]) for row in csv.DictReader(file)]
    assert len(differences) == 3
    assert max(differences) < 1e-5
