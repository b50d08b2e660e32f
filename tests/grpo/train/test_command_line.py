"""`python -m grpo.train`, in this process and small: what it writes, refuses and survives."""

import csv
import itertools
import math
import os
import re
import shutil
import signal
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from grpo.train import checkpoints, checks, run
from grpo.train.__main__ import app
from grpo.train.collector import TrainerScores
from grpo.train.tasks import Problem, sort
from grpo.train.tiny_model import build_model, build_tokenizer

SMALL = [
    "--prompts",
    "2",
    "--group-size",
    "2",
    "--mini-batch",
    "2",
    "--warm-up-steps",
    "1",
    "--iterations",
    "3",
]


def train(output, *options, code=0, small=SMALL):
    return invoke(*small, "--output", output, *options, code=code)


def resume(output, *options, code=0):
    return invoke("--resume", output, *options, code=code)


def invoke(*options, code):
    result = CliRunner().invoke(app, [*map(str, options)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def one_error(output):
    """The error that ended a run, which is its last line and the only one of its kind."""
    lines = output.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], output
    assert "Traceback" not in output
    return lines[-1]


def rows(output):
    with (output / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def weights(output):
    """Parameters in the last checkpoint."""
    from torchrl.checkpoint import Checkpoint, CheckpointRotation

    latest = CheckpointRotation(output / "checkpoints", keep_last=2).latest()
    model = build_model(len(build_tokenizer()))
    module = torch.nn.ModuleDict({"model": model})
    Checkpoint(policy=module).load(latest, components=["policy"])
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# Tasks for --task module:function; `test_command_line:name`.


def nan_reward(rng):
    problem = sort(rng)
    calls = iter([math.nan])
    return problem._replace(reward=lambda text: next(calls, problem.reward(text)))


def huge_reward(rng):
    return sort(rng)._replace(reward=lambda text: 1e39)


def always_equal(rng):
    return sort(rng)._replace(reward=lambda text: 0.5)


def broken_reward(rng):
    return sort(rng)._replace(reward=lambda text: 1 / 0)


def sometimes_long(rng):
    problem = sort(rng)
    return problem._replace(prompt=problem.prompt * 40) if rng.random() < 0.6 else problem


def long(rng):
    return sort(rng)._replace(prompt="sort " * 500)


def silent(rng):
    return Problem("sort 1", lambda text: float(text == ""), "")


def interrupted(rng):
    training = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if training and rng.random() < 0.2:
        os.kill(os.getpid(), signal.SIGINT)
    return sort(rng)


def test_a_run_writes_metrics_curves_summary_and_checkpoints(tmp_path):
    output = train(tmp_path)
    assert "3 iterations in" in output
    for phase in ("rollout", "reward", "loss forward", "backward", "optimiser"):
        assert phase in output
    table = rows(tmp_path)
    assert [row["iteration"] for row in table] == [1, 2, 3]
    for name in (
        "reward_mean",
        "ESS",
        "kl_approx",
        "entropy",
        "clip_fraction",
        "rollout_difference",
        "tokens_per_second",
        "grad_norm",
        "loss_objective",
        "seconds/rollout",
    ):
        assert math.isfinite(table[-1][name]), name
    assert table[-1]["rollout_difference"] < 1e-5
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "summary.txt").exists()


def test_resuming_gives_the_parameters_of_the_uninterrupted_run(tmp_path):
    train(tmp_path / "whole", "--save-every", 1)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(max((tmp_path / "again/checkpoints").iterdir()))  # of the last iteration
    resume(tmp_path / "again")
    assert torch.equal(weights(tmp_path / "whole"), weights(tmp_path / "again"))
    whole, again = rows(tmp_path / "whole"), rows(tmp_path / "again")
    assert [row["iteration"] for row in again] == [1, 2, 3]
    for name in ("reward_mean", "loss_objective", "grad_norm"):
        assert again[2][name] == whole[2][name]


def error_of(output):
    """The one line that says what went wrong."""
    (line,) = (line for line in output.splitlines() if line.startswith("error: "))
    return line


def test_a_resumed_run_has_the_reference_of_the_first(tmp_path):
    options = ("--kl-to-ref", 0.1, "--warm-up-steps", 3, "--mini-batch", 4)
    train(tmp_path / "whole", *options, "--save-every", 1)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(max((tmp_path / "again/checkpoints").iterdir()))
    resume(tmp_path / "again")
    assert rows(tmp_path / "again")[2]["kl_to_ref"] == rows(tmp_path / "whole")[2]["kl_to_ref"]
    for content in (b"", b"cut", b"words and words"):
        (tmp_path / "again/reference.pt").write_bytes(content)
        assert "reference.pt: the reference model" in error_of(resume(tmp_path / "again", code=2))


def test_a_directory_with_a_run_is_not_taken_unasked(tmp_path):
    train(tmp_path, "--save-every", 1)
    settings, before = (tmp_path / "settings.json").read_text(), weights(tmp_path)
    error = error_of(train(tmp_path, "--seed", 5, code=2))
    assert f"--resume {tmp_path} goes on with it, --overwrite takes its place" in error
    assert "--clip-low" in error_of(train(tmp_path, "--overwrite", "--clip-low", 5, code=2))
    assert (tmp_path / "settings.json").read_text() == settings
    assert torch.equal(weights(tmp_path), before)
    train(tmp_path, "--overwrite", "--seed", 5, "--iterations", 2)
    assert len(rows(tmp_path)) == 2
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    assert not torch.equal(weights(tmp_path), before)


def test_a_run_can_be_lengthened_and_keeps_its_other_options(tmp_path):
    train(tmp_path)
    assert "--learning-rate cannot be given with --resume" in error_of(
        resume(tmp_path, "--learning-rate", 0.1, code=2)
    )
    resume(tmp_path, "--iterations", 4)
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_its_largest_file(checkpoint):
    cut_in_half(max(checkpoint.rglob("*.memmap"), key=lambda path: path.stat().st_size))


def cut_and_unseal(checkpoint):
    cut_its_largest_file(checkpoint)
    (checkpoint / "seal.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        cut_its_largest_file,
        cut_and_unseal,
        lambda checkpoint: (checkpoint / "manifest.json").write_text("null"),
        lambda checkpoint: (checkpoint / "seal.json").write_text("[" * 200_000),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    train(tmp_path, "--save-every", 1)
    first, last = sorted((tmp_path / "checkpoints").iterdir())
    (tmp_path / "checkpoints/checkpoint-notes").mkdir()
    before = last.with_name("checkpoint-000000000001")
    shutil.copytree(first, before)
    damage(before)
    damage(last)
    output = resume(tmp_path)
    assert not before.exists()
    assert f"{last} is damaged; the one before it is taken" in output.replace("\n", " ")
    assert len(rows(tmp_path)) == 3
    for checkpoint in (tmp_path / "checkpoints").glob("checkpoint-0*"):
        cut_in_half(next(checkpoint.rglob("*.memmap")))
    assert "no checkpoint in" in error_of(resume(tmp_path, code=2))
    assert first.exists()


def test_two_runs_at_once_do_not_share_a_directory(tmp_path):
    train(tmp_path, "--save-every", 1)
    before = rows(tmp_path)
    with run.alone_in(tmp_path, 0):
        assert "another run is at work there" in one_error(resume(tmp_path, code=2))
        assert "another run is at work" in one_error(train(tmp_path, "--overwrite", code=2))
    assert rows(tmp_path) == before
    resume(tmp_path, "--iterations", 4)


def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    train(tmp_path, "--save-every", 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage._replace(free=2 << 20))
    error = one_error(resume(tmp_path, "--iterations", 4, code=2))
    assert "No space left on device" in error
    assert "go on with --resume" in error
    monkeypatch.undo()
    resume(tmp_path, "--iterations", 4)
    assert len(rows(tmp_path)) == 4


@pytest.mark.parametrize("left", ["", "iteration,reward_mean\n1,0.", None])
def test_metrics_come_from_the_checkpoint(tmp_path, left):
    train(tmp_path, "--save-every", 1)
    whole = (tmp_path / "metrics.csv").read_text()
    if left is None:
        (tmp_path / "metrics.csv").unlink()
    else:
        (tmp_path / "metrics.csv").write_text(left)
    resume(tmp_path)
    assert (tmp_path / "metrics.csv").read_text() == whole


@pytest.mark.parametrize("content", ["", "[]", '{"model": null}', '{"loss": "chess"}', "nonsense"])
def test_settings_that_are_none_are_refused(tmp_path, content):
    (tmp_path / "settings.json").write_text(content)
    assert "settings.json: damaged, or of another version" in error_of(resume(tmp_path, code=2))


@pytest.mark.parametrize("name", ["curves.png", "summary.txt"])
def test_what_cannot_be_written_at_the_end_costs_nothing_else(tmp_path, monkeypatch, name):
    monkeypatch.setattr(run, "prepare_output", lambda settings, overwrite: None)
    (tmp_path / name).mkdir()
    output = train(tmp_path)
    assert f"{name} could not be written" in output
    assert "3 iterations in" in output
    assert len(rows(tmp_path)) == 3


def test_an_error_in_training_is_one_line_and_leaves_a_checkpoint(tmp_path, monkeypatch):
    collect = run.RolloutCollector.collect
    calls = []

    def fail(collector):
        calls.append(collector)
        batch = collect(collector)
        if len(calls) == 3:
            raise MemoryError("first line\nsecond line")
        return batch

    train(tmp_path / "whole")
    whole = rows(tmp_path / "whole")
    monkeypatch.setattr(run.RolloutCollector, "collect", fail)
    tmp_path = tmp_path / "cut"
    error = error_of(train(tmp_path, code=2))
    assert "MemoryError: first line (more in" in error
    assert f"stopped after iteration 2; go on with --resume {tmp_path}" in error
    assert "Traceback" in (tmp_path / "error.txt").read_text()
    resume(tmp_path)
    for name in ("reward_mean", "loss_objective", "grad_norm"):
        assert [row[name] for row in rows(tmp_path)] == [row[name] for row in whole]


def test_resuming_a_finished_run_trains_no_further(tmp_path):
    train(tmp_path)
    before = weights(tmp_path)
    assert "3 iterations in" in resume(tmp_path)
    assert len(rows(tmp_path)) == 3
    assert torch.equal(weights(tmp_path), before)


@pytest.mark.parametrize(
    "options",
    [
        "--loss dapo --gradient-accumulation 2 --epochs 2",
        "--loss cispo --semantics torchrl --aggregation prompt_mean",
        "--kl-to-ref 0.1 --kl-to-inference 0.1 --kl-mask-threshold 1",
        "--candidates 4 --keep-return-bounds -0.1 1.1",
        "--importance-cap 2",
        "--dtype bfloat16",
        "--fused-lm-head",
        "--task add",
        "--task countdown",
    ],
)
def test_options(tmp_path, options):
    train(tmp_path, *options.split())
    assert len(rows(tmp_path)) == 3


def test_the_reference_is_the_initial_model(tmp_path):
    train(tmp_path, "--kl-to-ref", 0.1, "--mini-batch", 4)
    table = rows(tmp_path)
    assert abs(table[0]["kl_to_ref"]) < 1e-9
    assert table[2]["kl_to_ref"] > 1e-9


def test_a_model_from_a_directory(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    build_model(len(tokenizer)).save_pretrained(tmp_path / "model")
    train(tmp_path / "run", "--model", tmp_path / "model")


def varying_length(rng):
    return sort(rng) if rng.random() < 0.5 else sort(rng)._replace(prompt="sort 1")


def test_a_model_with_absolute_positions_is_scored_as_it_was_sampled(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=64, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    task = ("--task", "test_command_line:varying_length", "--warm-up-steps", 2)
    for more in ((), ("--fused-lm-head",), ("--importance-cap", 2)):
        output = tmp_path / "-".join(("run", *map(str, more)))
        train(output, "--model", tmp_path / "model", *task, "--prompts", 4, *more)
        for row in rows(output):
            assert row["rollout_difference_max"] < 1e-5


def test_a_run_that_trained_nothing_says_so(tmp_path):
    output = train(tmp_path, "--keep-return-bounds", 5, 6, "--candidates", 3)
    assert "6 groups left out" in output
    assert "nothing was trained" in output


def test_data_from_a_file(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "add 1 + 1", "answer": 2}\n{"prompt": "sort 21", "answer": "12"}\n')
    train(tmp_path / "run", "--data", data, "--reward", "numeric")
    assert len(rows(tmp_path / "run")) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--group-size 1", "--group-size 1: .* at least 2"),
        ("--data none.jsonl", "--data none.jsonl: no such file"),
        ("--task chess", "--task chess: accepted"),
        ("--model no/such/dir/", "--model no/such/dir/"),
        ("--candidates 1", "--candidates 1: fewer than"),
        ("--candidates 8", "does nothing without --keep-return-bounds"),
        ("--keep-return-bounds 1 0", "LOW must be below HIGH"),
        ("--device cuda:99", "--device cuda:99"),
        ("--clip-low 2", "--clip-low 2.0: must be at least 0 and below 1"),
        ("--clip-low nan", "--clip-low nan: must be"),
        ("--clip-high inf", "--clip-high inf: must be a finite number"),
        ("--clip-norm -1", "--clip-norm -1.0: must be above 0"),
        ("--clip-norm nan", "--clip-norm nan: must be above 0"),
        ("--kl-to-ref nan", "--kl-to-ref nan: must be a finite number of at least 0"),
        ("--kl-to-inference 1e308", "--kl-to-inference 1e.308: must be"),
        ("--kl-mask-threshold 0", "--kl-mask-threshold 0.0: must be above 0"),
        ("--entropy-coeff -inf", "--entropy-coeff -inf: must be a finite number"),
        ("--importance-cap nan", "--importance-cap nan: must be"),
        ("--learning-rate -1", "--learning-rate -1.0: must be above 0 and at most 1"),
        ("--threads 99999", "--threads 99999: the machine has"),
        ("--device meta", "--device meta"),
        ("--data none.jsonl --task sort", "--task and --data: only one"),
        ("--reward exact", "--reward is for --data"),
        ("--output /dev/null", "--output /dev/null: .*exist|--output /dev/null: .*director"),
        ("--output /dev/null/run", "--output /dev/null/run: Not a directory"),
        ("--max-new-tokens 200", "the model's context is 128"),
        ("--max-new-tokens 3", "no response of --max-new-tokens 3 can match it"),
        ("--resume nowhere", "--resume nowhere: no run there"),
        ("--task test_command_line:broken_reward", "failed on the response .* ZeroDivisionError"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    error = one_error(train(tmp_path / "run", *options.split(), code=2))
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda: [][0], "IndexError: list index out of range"),
        (lambda: sys.exit("no more\nproblems"), "SystemExit: no more problems"),
        (lambda: None, "must return a grpo.train.tasks.Problem, got NoneType"),
        (lambda: Problem("sort 1", lambda text: sys.exit(1)), "the reward failed .*SystemExit: 1"),
        (lambda: Problem("sort 1", lambda text: None), "the reward failed .*TypeError"),
        (lambda: Problem("sort 1", lambda text: 1 / 0, source="mine"), "mine: the reward failed"),
    ],
)
def test_a_task_that_fails_in_the_second_iteration_leaves_a_checkpoint(
    tmp_path, monkeypatch, fault, message
):
    first = 1 + checks.TRIAL_DRAWS + 2  # loading, the trial and an iteration of two prompts
    draws = itertools.count()
    monkeypatch.setattr(
        sys.modules[__name__],
        "fails_later",
        lambda rng: sort(rng) if next(draws) < first else fault(),
        raising=False,
    )
    options = ("--task", "test_command_line:fails_later", "--warm-up-steps", 0)
    error = one_error(train(tmp_path, *options, code=2))
    assert re.search(message, error)
    assert error.startswith(("error: --task test_command_line:fails_later: ", "error: mine: "))
    assert len(rows(tmp_path)) == 1
    assert weights(tmp_path).isfinite().all()


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_one_clear_line(tmp_path, monkeypatch, package):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    output = train(tmp_path, "--logger", package, code=2)
    assert output.strip().endswith(f"the package is missing; pip install {package}")


def test_tensorboard_gets_every_iteration(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tmp_path, "--logger", "tensorboard")
    (directory,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    accumulator = events.EventAccumulator(str(directory)).Reload()
    for name in ("reward_mean", "solved", "tokens_per_second"):
        assert [event.step for event in accumulator.Scalars(name)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "sort 21", "answer": "12"', "line 2: not JSON"),
        ('{"prompt": "zebra", "answer": "12"}', "line 2: the model's vocabulary lacks"),
        ('{"prompt": "sort 21", "answer": "zebra"}', "line 2: .* no response can match"),
        ('{"prompt": "sort 21", "answer": "1111111111111111111"}', "line 2: .* no response"),
        ('{"prompt": "sort 21", "answer": "1 2"}', "line 2: the answer '1 2' .* makes it '12'"),
        ('{"prompt": "sort 21", "answer": "sort add"}', "line 2: .* makes it 'sortadd'"),
        ('{"prompt": "sort 21", "answer": "<|im_end|>"}', "line 2: .* makes it ''"),
        ('{"prompt": "sort 21", "answer": "1<|im_end|>2"}', "line 2: .* makes it '1'"),
    ],
)
def test_a_bad_line_of_data_is_named(tmp_path, line, message):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "sort 21", "answer": "12"}\n' + line + "\n")
    output = train(tmp_path / "run", "--data", data, code=2)
    assert re.search(message, output), output


def test_an_answer_needs_only_its_reward_from_what_the_tokenizer_makes_of_it(tmp_path, monkeypatch):
    falling = itertools.count(0, -1)
    problems = (
        Problem("sort 21", lambda text: float(text.replace(" ", "") == "12"), "1 2"),
        Problem("sort 21", lambda text: next(falling), "12"),  # comes back as it is: not rewarded
    )
    choose = lambda rng: rng.choice(problems)  # noqa: E731
    monkeypatch.setattr(sys.modules[__name__], "choose", choose, raising=False)
    train(tmp_path, "--task", "test_command_line:choose", "--iterations", 1)


def test_a_tokenizer_that_is_not_the_models_is_refused(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    build_model(20).save_pretrained(tmp_path)
    assert "do not belong together" in train(tmp_path / "r", "--model", tmp_path, code=2)


def truncate_weights(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def break_weights(directory):
    model = build_model(len(build_tokenizer()))
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    model.save_pretrained(directory)


def set_template(template):
    def change(directory):
        tokenizer = build_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(directory)

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate_weights, "its weights: SafetensorError: "),
        (break_weights, "its weights are not finite: model.norm.weight"),
        (lambda path: (path / "tokenizer.json").unlink(), "its tokenizer: .* sentencepiece"),
        (lambda path: (path / "config.json").write_text("{"), "its (tokenizer|weights): "),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "its tokenizer: "),
        (lambda path: (path / "model.safetensors").unlink(), "its weights: OSError: .*no file"),
        (set_template("{% if %}"), "its chat template: TemplateSyntaxError: "),
        (set_template("{{ raise_exception('a\nb') }}"), "its chat template: TemplateError: a b"),
        (set_template("{# #}"), "its chat template: .*no tokens"),
    ],
)
def test_a_damaged_model_is_one_clear_line(tmp_path, damage, message):
    model = tmp_path / "model"
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(model)
    build_model(len(tokenizer)).save_pretrained(model)
    damage(model)
    error = one_error(train(tmp_path / "run", "--model", model, code=2))
    assert re.search(f"^error: --model {model}: {message}", error), error
    assert len(error) < 600


