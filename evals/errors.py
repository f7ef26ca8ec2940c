"""Errors a user of `evals` can cause or meet: one sentence with the remedy, and an exit code."""

from __future__ import annotations


class EvalError(Exception):
    """Base class; the command line prints the message on one line and exits with `exit_code`."""

    exit_code = 2
    tail: list[str] = []  # the end of a server's log, printed below the message


class UsageError(EvalError):
    """An option, task name or combination of options is wrong."""


class DataError(EvalError):
    """The dataset is missing, malformed, has duplicate questions, or cannot be loaded offline."""


class ProtocolError(EvalError):
    """Two runs, or a run and its continuation, do not follow the same protocol."""


class JournalError(EvalError):
    """The journal is damaged, in use by another process, or belongs to another variant."""


class ServerError(EvalError):
    """A server did not start, is not reachable, or refuses every request."""


class AttestationError(EvalError):
    """A server runs another kernel than the one asked for: nothing it says could be used (INVALID)."""

    exit_code = 4


class PreflightError(EvalError):
    """The run cannot work as asked: the token budget does not fit, or the prompts are wrong."""


class Interrupted(EvalError):
    """Ctrl-C or SIGTERM; finished items are in the journal."""

    exit_code = 130
