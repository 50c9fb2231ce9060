"""The formats of `Weight`, one file each; each registers itself. `blocks/weight.py` imports them all."""

import flashkernel.blocks.weight  # noqa: F401 - first: it defines what the formats build on, and imports them in its order
