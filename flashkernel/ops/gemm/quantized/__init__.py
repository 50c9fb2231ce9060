"""Products with quantized weights whose values become half precision in registers."""
