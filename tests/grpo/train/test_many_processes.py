"""Runs over several processes: torchrun's ranks, Ray's actors, and what happens if one dies."""

import csv
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = [
    "--prompts",
    "4",
    "--group-size",
    "2",
    "--mini-batch",
    "4",
    "--warm-up-steps",
    "2",
    "--save-every",
    "1",
]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


TASKS = """
import sys
from grpo.train.tasks import sort

IN_AN_ACTOR = "default_worker" in sys.argv[0]

def broken_reward(rng):
    return sort(rng)._replace(reward=lambda text: 1 / 0)

def broken_task(rng):
    if IN_AN_ACTOR:
        raise RuntimeError("no more problems\\nat all")
    return sort(rng)

def mixed(rng):
    reward = lambda text: float(len(text) % 2) if len(text) % 3 else float("nan")
    problem = sort(rng)._replace(reward=reward)
    return problem._replace(prompt="sort " * 500) if rng.random() < 0.3 else problem
"""


def start(*arguments, path=""):
    """`path`: where a task's module is."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]),
        },
    )


def finish(process, code=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def rows(directory):
    path = directory / "metrics.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def wait_for_rows(directory, count, process):
    while len(rows(directory)) < count:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)


def descendants(pid):
    """{pid: command line} of all processes below `pid`."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text()
            commands[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        parents[int(entry.name)] = int(status.rsplit(")", 1)[1].split()[1])

    def is_below(child):
        while child in parents:
            child = parents[child]
            if child == pid:
                return True
        return False

    return {child: commands[child] for child in parents if is_below(child)}


def error_lines(output):
    return [line for line in output.splitlines() if "error: " in line and "--resume" in line]


def checkpoints(directory):
    """Of one rank, by step."""
    return sorted((directory / "checkpoints").iterdir())


def test_two_ranks_resume_from_the_latest_checkpoint_that_both_have(tmp_path):
    command = [*TORCHRUN, "-m", "grpo.train", *OPTIONS, "--output", tmp_path]
    finish(start(*command, "--iterations", 4))
    uninterrupted = rows(tmp_path)
    assert len(uninterrupted) == 4
    second, third, fourth = checkpoints(tmp_path / "rank1")
    # As if rank 1 had been cut off one save and one optimiser step behind rank 0.
    shutil.rmtree(fourth)
    shutil.rmtree(third)
    shutil.copytree(second, third)
    finish(start(*TORCHRUN, "-m", "grpo.train", "--resume", tmp_path))
    for name in uninterrupted[0]:
        if "second" not in name:
            for row, before in zip(rows(tmp_path), uninterrupted, strict=True):
                assert row[name] == before[name], name
    assert len(checkpoints(tmp_path)) == len(checkpoints(tmp_path / "rank1")) == 3


def test_a_dead_rank_ends_the_run_with_one_line_and_it_resumes(tmp_path):
    command = [*TORCHRUN, "-m", "grpo.train", *OPTIONS, "--output", tmp_path]
    process = start(*command, "--iterations", 12)
    wait_for_rows(tmp_path, 3, process)
    ranks = [
        pid
        for pid, command in descendants(process.pid).items()
        if "grpo.train" in command and "torch.distributed.run" not in command
    ]
    os.kill(max(ranks), signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert len(error_lines(output)) <= 1
    done = len(rows(tmp_path))
    assert 3 <= done < 12
    # Wherever it was killed: as if it had been before the save that rank 0 has.
    *_, last = checkpoints(tmp_path / "rank1")
    if int(last.name.split("-")[1]) == 4 * done:
        shutil.rmtree(last)
    finish(start(*TORCHRUN, "-m", "grpo.train", "--resume", tmp_path))
    assert len(rows(tmp_path)) == 12


def test_with_ray_the_metrics_are_those_without_and_a_resumed_run_is_the_uninterrupted_one(
    tmp_path,
):
    pytest.importorskip("ray")
    (tmp_path / "tasks_of_test.py").write_text(TASKS)
    options = [*OPTIONS, "--iterations", 3, "--mini-batch", 2, "--epochs", 2]
    options += ["--importance-cap", 2, "--task", "tasks_of_test:mixed"]
    options += ["--candidates", 3, "--keep-return-bounds", -0.1, 0.6]
    finish(start("-m", "grpo.train", *options, "--output", tmp_path / "none", path=tmp_path))
    options += ["--ray"]
    finish(start("-m", "grpo.train", *options, "--output", tmp_path / "whole", path=tmp_path))
    whole, none = rows(tmp_path / "whole"), rows(tmp_path / "none")
    assert len(whole) == 3
    for row, row_of_none in zip(whole, none, strict=True):
        assert {name for name in row if row[name]} == {
            name for name in row_of_none if row_of_none[name]
        }
        # The same problems are drawn.
        assert row["prompts_too_long"] == row_of_none["prompts_too_long"]
        # The actor's weights are the trainer's: its log-probs agree after every iteration.
        assert float(row["rollout_difference"]) < 1e-5
    for phase in ("rollout", "reward", "rescoring"):
        assert all(float(row[f"seconds/{phase}"]) > 0 for row in whole), phase
    for name in ("prompts_too_long", "nonfinite_rewards", "solved", "dropped_groups"):
        assert sum(float(row[name]) for row in whole) > 0, name
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(max((tmp_path / "again/checkpoints").iterdir()))  # of the last iteration
    finish(start("-m", "grpo.train", "--resume", tmp_path / "again", path=tmp_path))
    again = rows(tmp_path / "again")
    for name in whole[0]:
        if "second" not in name:
            for row, row_of_whole in zip(again, whole, strict=True):
                assert float(row[name]) == float(row_of_whole[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--task broken:broken_reward",
            "--task broken:broken_reward: the reward failed on .* ZeroDivisionError",
        ),
        (
            "--task broken:broken_task",
            "--task broken:broken_task: RuntimeError: no more problems at all --",
        ),
        ("--task absent:sort_here", "the actor did not start: .* not on this machine"),
        pytest.param(
            "--rollout vllm",
            "--rollout vllm: No module",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("vllm") is not None, reason="vllm is installed"
            ),
        ),
    ],
)
def test_what_fails_in_the_actor_is_one_line_here(tmp_path, options, message):
    pytest.importorskip("ray")
    (tmp_path / "broken.py").write_text(TASKS)
    (tmp_path / "absent.py").write_text(
        TASKS + "if IN_AN_ACTOR: raise ImportError('not on this machine')\n"
        "def sort_here(rng): return sort(rng)\n"
    )
    command = ["-m", "grpo.train", *OPTIONS, "--ray", *options.split()]
    output = finish(start(*command, "--output", tmp_path / "run", path=tmp_path), 2)
    warm_up, error = output.splitlines()
    assert warm_up.startswith("warm-up")
    assert re.search(f"^error: .*{message}", error), output


