"""Stochastic bilevel algorithms on the problems of the published suite, benchopt/benchmark_bilevel."""
