"""A whole GRPO run from the command line: `python -m grpo.train --help`."""
