"""What operator packages share: traced expressions, masks and their tiles."""
