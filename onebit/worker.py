"""The first moments of a process that `onebit.launch` starts: run by its path, so that nothing slow comes before.

    python onebit/worker.py LAUNCHER_PID MODULE [arguments of its main]

Ctrl-C reaches every process of a terminal. The launcher hands SIGINT over blocked, since Python answers it with a
traceback until it is told otherwise; here it becomes "end at once". And a worker ends when its launcher is gone.
"""

import importlib
import os
import signal
import sys
import threading
import time


def watch(launcher: int) -> None:
    """End this process as soon as its parent is another one."""
    while os.getppid() == launcher:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    threading.Thread(target=watch, args=(int(sys.argv.pop(1)),), daemon=True).start()
    sys.path.pop(0)  # the folder of this file, whose modules go by other names

    main = importlib.import_module(sys.argv.pop(1)).main
    from onebit.train import end_process

    end_process(main())
