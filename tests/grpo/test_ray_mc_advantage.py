"""RayMCAdvantage, on a local Ray."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, RayReplayBuffer, ReplayBuffer

from grpo import MCAdvantage, RayMCAdvantage

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def trajectory(group, rewards, identity=0):
    steps = len(rewards)
    return TensorDict(
        {
            "query": torch.full((steps,), group),
            "identity": torch.full((steps,), identity),
            "next": TensorDict(
                {
                    "reward": torch.tensor(rewards).reshape(steps, 1),
                    "done": torch.tensor([False] * (steps - 1) + [True]).reshape(steps, 1),
                },
                [steps],
            ),
        },
        [steps],
    )


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    here = str(Path(__file__).parent)  # workers unpickle functions of this file
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    runtime = {"env_vars": {"PYTHONPATH": path}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=runtime)
    yield
    ray.shutdown()


@pytest.fixture
def transform():
    made = RayMCAdvantage(2, trajectory_return="sum", remote_config={"num_cpus": 0})
    yield made
    made.close()


def test_writes_what_mc_advantage_writes(transform):
    local = MCAdvantage(2, trajectory_return="sum")
    for rewards in ([0.0], [1.0, 1.0]):
        out, expected = transform.inv(trajectory(0, rewards)), local.inv(trajectory(0, rewards))
    torch.testing.assert_close(out["advantage"], expected["advantage"])
    assert transform.get_stats() == local.get_stats()


def test_state(transform):
    assert transform.is_shared
    assert transform.share_memory_() is transform
    transform.inv(trajectory(0, [2.0], 7))
    assert transform.completed_trajectories == 1
    assert transform.queued_groups == transform.queued_trajectories == 1
    assert transform.max_queued_trajectories_per_group == 1
    assert transform.queues[0][0]["identity"].tolist() == [7]
    transform.completed_trajectories += 1
    assert transform.get_stats()["completed_trajectories"] == 2
    transform.reset_stats()
    assert transform.completed_trajectories == 0
    transform.clear_queues()
    assert len(transform.queues) == 0
    assert "actor" in repr(transform)


@ray.remote(num_cpus=0)
def write(transform, writer):
    out = [transform.inv(trajectory(group, [float(writer)], writer)) for group in range(20)]
    return [td["identity"].tolist() for td in out if td is not None]


def test_writers_share_groups(transform):
    written = ray.get([write.remote(transform, writer) for writer in range(2)])
    groups = [group for groups in written for group in groups]
    assert [sorted(group) for group in groups] == [[0, 1]] * 20
    assert transform.written_groups == 20


def test_pickles_to_one_with_the_same_state(transform):
    transform.inv(trajectory(0, [0.0]))
    assert pickle.loads(pickle.dumps(transform)).queued_trajectories == 1


def test_transforms_of_one_actor_name_share_their_state():
    made = [
        RayMCAdvantage(
            2, trajectory_return="sum", actor_name="groups", remote_config={"num_cpus": 0}
        )
        for _ in range(2)
    ]
    assert made[0].inv(trajectory(0, [0.0])) is None
    assert made[1].inv(trajectory(0, [1.0])) is not None
    made[1].close()
    assert made[0].written_groups == 1
    made[0].close()


def test_constructor_errors_are_raised_here():
    with pytest.raises(ValueError, match="keep_return_bounds must be an increasing"):
        RayMCAdvantage(2, trajectory_return="sum", keep_return_bounds=(1, 0))


def test_in_a_replay_buffer(transform):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform=transform, shared=True)
    buffer.extend(trajectory(0, [0.0]))
    buffer.extend(trajectory(0, [1.0]))
    assert len(buffer) == 2


def make_transform():
    return MCAdvantage(2, trajectory_return="sum")


def test_mc_advantage_as_transform_factory_of_a_ray_replay_buffer():
    buffer = RayReplayBuffer(
        storage=lambda: LazyTensorStorage(10),
        transform_factory=make_transform,
        batch_size=2,
        remote_config={"num_cpus": 0},
    )
    buffer.extend(trajectory(0, [0.0]))
    assert len(buffer) == 0
    buffer.extend(trajectory(0, [1.0]))
    assert len(buffer) == 2
    assert buffer.sample()["advantage"].abs().sum() > 0
    buffer.close()