def test_a_prompt_of_no_tokens_is_refused(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    build_model(len(tokenizer)).save_pretrained(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "sort 1", "answer": 1}\n{"prompt": " ", "answer": 1}\n')
    options = ("--model", tmp_path, "--data", data)
    error = one_error(train(tmp_path / "run", *options, code=2))
    assert error.endswith("data.jsonl line 2: the prompt ' ': ValueError: it has no tokens")


def test_a_policy_that_has_diverged_is_one_clear_line(tmp_path, monkeypatch):
    models, draws = [], itertools.count()
    monkeypatch.setattr(
        run, "build_model", lambda size: models.append(build_model(size)) or models[0]
    )

    def poison(rng):
        if next(draws) == 1 + checks.TRIAL_DRAWS + 2:  # the second iteration's first
            models[0].model.norm.weight.data[3] = math.nan
        return sort(rng)

    monkeypatch.setattr(sys.modules[__name__], "poison", poison, raising=False)
    options = ("--task", "test_command_line:poison", "--warm-up-steps", 0)
    error = one_error(train(tmp_path, *options, code=2))
    assert "the policy's probabilities are not finite" in error
    assert len(rows(tmp_path)) == 1


def buffer_after(iterations, output, *options, monkeypatch):
    """What was trained on in each iteration, and the groups that still wait at the end."""
    made, trained = [], []
    make = run.make_advantages
    monkeypatch.setattr(run, "make_advantages", lambda s: made.append(make(s)) or made[0])
    monkeypatch.setattr(
        TrainerScores,
        "__call__",
        lambda self, batch, call=TrainerScores.__call__: trained.append(batch) or call(self, batch),
    )
    train(output, "--mini-batch", 64, "--iterations", iterations, *options)
    assert len(trained) == iterations
    return trained, made[0].queued_groups


@pytest.mark.parametrize("options", ["", "--candidates 5 --keep-return-bounds -1 2"])
def test_a_response_of_nan_reward_is_left_out_and_the_others_of_its_group_stay_together(
    tmp_path, monkeypatch, options
):
    trained, waiting = buffer_after(
        *(2, tmp_path, "--group-size", 4, "--task", "test_command_line:nan_reward"),
        *options.split(),
        monkeypatch=monkeypatch,
    )
    responses = 4 if options else 3  # of the five candidates four are left
    for iteration, batch in enumerate(trained):
        assert batch["group"].unique().tolist() == [2 * iteration, 2 * iteration + 1]
        assert batch["group"].bincount().tolist()[-2:] == [responses] * 2
        sums = [batch["advantage"][batch["group"] == g].sum() for g in batch["group"].unique()]
        assert torch.stack(sums).abs().max() < 1e-4
    assert waiting == 0
    assert [row["nonfinite_rewards"] for row in rows(tmp_path)] == [2, 2]
    assert weights(tmp_path).isfinite().all()
    assert "4 responses left out, reward not finite" in (tmp_path / "summary.txt").read_text()


def test_a_group_is_selected_once_and_from_all_candidates(tmp_path, monkeypatch):
    trained, waiting = buffer_after(
        *(2, tmp_path, "--group-size", 2, "--candidates", 7, "--keep-return-bounds", -1, 2),
        monkeypatch=monkeypatch,
    )
    for batch in trained:
        assert batch["group"].bincount().tolist()[-2:] == [2, 2]
    assert waiting == 0


def test_rewards_beyond_single_precision_count_as_not_finite(tmp_path):
    train(tmp_path, "--task", "test_command_line:huge_reward")
    assert [row["nonfinite_rewards"] for row in rows(tmp_path)] == [4, 4, 4]
    assert [row["dropped_groups"] for row in rows(tmp_path)] == [2, 2, 2]


def test_groups_of_equal_rewards_and_empty_responses_do_no_harm(tmp_path):
    train(tmp_path / "equal", "--task", "test_command_line:always_equal")
    assert weights(tmp_path / "equal").isfinite().all()
    assert rows(tmp_path / "equal")[-1]["skipped_nonfinite_steps"] == 0
    train(tmp_path / "silent", "--task", "test_command_line:silent", "--warm-up-steps", 30)
    assert sum(row["empty_responses"] for row in rows(tmp_path / "silent")) > 0
    assert weights(tmp_path / "silent").isfinite().all()


def test_groups_that_are_all_dropped_are_no_step(tmp_path):
    output = train(tmp_path, "--keep-return-bounds", 2, 3)
    assert [row["dropped_groups"] for row in rows(tmp_path)] == [2, 2, 2]
    assert "6 groups left out, without a finite reward or a selection" in output


def test_prompts_longer_than_the_context_are_left_out_and_counted(tmp_path):
    output = train(tmp_path, "--task", "test_command_line:sometimes_long")
    assert "prompts left out, longer than the context" in output
    assert sum(row["prompts_too_long"] for row in rows(tmp_path)) > 0


def test_a_prompt_that_fits_is_taken_though_the_trial_saw_only_shorter_ones(tmp_path, monkeypatch):
    counter = itertools.count()
    monkeypatch.setattr(checks, "TRIAL_DRAWS", 4)

    def grows(rng):
        count = next(counter) - 4  # loading and the trial have a digit each
        return Problem("sort " + "1" * max(1, 20 * count), lambda text: rng.random(), "1")

    monkeypatch.setattr(sys.modules[__name__], "grows", grows, raising=False)
    options = ("--task", "test_command_line:grows", "--warm-up-steps", 0, "--iterations", 2)
    train(tmp_path, *options, "--save-every", 1)
    assert [row["prompts_too_long"] for row in rows(tmp_path)] == [0, 0]
    assert next(counter) == 9


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("test_command_line:long", "all of 512 prompts drawn are longer than 116 tokens"),
        (None, "all prompts are longer than 116 tokens: the model's context is 128, of which "),
    ],
)
def test_when_no_prompt_fits_it_is_said_which(tmp_path, task, message):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "' + "1" * 200 + '", "answer": 1}\n')
    options = ("--data", data) if task is None else ("--task", task)
    assert message in one_error(train(tmp_path / "run", *options, code=2))


