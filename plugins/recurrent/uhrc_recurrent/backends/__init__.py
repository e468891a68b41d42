"""The recurrent backends this plugin brings, one a file. No jax."""

from uhrc_recurrent.backends.gdn import GDN, GDNParams
from uhrc_recurrent.backends.gla import GLA, GLAParams
from uhrc_recurrent.backends.kda import KDA, KDAParams

__all__ = ["BUILTIN_BACKENDS", "GDN", "GLA", "KDA", "GDNParams", "GLAParams", "KDAParams"]

BUILTIN_BACKENDS = (KDA, GDN, GLA)
