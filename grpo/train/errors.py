"""What the user can put right: shown as one line, without a traceback."""


class InputError(ValueError):
    """A setting, a file or a function that the run cannot use; says which, and what it accepts."""
