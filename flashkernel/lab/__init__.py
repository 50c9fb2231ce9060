"""Benchmarks, checks, tables and plots, all derived from the operators' declarations."""
