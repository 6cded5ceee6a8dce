"""Pictures of what the engine did. Each function returns a matplotlib Figure and touches no global state."""
