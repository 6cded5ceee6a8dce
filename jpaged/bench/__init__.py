"""Measuring engines: workloads, runs, reports. See `jpaged bench`."""
