"""Measures the candidates of cuBLASLt for the FP8 GEMMs of a program, and keeps the fastest in a file."""
