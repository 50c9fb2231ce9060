"""Machinery that knows no operator."""
