"""`moe-kernels`: command line of the kernel package; every module in `moe_kernels.commands` is one subcommand.

A subcommand module has `add_parser(subparsers)`, which sets `run` to a function taking the parsed arguments and
returning the exit code. It imports heavy packages inside that function, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from moe_kernels import __version__, commands
from moe_kernels.errors import MoeParityError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print `prog: message` and leave."""
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def build_parser() -> Parser:
    """The parser with all subcommands."""
    parser = Parser(prog="moe-kernels", description="Look at, convert, check and time quantised MoE models.")
    parser.add_argument("--version", action="version", version=f"moe-parity {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for module in sorted(m.name for m in pkgutil.iter_modules(commands.__path__) if not m.name.startswith("_")):
        importlib.import_module(f"{commands.__name__}.{module}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; 0 on success, 2 with one line on stderr for an error the user can mend."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(message)s")
    try:
        return args.run(args)
    except BrokenPipeError:  # the reader of our output went away, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at exit
        return 141
    except MoeParityError as error:
        print(f"moe-kernels {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:  # disk full, no permission
        print(f"moe-kernels {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"moe-kernels {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
