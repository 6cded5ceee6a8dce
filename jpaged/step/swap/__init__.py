"""Pages of preempted requests in the host's pool."""
