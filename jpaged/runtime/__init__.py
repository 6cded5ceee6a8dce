"""The host: the loop around the compiled step, its programs, memory, and what comes out."""
