"""What is trained on: problems with a verifiable reward, made in process or read from a file."""

from __future__ import annotations

import importlib
import json
import math
import random
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import NamedTuple

from .errors import InputError, blamed_on, quoted


class Problem(NamedTuple):
    """A prompt and how a response to it is rewarded."""

    prompt: str
    reward: Callable[[str], float]
    answer: str | None = None  # a response of full reward, for the warm-up
    source: str = "the task"  # named in errors


# A task draws problems: `task(random.Random(seed))` is one.
Task = Callable[[random.Random], Problem]


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _share_before_first_fault(response: str, answer: str) -> float:
    """Share of positions, of the longer of the two, before the first that differs."""
    pairs = list(zip_longest(_squeezed(response), answer))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(pairs)


def _graded(prompt: str, answer: str) -> Problem:
    return Problem(prompt, lambda response: _share_before_first_fault(response, answer), answer)


def sort(rng: random.Random) -> Problem:
    """Sort six digits; the reward is the share of them before the first wrong one."""
    digits = "".join(rng.choices("0123456789", k=6))
    return _graded(f"sort {digits}", "".join(sorted(digits)))


def add(rng: random.Random) -> Problem:
    """Add two numbers below 100; the reward is as for sorting."""
    left, right = rng.randrange(100), rng.randrange(100)
    return _graded(f"add {left} + {right}", str(left + right))


def countdown(rng: random.Random) -> Problem:
    """Reach a target from three numbers with + - *; 1 for it, 0.1 for another use of the three."""
    numbers = [rng.randrange(1, 10) for _ in range(3)]
    answer = "{}{}{}{}{}".format(
        numbers[0], rng.choice("+-*"), numbers[1], rng.choice("+-*"), numbers[2]
    )
    target = evaluate(answer)
    order = rng.sample(numbers, 3)

    def reward(response: str) -> float:
        expression = _squeezed(response)
        if sorted(re.findall(r"\d+", expression)) != sorted(map(str, numbers)):
            return 0.0
        value = evaluate(expression)
        return 0.0 if value is None else 1.0 if value == target else 0.1

    listed = ", ".join(map(str, order))
    return Problem(f"make {target} from {listed}", reward, answer)


def evaluate(expression: str) -> Fraction | None:
    """Value of an expression of whole numbers, + - * / and parentheses; None if it is none."""
    tokens = re.findall(r"\d+|[-+*/()]", expression)
    if "".join(tokens) != expression:
        return None
    tokens.append("")

    def factor() -> Fraction:
        token = tokens.pop(0)
        if token == "(":
            value = total()
            if tokens.pop(0) != ")":
                raise ValueError
            return value
        return Fraction(int(token))

    def product() -> Fraction:
        value = factor()
        while tokens[0] in ("*", "/"):
            value = value * factor() if tokens.pop(0) == "*" else value / factor()
        return value

    def total() -> Fraction:
        value = product()
        while tokens[0] in ("+", "-"):
            value = value + product() if tokens.pop(0) == "+" else value - product()
        return value

    try:
        value = total()
    except (ValueError, ZeroDivisionError, IndexError, RecursionError):
        return None
    return value if tokens == [""] else None


BUILT_IN: dict[str, Task] = {"sort": sort, "add": add, "countdown": countdown}


# What comes from outside


SURROGATE = re.compile("[\ud800-\udfff]")


def check_text(what: str, text: str, source: str) -> None:
    """JSON and Python can write half of a surrogate pair, which no tokenizer reads."""
    if SURROGATE.search(text):
        raise InputError(f"{source}: the {what} {quoted(text)} is not valid Unicode text")


def check_problem(problem: object, source: str) -> None:
    """Whether what a task returned is a problem; `source` is named if not."""
    if not isinstance(problem, Problem):
        raise InputError(
            f"{source}: must return a grpo.train.tasks.Problem, got {type(problem).__name__}"
        )
    if not isinstance(problem.prompt, str):
        raise InputError(
            f"{source}: the prompt of a Problem must be a string, got {quoted(problem.prompt)}"
        )
    if not callable(problem.reward):
        raise InputError(
            f"{source}: the reward of a Problem must be a function of the response, got "
            f"{quoted(problem.reward)}"
        )
    if not isinstance(problem.answer, str | None):
        raise InputError(
            f"{source}: the answer of a Problem must be a string or None, got "
            f"{quoted(problem.answer)}"
        )
    check_text("prompt", problem.prompt, source)
    check_text("answer", problem.answer or "", source)


