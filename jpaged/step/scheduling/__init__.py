"""Which requests run, and on how many tokens: order, evict, admit, grant, pack."""