def test_the_warm_up_keeps_within_the_context(tmp_path, monkeypatch):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"n_positions": 48, "n_embd": 16, "n_layer": 1, "n_head": 1}
    ends = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    config = GPT2Config(vocab_size=len(tokenizer), **sizes, **ends)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    draws = itertools.count()
    monkeypatch.setattr(checks, "TRIAL_DRAWS", 4)

    def lengthening(rng):
        draw = next(draws)  # loading and the trial have a digit each
        digits = "1" * (1 if draw < 5 else draw % 60)
        return Problem(f"sort {digits}", lambda text: 0.0, digits)

    monkeypatch.setattr(sys.modules[__name__], "lengthening", lengthening, raising=False)
    options = ("--model", tmp_path / "model", "--task", "test_command_line:lengthening")
    train(tmp_path / "run", *options, "--warm-up-steps", 2, "--iterations", 1)
    assert len(rows(tmp_path / "run")) == 1


def test_ctrl_c_saves_and_ends_cleanly(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    output = train(
        tmp_path,
        *("--task", "test_command_line:interrupted", "--iterations", 200),
    )
    done = len(rows(tmp_path))
    assert 0 < done < 200
    assert f"{done} iterations in" in output
    assert signal.getsignal(signal.SIGINT) is before
    assert list((tmp_path / "checkpoints").iterdir())


def test_help_documents_every_option():
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    for name in ("--model", "--fused-lm-head", "--importance-cap", "--resume", "--logger"):
        assert name in result.output
