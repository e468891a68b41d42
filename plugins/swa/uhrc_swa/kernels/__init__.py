"""The device kernels of the SWA component, chosen as `uhrc_core.registry.kernels` says."""

from uhrc_full.kernels import Kernel

__all__ = ["Kernel"]
