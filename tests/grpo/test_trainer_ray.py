"""GRPOTrainer with TorchRL's Ray collector and replay buffer, on a local Ray."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors.llm import RayLLMCollector
from torchrl.data import (
    Composite,
    LazyTensorStorage,
    RayReplayBuffer,
    SamplerWithoutReplacement,
    Unbounded,
)
from torchrl.envs import EnvBase
from toy_run import BigramActor, Log, make_batch

from grpo import GRPOLoss, GRPOTrainer

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LENGTHS = [5, 15, 3, 8]


class OneTurn(EnvBase):
    """Dialogs of one turn."""

    def __init__(self):
        super().__init__(batch_size=[len(LENGTHS)])
        self.observation_spec = Composite(seen=Unbounded((4, 1)), shape=(4,))
        self.action_spec = Composite(said=Unbounded((4, 1)), shape=(4,))
        self.reward_spec = Unbounded((4, 1))

    def _reset(self, tensordict=None, **kwargs):
        return self._turn(done=False)

    def _step(self, tensordict):
        return self._turn(done=True).set("reward", torch.ones(4, 1))

    def _turn(self, done):
        return TensorDict({"seen": torch.zeros(4, 1), "done": torch.full((4, 1), done)}, [4])

    def _set_seed(self, seed):
        pass


def make_policy():
    return TensorDictModule(nn.Linear(1, 1), in_keys=["seen"], out_keys=["said"])


def as_loss_reads_it(collected):
    return make_batch(LENGTHS)


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    here = str(Path(__file__).parent)  # the actors unpickle what is in this file
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "LIST_TO_STACK": "1"}
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    yield
    ray.shutdown()


def test_trains_on_what_the_actor_writes_and_shuts_it_down():
    buffer = RayReplayBuffer(
        storage=partial(LazyTensorStorage, 4),
        sampler=SamplerWithoutReplacement,
        batch_size=4,
        remote_config={"num_cpus": 0},
    )
    collector = RayLLMCollector(
        OneTurn,
        policy_factory=make_policy,
        dialog_turns_per_batch=4,
        replay_buffer=buffer.client(),
        postproc=as_loss_reads_it,
        remote_config={"num_cpus": 0},
    )
    loss, log = GRPOLoss(BigramActor()), Log()
    before = loss.actor_network.logits.detach().clone()
    trainer = GRPOTrainer(
        collector=collector,
        total_frames=12,
        loss_module=loss,
        optimizer=torch.optim.SGD(loss.parameters(), lr=0.1),
        replay_buffer=buffer,
        batch_size=2,
        num_epochs=2,
        empty_replay_buffer_on_weight_update=True,
        progress_bar=False,
        log_interval=0,
        logger=log,
    )
    assert trainer.state_dict()["collector"] == {}
    trainer.train()
    assert trainer.collected_frames == 12
    assert len(log.values["loss_objective"]) == 3
    assert log.values["optim_steps"][-1] == 3 * 2 * 2  # two micro-batches in each of two epochs
    assert not torch.equal(loss.actor_network.logits, before)
    trainer.shutdown()  # once more does nothing
