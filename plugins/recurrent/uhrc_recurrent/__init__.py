"""Linear-recurrent attention (KDA, GDN, GLA) for UHRC; `uhrc_recurrent.plugin` declares it."""
