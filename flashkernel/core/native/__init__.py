"""The launch cache and the replay of recorded calls in C++ (core/replay.py has them in Python)."""
