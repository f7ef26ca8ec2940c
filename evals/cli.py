"""The `evals` command: a table of subcommands, each in a module of its own that is imported when it is used."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

# name -> (module with `add_arguments(parser)` and `main(options) -> int`, one-line help)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("evals.commands.run", "run a task on a baseline and candidates and judge them"),
    "compare": ("evals.commands.compare", "judge two arms that were run before"),
    "report": ("evals.commands.report", "print or write a run's report in another format"),
    "selftest": ("evals.selftest", "switch real faults on and prove that the gate catches them"),
    "plan": ("evals.plan", "how many items or repeats a margin needs"),
}

EXIT_CODES = """\
exit codes: 0 PASS · 1 FAIL (regression shown) · 2 usage or environment error · 3 INCONCLUSIVE ·
4 INVALID (integrity, protocol or attestation broken) · 5 CHANGED (as accurate, but moved) · 130 interrupted"""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser; only `command`'s module is imported, so `evals --help` stays fast."""
    parser = argparse.ArgumentParser(
        prog="evals", epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Did this kernel change what the model says, and is it still as accurate?",
    )
    parser.add_argument("--version", action="version", version=_version() if command is None else "")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        sub = subparsers.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == command:
            importlib.import_module(module).add_arguments(sub)
    return parser


def _version() -> str:
    import importlib.metadata

    try:
        return f"evals (moe-parity {importlib.metadata.version('moe-parity')})"
    except importlib.metadata.PackageNotFoundError:
        return "evals (moe-parity, not installed)"


def _terminate(number: int, frame: Any) -> None:
    """SIGTERM and SIGHUP end a run as Ctrl-C does: servers stopped, journal kept."""
    signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job is started so
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; errors a user can cause become one line on standard error and exit code 2."""
    from evals.errors import EvalError

    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's and datasets' inner bars; read when tqdm is imported
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if not word.startswith("-")), None)
    parser = build_parser(command if command in COMMANDS else None)
    options = parser.parse_args(words)
    options.argv = words
    handled = [s for s in (signal.SIGTERM, getattr(signal, "SIGHUP", None)) if s is not None]
    try:
        before = {s: signal.signal(s, _terminate) for s in handled}
    except ValueError:  # not in the main thread (a test, a notebook): leave signals alone
        before = {}
    try:
        module = importlib.import_module(COMMANDS[options.command][0])
        return int(module.main(options))
    except EvalError as error:
        print(f"evals: {' '.join(str(error).split())}", file=sys.stderr)
        for line in error.tail:
            print(f"  | {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("evals: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `evals report … | head`
        sys.stderr.close()
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
