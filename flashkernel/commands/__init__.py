"""The commands of `flashkernel`, by what they are about; `flashkernel.cli` puts them together."""