def reward_of(problem: Problem, response: str) -> float:
    """The reward of a response; what its function raises is an InputError."""
    with blamed_on(f"{problem.source}: the reward failed on the response {quoted(response)}"):
        return float(problem.reward(response))


# Rewards for a file of prompts and answers


def exact(answer: str, source: str) -> Callable[[str], float]:
    """1 for the answer itself, blanks at its ends aside."""
    answer = answer.strip()
    if not answer:
        raise InputError(f"{source}: the answer is empty: no response can match it")
    return lambda response: float(response.strip() == answer)


NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def numeric(answer: str, source: str) -> Callable[[str], float]:
    """1 if the last number of the response is the answer."""
    try:
        number = float(answer.replace(",", ""))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(
            f"{source}: the answer {quoted(answer)} is not a finite number: no response can "
            "match it"
        )

    def reward(response: str) -> float:
        numbers = NUMBER.findall(response)
        return float(bool(numbers) and math.isclose(float(numbers[-1].replace(",", "")), number))

    return reward


EVERY_CHARACTER = "".join(map(chr, range(128)))


def regex(answer: str, source: str) -> Callable[[str], float]:
    """1 if the answer, a regular expression, is found in the response."""
    with blamed_on(f"{source}: the answer {quoted(answer)} is not a regular expression"):
        pattern = re.compile(answer)
    # What `(?!...)` excludes need not be among the characters.
    excludes = "(?!" in answer or "(?<!" in answer
    if pattern.search("") and pattern.search(EVERY_CHARACTER) and not excludes:
        raise InputError(f"{source}: the answer {quoted(answer)} matches any response")
    return lambda response: float(pattern.search(response) is not None)


REWARDS = {"exact": exact, "numeric": numeric, "regex": regex}


def read_problems(path: Path, reward: str) -> list[Problem]:
    """The problems of a JSONL file with a {"prompt": ..., "answer": ...} on each line."""
    if reward not in REWARDS:
        raise InputError(f"--reward {reward}: unknown; accepted: {', '.join(REWARDS)}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"--data {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--data {path}: not UTF-8 text: {error.reason}") from None
    problems = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() also cuts within strings
        if not line.strip():
            continue
        source = f"{path} line {number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{source}: not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:  # too long a number, too deep a nesting
            raise InputError(f"{source}: {type(error).__name__}: {error}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise InputError(
                f'{source}: needs {{"prompt": "...", "answer": "..."}}, got {quoted(line)}'
            )
        answer = entry.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
            raise InputError(
                f"{source}: the answer must be a string or a number, got {quoted(answer)}"
            )
        answer = str(answer)
        check_text("prompt", entry["prompt"], source)
        check_text("answer", answer, source)
        problems.append(
            Problem(
                entry["prompt"],
                REWARDS[reward](answer, source),
                None if reward == "regex" else answer.strip(),
                source,
            )
        )
    if not problems:
        raise InputError(f"--data {path}: no line with a prompt in it")
    return problems


def drawn_from(problems: list[Problem]) -> Task:
    """A task that draws from a list."""
    return lambda rng: rng.choice(problems)


def load_function(name: str) -> Task:
    """The task `module:function`; the function is called as a built-in task is."""
    source = f"--task {name}"
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise InputError(
            f"{source}: accepted: {', '.join(BUILT_IN)}, or module:function with a function "
            "of a random.Random that returns a grpo.train.tasks.Problem"
        )
    with blamed_on(source):
        function = getattr(importlib.import_module(module_name), attribute)

    def task(rng: random.Random) -> Problem:
        with blamed_on(source):
            problem = function(rng)
        check_problem(problem, source)
        named = problem.source != Problem._field_defaults["source"]
        return problem if named else problem._replace(source=source)

    task(random.Random(0))
    return task
