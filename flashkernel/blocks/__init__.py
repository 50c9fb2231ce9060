"""What rooms share: traced expressions, masks and their tiles."""
