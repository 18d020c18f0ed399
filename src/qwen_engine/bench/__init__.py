"""Benchmarks a user can run: offline throughput, latency and start-up, and load on a server over HTTP."""
