"""The device kernels of the FULL component, chosen as `uhrc_core.kernels` says."""

from functools import partial

import jax

from uhrc_core import kernels

__all__ = ["Kernel"]

Kernel = partial(kernels.Kernel, platform=jax.default_backend)
