"""What FP8 is: formats, the quantized array, recipes, and the amax state that delayed scaling carries.

No device code, no Flax.
"""