@pytest.mark.parametrize("actor", ["LLMCollector", "ActorBuffer"])
def test_a_dead_actor_ends_the_run_with_one_line_and_it_resumes(tmp_path, actor):
    pytest.importorskip("ray")
    process = start(
        "-m", "grpo.train", *OPTIONS, "--ray", "--iterations", 300, "--output", tmp_path
    )
    wait_for_rows(tmp_path, 2, process)
    (pid,) = [
        pid
        for pid, command in descendants(process.pid).items()
        if command.startswith(f"ray::{actor}")
    ]
    os.kill(pid, signal.SIGKILL)
    output = finish(process, code=2)
    assert len(error_lines(output)) == 1, output
    assert "Traceback" not in output
    assert "(raylet)" not in output
    settings = tmp_path / "settings.json"
    done = len(rows(tmp_path))
    settings.write_text(settings.read_text().replace("300", str(done + 2)))
    finish(start("-m", "grpo.train", "--resume", tmp_path))
    assert len(rows(tmp_path)) == done + 2


def test_a_killed_trainer_resumes(tmp_path):
    process = start("-m", "grpo.train", *OPTIONS, "--iterations", 40, "--output", tmp_path)
    wait_for_rows(tmp_path, 3, process)
    process.kill()
    process.communicate()
    finish(start("-m", "grpo.train", "--resume", tmp_path))
    assert [float(row["iteration"]) for row in rows(tmp_path)] == list(range(1, 41))
