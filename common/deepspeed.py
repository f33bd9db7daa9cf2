"""The deepspeed launcher, with SIGTERM passed on: on one host it dies of it and leaves its ranks running for nobody.

`python -m common.deepspeed [deepspeed options] MODULE ARGS...`
"""

from __future__ import annotations

import signal
import sys

import psutil
from deepspeed.launcher import runner


def main() -> None:
    told: list[int] = []

    def pass_on(number: int, _: object) -> None:
        told.append(number)
        for (
            child
        ) in psutil.Process().children():  # deepspeed.launcher.launch, which tells its ranks
            child.terminate()

    # over several hosts the launcher sets a handler of its own, which tells them
    signal.signal(signal.SIGTERM, pass_on)
    try:
        runner.main()
    finally:
        if told:
            sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
