"""Where there is no GPU the Triton kernels run in triton's interpreter."""

import os

import torch

if not (torch.cuda.is_available() or torch.xpu.is_available()):
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)
