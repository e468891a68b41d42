"""The device kernels of the FULL component, chosen as `uhrc_core.plugin_api.Kernel` says."""

from functools import partial

import jax

from uhrc_core import plugin_api

__all__ = ["Kernel"]

Kernel = partial(plugin_api.Kernel, platform=jax.default_backend)
