"""torchrun with quiet failures: a rank's exit code is the launcher's, its one-line message is the last word.

`python -m common.torchrun [torchrun options] -m MODULE ARGS...`
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main() -> None:
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:
            logging.error("rank %d was ended by signal %d", failure.local_rank, -failure.exitcode)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except SignalException as error:
        sys.exit(128 + int(error.sigval))


if __name__ == "__main__":
    main()
