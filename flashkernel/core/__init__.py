"""Dispatch, launch, replay, tuning, timing and checking, independent of any operator. See README.md."""
