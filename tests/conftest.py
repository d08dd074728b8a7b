"""One torch thread for every test: workers share the machine, and results do not depend on its cores."""

import torch

torch.set_num_threads(1)
