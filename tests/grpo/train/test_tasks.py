"""Problems and rewards."""

import json
import random
import re
from fractions import Fraction

import pytest

from grpo.train import tasks
from grpo.train.errors import InputError


@pytest.mark.parametrize("name", tasks.BUILT_IN)
def test_a_built_in_tasks_own_answer_has_full_reward(name):
    rng = random.Random(0)
    for _ in range(200):
        problem = tasks.BUILT_IN[name](rng)
        assert problem.reward(problem.answer) == 1.0
        assert problem.reward(" ".join(problem.answer)) == 1.0
        assert problem.reward("") == 0.0
        assert 0 <= problem.reward("1 2 3") < 1 or problem.answer == "123"


def test_the_reward_counts_up_to_the_first_fault():
    reward = tasks._graded("", "1234").reward
    assert [reward(text) for text in ("1234", "1299", "9234", "12", "12345")] == [
        1.0,
        0.5,
        0.0,
        0.5,
        0.8,
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("8/4/2", 1),
        ("2-3-4", -5),
        ("1/3", Fraction(1, 3)),
        *[(text, None) for text in ("", "1+", "(1", "1)", "1 2", "2/0", "1++2", "a", "(" * 5000)],
    ],
)
def test_expressions(text, value):
    assert tasks.evaluate(text) == value


def test_countdown_wants_each_number_once():
    problem = tasks.countdown(random.Random(0))
    target = problem.prompt.split()[1]
    assert problem.reward(target) == 0.0
    assert problem.reward(problem.answer + "+1") == 0.0


@pytest.mark.parametrize(
    ("kind", "answer", "right", "wrong"),
    [
        ("exact", "yes", " yes ", "yes!"),
        ("numeric", "1,000.5", "it is 3, no: 1000.50", "1000.5 or 7"),
        ("numeric", "-2", "x = -2.0", "2"),
        ("regex", r"^a+$", "aaa", "ab"),
    ],
)
def test_named_rewards(kind, answer, right, wrong):
    reward = tasks.REWARDS[kind](answer, "here")
    assert (reward(right), reward(wrong), reward("")) == (1.0, 0.0, 0.0)


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_file_of_problems(tmp_path):
    lines = [json.dumps({"prompt": "2 + 2", "answer": 4}), "", '{"prompt": "a", "answer": "5"}']
    problems = tasks.read_problems(write(tmp_path / "data.jsonl", *lines), "numeric")
    assert [problem.prompt for problem in problems] == ["2 + 2", "a"]
    assert problems[0].reward("4") == 1.0
    assert problems[0].answer == "4"


