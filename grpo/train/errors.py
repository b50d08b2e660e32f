"""What the user can put right: shown as one line, without a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

LONGEST_QUOTE = 80
LONGEST_REASON = 400


class InputError(ValueError):
    """A setting, a file or a function that the run cannot use; says which, and what it accepts.

    Its message is one line, whatever it quotes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(line.strip() for line in message.splitlines()))


def first_line(error: Exception) -> str:
    """The first line of an error's message that says something."""
    return next((line for line in str(error).splitlines() if line.strip()), "without a message")


def quoted(value: object) -> str:
    """`value` as in Python's source, cut to a length that can be read."""
    text = repr(value)
    return text if len(text) <= LONGEST_QUOTE else f"{text[: LONGEST_QUOTE - 3]}..."


@contextlib.contextmanager
def blamed_on(what: str) -> Iterator[None]:
    """Whatever the user's code or files raise in here is an InputError that starts with `what`.

    So is SystemExit, which would end the run without a word; Ctrl-C is not.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        if len(reason) > LONGEST_REASON:
            reason = f"{reason[: LONGEST_REASON - 3]}..."
        raise InputError(f"{what}: {reason}") from error
