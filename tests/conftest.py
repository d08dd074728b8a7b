"""One torch thread for every test: workers share the machine, and results do not depend on its cores.

Triton decides when it is imported whether kernels are interpreted, so that is said before anything can import it.
"""

import os
import signal

import torch

os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
