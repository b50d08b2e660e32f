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


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
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


def test_two_ranks_train_and_resume(tmp_path):
    run = [*TORCHRUN, "-m", "grpo.train", *OPTIONS, "--output", tmp_path]
    finish(start(*run, "--iterations", 2))
    assert len(rows(tmp_path)) == 2
    assert list((tmp_path / "rank1/checkpoints").iterdir())


def test_a_dead_rank_ends_the_run_with_one_line_and_it_resumes(tmp_path):
    command = [*TORCHRUN, "-m", "grpo.train", *OPTIONS, "--output", tmp_path]
    process = start(*command, "--iterations", 12)
    wait_for_rows(tmp_path, 2, process)
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
    assert 2 <= done < 12
    finish(start(*TORCHRUN, "-m", "grpo.train", "--resume", tmp_path))
    assert len(rows(tmp_path)) == 12


def test_ray_samples_in_an_actor_and_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    pytest.importorskip("ray")
    options = [*OPTIONS, "--ray", "--importance-cap", 2, "--iterations", 3]
    finish(start("-m", "grpo.train", *options, "--output", tmp_path / "whole"))
    whole = rows(tmp_path / "whole")
    assert len(whole) == 3
    for row in whole:
        # The actor's weights are the trainer's: its log-probs agree after every iteration.
        assert float(row["rollout_difference"]) < 1e-5
        assert row["solved"] != ""
        assert row["nonfinite_rewards"] == "0"
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(max((tmp_path / "again/checkpoints").iterdir()))  # of the last iteration
    finish(start("-m", "grpo.train", "--resume", tmp_path / "again"))
    again = rows(tmp_path / "again")
    for name in ("reward_mean", "loss_objective", "grad_norm"):
        assert [row[name] for row in again] == [row[name] for row in whole]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_what_fails_in_the_actor_is_one_line_here(tmp_path):
    pytest.importorskip("ray")
    output = finish(
        start("-m", "grpo.train", *OPTIONS, "--ray", "--rollout", "vllm", "--output", tmp_path), 2
    )
    assert len(re.findall("^error: --rollout vllm: No module", output, re.MULTILINE)) == 1, output
    assert "Traceback" not in output


def test_a_dead_rollout_actor_ends_the_run_with_one_line_and_it_resumes(tmp_path):
    pytest.importorskip("ray")
    process = start(
        "-m", "grpo.train", *OPTIONS, "--ray", "--iterations", 300, "--output", tmp_path
    )
    wait_for_rows(tmp_path, 2, process)
    (actor,) = [
        pid
        for pid, command in descendants(process.pid).items()
        if command.startswith("ray::Sampler")
    ]
    os.kill(actor, signal.SIGKILL)
    output = finish(process, code=2)
    assert len(error_lines(output)) == 1, output
    assert "Traceback" not in output
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
