"""Measure the candidates of cuBLASLt for the FP8 GEMMs of a program, and keep the fastest in a file."""
