"""Sizes that the kernels for a CPU share with their callers, which must not import numba for them."""

#: Floats in a vector.
LANES = 8
#: Bytes of a float32, of a vector, of a pointer or an int64.
FLOAT = 4
VECTOR = LANES * FLOAT
WORD = 8
