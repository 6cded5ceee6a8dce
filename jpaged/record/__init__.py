"""The engine as a value: statistics, traces, replay, snapshots, files."""
