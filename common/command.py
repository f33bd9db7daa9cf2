"""A stage's command line: CONFIG, overrides, --debug; a user's mistake is one line and exit code 2."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn


class StoppedElsewhere(RuntimeError):
    """Another rank had an error and says it; this one leaves with the same exit code and without a word."""

    def __init__(self, rank: int, exit_code: int):
        super().__init__(f"rank {rank} stopped with an error; see its message")
        self.rank, self.exit_code = rank, exit_code


class StageParser(argparse.ArgumentParser):
    """A parser whose errors are one line too."""

    def error(self, message: str) -> NoReturn:
        # overrides are optional; argparse counts them among what is missing
        message = message.replace(", section.key=value", "")
        self.exit(2, f"error: {message}; `{self.prog} --help` says more\n")


def stage_parser(stage: str, description: str) -> argparse.ArgumentParser:
    parser = StageParser(prog=f"./launch.sh {stage}", description=description)
    parser.add_argument("config", help="a recipe, e.g. configs/demo.yaml")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="override any value of the recipe, e.g. train.learning_rate=3e-4",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def run_command(
    parser: argparse.ArgumentParser, main: Callable[[argparse.Namespace], None]
) -> None:
    """Parse, set up logging, run `main`, and turn errors into exit codes: 2 a user's mistake, 130 Ctrl-C, 143 SIGTERM."""
    # deepspeed's launcher puts this before the script's own arguments
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank=")]
    options = parser.parse_intermixed_args(arguments)
    set_up_logging(options.debug)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main(options)
    except KeyboardInterrupt:
        print("stopped; the same command continues where it was", file=sys.stderr)
        sys.exit(130)
    except StoppedElsewhere as error:
        if options.debug:
            raise
        if _on_another_machine(error.rank):
            say_error(str(error))
        sys.exit(error.exit_code)
    # OSError: a full disk, a read-only folder, a path that is a file
    except (ValueError, OSError) as error:
        if options.debug:
            raise
        say_error(str(error))
        sys.exit(2)


def say_error(message: str) -> None:
    """One line on stderr."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _on_another_machine(rank: int) -> bool:
    """Whether nobody here sees that rank's message; true on one rank a machine."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    own = int(os.environ.get("RANK", "0"))
    return size > 0 and own % size == 0 and rank // size != own // size


def set_up_logging(debug: bool = False) -> None:
    """Main rank at INFO, other ranks at WARNING; third parties at WARNING everywhere."""
    main = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING, force=True
    )
    level = (logging.DEBUG if debug else logging.INFO) if main else logging.WARNING
    for room in (
        "common",
        "configs",
        "target",
        "drafter",
        "data",
        "extract",
        "ddtree",
        "evaluation",
        "train",
        "export",
    ):
        logging.getLogger(room).setLevel(level)
    logging.getLogger("progress").setLevel(level)
    logging.getLogger("__main__").setLevel(level)
    if not debug:
        warnings.filterwarnings("ignore")
