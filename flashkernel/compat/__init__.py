"""The names people already import, served by FlashKernel: change the import and leave the code as it is."""
