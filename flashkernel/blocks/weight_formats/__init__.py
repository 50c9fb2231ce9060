"""The formats of `Weight`, one file each; each registers itself. `blocks/weight.py` imports them all."""
