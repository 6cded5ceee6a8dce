"""Pages that several requests use: the prefix index, lookups, forks, beams."""
