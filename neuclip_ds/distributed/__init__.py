"""Everything that crosses ranks: the launch environment and the counted collectives."""
