"""Full attention (MHA, GQA, MLA) for UHRC; `uhrc_full.plugin` declares it."""
