"""Drop-in replacements for other libraries: change the import, and leave the code as it is."""
