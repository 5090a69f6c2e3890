"""What looks at a program from outside: which GEMMs are FP8 and why, what the compiler made of it,
which algorithms are fastest.
"""