@pytest.mark.parametrize(
    ("line", "reward", "message"),
    [
        ("{", "exact", r"data.jsonl line 2: not JSON: .* at column 2"),
        ("[1]", "exact", r"line 2: needs \{"),
        ('{"answer": "1"}', "exact", r"line 2: needs \{"),
        ('{"prompt": "a"}', "exact", "line 2: the answer must be a string or a number, got None"),
        ('{"prompt": "a", "answer": [1]}', "exact", "line 2: the answer must be"),
        ('{"prompt": "a", "answer": " "}', "exact", "line 2: the answer is empty: no response"),
        ('{"prompt": "a", "answer": "x"}', "numeric", "line 2: the answer 'x' is not a finite"),
        ('{"prompt": "a", "answer": "nan"}', "numeric", "line 2: .* no response can match"),
        ('{"prompt": "a", "answer": "("}', "regex", "line 2: .* not a regular expression"),
        ("{}", "fuzzy", "--reward fuzzy: unknown; accepted: exact, numeric, regex"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, reward, message):
    good = '{"prompt": "a", "answer": "1"}'
    with pytest.raises(InputError, match=message):
        tasks.read_problems(write(tmp_path / "data.jsonl", good, line), reward)


@pytest.mark.parametrize(
    ("line", "reward", "message"),
    [
        ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", "exact", "line 2: .*4300 digits"),
        ("[" * 100_000, "exact", "line 2: RecursionError"),
        (r'{"prompt": "\ud800", "answer": "1"}', "exact", r"line 2: the prompt '\\ud800' is not"),
        (r'{"prompt": "a", "answer": "\ud800"}', "exact", r"line 2: the answer '\\ud800' is not"),
        (r'{"prompt": "a", "answer": "\ud800"}', "regex", r"line 2: the answer '\\ud800' is not"),
        ('{"prompt": "a", "answer": "' + "(" * 5000 + '"}', "regex", "line 2: .* not a regular"),
        ('{"prompt": "a", "answer": "a{99999999999}"}', "regex", "line 2: .* not a regular"),
        ('{"prompt": "a", "answer": ""}', "regex", "line 2: the answer '' matches any response"),
        ('{"prompt": "a", "answer": "x?"}', "regex", "line 2: the answer 'x.' matches any"),
        ('{"answer": "' + "x" * 5000 + '"}', "exact", "line 2: needs"),
    ],
)
def test_what_python_cannot_read_is_one_short_line(tmp_path, line, reward, message):
    with pytest.raises(InputError, match=message) as caught:
        tasks.read_problems(
            write(tmp_path / "data.jsonl", '{"prompt":"a","answer":"1"}', line), reward
        )
    assert len(str(caught.value)) < 500
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("answer", ["^$", "^[^x]*$", "^(?!.*sorry)"])
def test_a_regular_expression_may_match_the_empty_response(tmp_path, answer):
    line = json.dumps({"prompt": "a", "answer": answer})
    (problem,) = tasks.read_problems(write(tmp_path / "data.jsonl", line), "regex")
    assert problem.reward("") == 1.0


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_only_line_feeds_separate_lines(tmp_path, start, end):
    prompts = ["a\u2028b", "c\u0085d\x7f", "e"]
    lines = [json.dumps({"prompt": p, "answer": 1}, ensure_ascii=False) for p in prompts]
    path = tmp_path / "data.jsonl"
    path.write_bytes((start + end.join(lines)).encode())
    assert [problem.prompt for problem in tasks.read_problems(path, "exact")] == prompts


def test_a_bad_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl: No such file"):
        tasks.read_problems(tmp_path / "none.jsonl", "exact")
    with pytest.raises(InputError, match="no line with a prompt"):
        tasks.read_problems(write(tmp_path / "empty.jsonl"), "exact")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        tasks.read_problems(tmp_path / "binary", "exact")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chess", "accepted: sort, add, countdown, or module:function"),
        ("no_such_module:f", "No module named"),
        ("math:no_such_function", "has no attribute"),
        ("grpo.train.tasks:exact", "missing 1 required positional argument|must return"),
        ("builtins:str", "must return a grpo.train.tasks.Problem, got str"),
        (".relative:f", "accepted: sort, add, countdown, or module:function"),
        ("math:pi", "TypeError: 'float' object is not callable"),
        ("sys:exit", "SystemExit: <random.Random"),
    ],
)
def test_a_bad_task_is_named(name, message):
    with pytest.raises(InputError, match=f"^--task {re.escape(name)}: .*{message}"):
        tasks.load_function(name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(:", "SyntaxError: .*line 1"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit", "SystemExit"),
        ("raise ValueError('one\\ntwo')", "ValueError: one two"),
        ("def f(rng): raise SystemExit(3)", "SystemExit: 3"),
        ("def f(rng): return None", "must return a grpo.train.tasks.Problem, got NoneType"),
        ("def f(rng): return Problem(5, len)", "the prompt of a Problem must be a string, got 5"),
        ("def f(rng): return Problem('a', 1.0)", "the reward .* must be a function.*, got 1.0"),
        ("def f(rng): return Problem('a', len, 3)", "the answer .* a string or None, got 3"),
        (r"def f(rng): return Problem('\ud800', len)", "the prompt .* is not valid Unicode"),
        (r"def f(rng): return Problem('', len, '\ud800')", "the answer .* is not valid Unicode"),
    ],
)
def test_a_task_that_fails_is_one_line(tmp_path, monkeypatch, source, message):
    name = f"task_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(f"{source}\nfrom grpo.train.tasks import Problem\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=f"^--task {name}:f: .*{message}") as caught:
        tasks.load_function(f"{name}:f")
    assert len(str(caught.value).splitlines()) == 1


def test_ctrl_c_in_a_task_is_not_the_tasks_fault(tmp_path, monkeypatch):
    (tmp_path / "interrupted_task.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        tasks.load_function("interrupted_task:f")


def test_a_function_is_a_task_and_is_named_in_errors():
    problem = tasks.load_function("grpo.train.tasks:add")(random.Random(1))
    assert problem.answer
    assert problem.source == "--task grpo.train.tasks:add"
