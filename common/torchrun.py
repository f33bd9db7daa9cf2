"""torchrun with quiet failures: a rank's exit code is the launcher's, its one-line message is the last word.

`python -m common.torchrun [torchrun options] -m MODULE ARGS...`
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from common.command import say_error

CAUSES: dict[int, str] = {
    signal.SIGKILL: " (by hand, or by the system for memory: see dmesg)",
    signal.SIGSEGV: " (a fault in native code)",
    signal.SIGABRT: " (an assertion in native code, see above)",
}
"""What usually sends a signal that no rank sends itself."""
SAVING_S = 600
"""What ranks that are told to stop may take: an evaluation under way and a checkpoint of tens of gigabytes. torchrun's own limit
is 30 seconds, after which it kills them in mid-save."""


def main() -> None:
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_S))
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        # a death first: the others' errors come from it; SIGTERM last: this launcher sends it
        rank, failure = min(
            error.failures.items(),
            key=lambda found: (
                found[1].exitcode == -signal.SIGTERM,
                found[1].exitcode > 0,
                found[0],
            ),
        )
        if failure.exitcode < 0:
            say_error(
                f"rank {rank} on {socket.gethostname()} (process {failure.pid}) was ended by {failure.signal_name()}"
                f"{CAUSES.get(-failure.exitcode, '')}; the same command continues from what is saved"
            )
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except SignalException as error:
        sys.exit(128 + int(error.sigval))


if __name__ == "__main__":
    main()
