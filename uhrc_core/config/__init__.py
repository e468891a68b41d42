"""From a TOML file to a configuration with nothing left open."""
