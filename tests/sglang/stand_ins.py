"""What SGLang imports and has no build for CPUs on PyPI: modules that let it start without.

The Python of the environment runs this after the install. A small text model on a CPU calls none of
these kernels: SGLang then computes with PyTorch alone.
"""

import sysconfig
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))

# The package sglang-kernel has it, for GPUs alone. SGLang also asks for pinned memory and for
# events of a stream, for copies to and from a GPU; PyTorch refuses both where there is none.
(SITE / "sgl_kernel").mkdir(exist_ok=True)
(SITE / "sgl_kernel" / "__init__.py").write_text(
    '''
import functools

import torch


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*arguments, **options):
        raise NotImplementedError(f"sgl_kernel.{name} has no build for CPUs here")

    return absent


def _unpinned(make):
    @functools.wraps(make)
    def made(*arguments, **options):
        options.pop("pin_memory", None)
        return make(*arguments, **options)

    return made


for _name in ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like"):
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda tensor, *arguments: tensor


class _Done:
    """An event of a GPU's stream: on a CPU everything before it is done."""

    def __init__(self, *arguments, **options):
        pass

    def record(self, stream=None):
        pass

    wait = record

    def query(self):
        return True

    def synchronize(self):
        pass


torch.cuda.Event = _Done
torch.cuda.current_stream = lambda device=None: None
'''
)

# It describes kernels of torchvision, whose build for CUDA a CPU build of torch does not load.
(SITE / "torchvision" / "_meta_registrations.py").write_text("")
